"""KV events of the tiers: which prefixes can be reused, as blocks of one page each (observe/kv_events.py).

    tree changes -> TierEvents (one per tier) -> KvEvents (one list, in order) -> publisher

A block is the page with its whole prefix, identified by the first 8 bytes of its digest (keys.py). It is reported when
it enters a tier, after its parent, and again when it leaves, before its parent. Of models with windows or recurrent
states only pages that lead to a restore point are reported, since nothing else can be resumed:

    [ a ][ b ]* - [ c ][ d ]           restore points *; a, b and e are reported, c and d are not
              ` [ e ]*
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from raycache.cache.keys import DIGEST_BYTES, chain_digests, tag_of
from raycache.cache.listener import NoListener, TreeListener
from raycache.cache.node import Node, Root
from raycache.cache.spaces import SpaceSizes
from raycache.memory.pages import PageIds
from raycache.observe.kv_events import CLEARED, Event, Medium, block_removed, block_stored

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


def _path(node: Node) -> PageIds:
    """Pages from the root to the end of a node."""
    return np.concatenate([each.pages for each in node.path()])
