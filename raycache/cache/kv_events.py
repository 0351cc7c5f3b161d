"""KV events of the tiers: which prefixes can be reused, as blocks of one page each (observe/kv_events.py).

    tree changes -> TierEvents (one per tier) -> KvEvents (one list, in order) -> publisher

A block is the page with its whole prefix, identified by the first 8 bytes of its digest (keys.py). It is reported when
it enters a tier, after its parent, and again when it leaves, before its parent. Of models with windows or recurrent
states only pages that lead to a restore point are reported, since nothing else can be resumed:

    [ a ][ b ]* - [ c ][ d ]           restore points *; a, b and e are reported, c and d are not
              ` [ e ]*
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raycache.cache.keys import DIGEST_BYTES, chain_digests, tag_of
from raycache.cache.listener import NoListener, TreeListener
from raycache.cache.node import Node, Root
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_commands import Listed
from raycache.memory.pages import PageIds
from raycache.observe.kv_events import CLEARED, Event, Medium, block_removed, block_stored

_MOST_PAGES = 1 << 14
"""Pages that are being written to the storage whose tokens are kept; of others, events have the hashes only."""
_MOST_PLACED = 4096
_MOST_TOKENS = 1 << 16
"""Tokens after which a batch is handed over without waiting for the end of the step."""


class Publisher(Protocol):
    """Sends batches of events; never waits for readers."""

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch."""
        ...

    def close(self) -> None:
        """Stop sending."""
        ...


class NoKvEvents:
    """Stands in where no events are published."""

    def tier(self, medium: Medium, sizes: SpaceSizes) -> TreeListener:
        """Return a listener that ignores a tier's changes."""
        return NoListener()

    def storage(self, page_size: int) -> None:
        """Return None."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class KvEvents:
    """The events of all tiers of one decider, in order. The first tells readers to forget an earlier decider's.

    Args:
        publisher: gets a batch per step with changes.
        plain_root: seed of prefixes without a salt; blocks below other seeds are marked as not for everyone.
    """

    def __init__(self, publisher: Publisher, *, plain_root: bytes) -> None:
        self._publisher, self._plain_root = publisher, plain_root
        self._events: list[Event] = [CLEARED]
        self._num_tokens = 0
        self._removed: tuple[Medium, list[int]] | None = None  # the last event, while others can join it

    def tier(self, medium: Medium, sizes: SpaceSizes) -> TreeListener:
        """Return the listener to a tier's tree."""
        return TierEvents(self, medium, sizes)

    def storage(self, page_size: int) -> StorageEvents:
        """Return what reports the blocks of the storage."""
        return StorageEvents(self, page_size)

    def stored(self, medium: Medium, root: bytes, parent: int | None, tokens: bytes, hashes: list[int]) -> None:
        """Record blocks that entered a tier.

        Args:
            root: seed of their prefix; only read without a parent.
            parent: hash of the block before them, None at the start of a prefix.
            tokens: packed tokens of the blocks.
        """
        namespace = root.hex()[:16] if parent is None and root != self._plain_root else ""
        self._events.append(block_stored(hashes, parent=parent, tokens=tokens, medium=medium, namespace=namespace))
        self._removed = None
        self._num_tokens += len(tokens) // 4
        if self._num_tokens >= _MOST_TOKENS:
            self.flush()

    def placed(self, medium: Medium, hashes: list[int]) -> None:
        """Record blocks that are in a tier, of which no more is known."""
        for start in range(0, len(hashes), _MOST_PLACED):
            self.stored(medium, self._plain_root, None, b"", hashes[start : start + _MOST_PLACED])

    def removed(self, medium: Medium, hashes: list[int]) -> None:
        """Record blocks that left a tier, continuations before what they continue."""
        if self._removed is not None and self._removed[0] is medium:
            self._removed[1].extend(hashes)
            return
        self._removed = (medium, hashes)
        self._events.append(block_removed(hashes, medium=medium))

    def flush(self) -> None:
        """Hand over what was recorded."""
        if self._events:
            events, self._events, self._num_tokens, self._removed = self._events, [], 0, None
            self._publisher.publish(events)

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


class TierEvents:
    """Which blocks of one tier can be reused.

    Args:
        log: gets the events.
        sizes: of the tier.
    """

    def __init__(self, log: KvEvents, medium: Medium, sizes: SpaceSizes) -> None:
        self._log, self._medium = log, medium
        self._page_size = sizes.page_size
        self._has_points = bool(sizes.windows or sizes.states)
        self._num_uses = np.zeros(sizes.num_pages, np.int32)  # restore points that a page leads to; without any: 1
        self._digests = np.zeros((sizes.num_pages, DIGEST_BYTES), np.uint8)  # of reported pages

    def added(self, node: Node, num_pages: int) -> None:
        """See `TreeListener`."""
        if not self._has_points:
            self._store(node, num_pages)

    def dropped(self, pages: PageIds) -> None:
        """See `TreeListener`."""
        if not self._has_points:
            self._num_uses[pages] = 0
            self._log.removed(self._medium, self._hashes(pages[::-1]))
        assert not self._num_uses[pages].any(), "a page that leads to a restore point left the tree"

    def point_added(self, node: Node) -> None:
        """See `TreeListener`."""
        pages = _path(node)
        num_new = int((self._num_uses[pages] == 0).sum())  # the last ones: all before a reported page are reported
        self._num_uses[pages[: len(pages) - num_new]] += 1
        self._store(node, num_new)

    def point_dropped(self, node: Node) -> None:
        """See `TreeListener`."""
        pages = _path(node)
        self._num_uses[pages] -= 1
        useless = pages[self._num_uses[pages] == 0]
        if len(useless):
            self._log.removed(self._medium, self._hashes(useless[::-1]))

    def _store(self, node: Node, num_pages: int) -> None:
        """Report the last pages of the path to a node."""
        if num_pages == 0:
            return
        runs, keys, missing = [], [], num_pages
        while True:
            count = min(missing, node.num_pages)
            runs.append(node.pages[node.num_pages - count :])
            keys.append(node.key[len(node.key) - 4 * self._page_size * count :])
            missing -= count
            if not missing:
                break
            assert node.parent is not None, "more pages than the path has"
            node = node.parent
        parent, root = None, b""
        if count < node.num_pages:
            before = self._digest(int(node.pages[-count - 1]))
        else:
            assert node.parent is not None, "roots have no pages"
            node = node.parent
            before = node.seed if isinstance(node, Root) else self._digest(int(node.pages[-1]))
        if isinstance(node, Root):
            root = node.seed
        else:
            parent = tag_of(before)
        pages, tokens = np.concatenate(runs[::-1]), b"".join(keys[::-1])
        digests = chain_digests(before, tokens, first=0, stop=num_pages, page_size=self._page_size)
        self._num_uses[pages] = 1
        self._digests[pages] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        self._log.stored(self._medium, root, parent, tokens, self._hashes(pages))

    def _digest(self, page: int) -> bytes:
        return bytes(self._digests[page])

    def _hashes(self, pages: PageIds) -> list[int]:
        """`tag_of` the pages' digests."""
        hashes: list[int] = np.ascontiguousarray(self._digests[pages, :8]).view("<u8")[:, 0].tolist()
        return hashes


@dataclass(frozen=True, slots=True)
class _Page:
    """What an event says of a stored page.

    Attributes:
        before: digest of the page before it; that of its root for the first one.
        is_first: whether it begins a prefix.
    """

    before: bytes
    is_first: bool
    tokens: bytes


class StorageEvents:
    """Which blocks the storage has, by listings of their digests.

    Of pages that this engine has written the tokens are known; of those that it found there, as after a restart, only
    hashes are reported, which are those of the same block in every other tier.

    Args:
        log: gets the events.
    """

    def __init__(self, log: KvEvents, page_size: int) -> None:
        self._log, self._page_bytes = log, 4 * page_size
        self._reported: set[int] = set()
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # written, and not listed yet

    def note(self, node: Node, digests: Sequence[bytes], numbers: Iterable[int]) -> None:
        """Note what pages consist of that are being written.

        Args:
            node: where their prefix ends.
            digests: of all pages of the prefix.
            numbers: which of them are written, ascending.
        """
        root, *runs = node.path()
        assert isinstance(root, Root), "a path begins with a root"
        tokens, size = b"".join(run.key for run in runs), self._page_bytes
        for number in numbers:
            before = digests[number - 1] if number else root.seed
            page = _Page(before, number == 0, tokens[number * size : (number + 1) * size])
            self._pages.pop(digests[number], None)
            self._pages[digests[number]] = page
        while len(self._pages) > _MOST_PAGES:
            self._pages.popitem(last=False)

    def take(self, listed: Listed) -> None:
        """Report what a listing has changed."""
        added = dict.fromkeys(listed.added)
        tags = {tag_of(digest) for digest in added}
        gone = self._reported - tags if listed.is_whole else {tag_of(digest) for digest in listed.removed}
        self.remove(gone)
        new = {digest: None for digest in added if tag_of(digest) not in self._reported}
        self._reported |= tags
        known = [digest for digest in self._pages if digest in new]
        for run in self._runs(known):
            first = self._pages[run[0]]
            parent = None if first.is_first else tag_of(first.before)
            tokens = b"".join(self._pages[digest].tokens for digest in run)
            hashes = [tag_of(digest) for digest in run]
            self._log.stored(Medium.STORAGE, first.before, parent, tokens, hashes)
        for digest in known:
            del new[digest]
        for digest in added:
            self._pages.pop(digest, None)
        self._log.placed(Medium.STORAGE, [tag_of(digest) for digest in new])

    def remove(self, tags: Set[int] | None = None) -> None:
        """Report that blocks are gone; None: all."""
        gone = sorted(self._reported if tags is None else self._reported & tags)
        self._reported.difference_update(gone)
        if gone:
            self._log.removed(Medium.STORAGE, gone)

    def _runs(self, digests: Iterable[bytes]) -> Iterator[list[bytes]]:
        """Group pages that continue each other."""
        run: list[bytes] = []
        for digest in digests:
            page = self._pages[digest]
            if run and (page.is_first or page.before != run[-1]):
                yield run
                run = []
            run.append(digest)
        if run:
            yield run


def _path(node: Node) -> PageIds:
    """Pages from the root to the end of a node."""
    return np.concatenate([each.pages for each in node.path()])
