"""Remembers evicted pages without their tokens, to tell whether a miss was once cached.

    root - [ a b c ]            d and e were evicted, later f as another continuation: two ghosts hang at the
                    ` ( d e )   place where [ a b c ] ends
                    ` ( f )

A ghost is a run of evicted pages attached to a place: the end of a node or of another ghost. When its first pages are
cached again they leave the ghost, and the rest is attached where they end. The first page of a run is identified by a
64-bit hash of its tokens; later pages, and pages trimmed off a node that stays, by a sample: the low halves of four
tokens, as hashing them all would cost a third of an insert. The result is exact except when two pages after the same
prefix share a sample, and for the oldest ghosts, which are forgotten to bound memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakValueDictionary

import numpy as np

from raycache.types import PackedTokens

SAMPLE_BYTES = 8
"""Bytes of the sample of one page."""

_NUM_TOKENS = 4  # in a sample
_LEAST_BYTES = 1 << 18
_GHOST_BYTES = 512  # estimated memory of a ghost, its place and its entries, without samples
_Key = int | bytes  # hash of the first page, or its sample if its tokens are no longer known


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """The end of a run of pages, with the ghosts attached to it.

    Attributes:
        ghosts: by hash or sample of their first page.
        num_rests: number of ghosts identified by a sample: remainders of a run.
    """

    ghosts: dict[_Key, _Ghost] = field(default_factory=dict)
    num_rests: int = 0


@dataclass(slots=True, eq=False)
class _Ghost:
    """A run of evicted pages.

    Attributes:
        place: where it is attached; None once it is forgotten or all its pages are cached again.
        key: its key in `place.ghosts`.
        samples: `SAMPLE_BYTES` per page.
        end: the place after its last page; None if no ghost is attached there.
    """

    place: Place | None
    key: _Key
    samples: bytearray
    end: Place | None


class Ghosts:
    """Runs of pages that were evicted.

    Args:
        page_bytes: bytes of packed tokens per page.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        num_halves = page_bytes // 2  # the low half of token i is half 2 i
        self._stride = num_halves // _NUM_TOKENS
        tokens = [page_bytes // 4 * i // _NUM_TOKENS for i in range(1, _NUM_TOKENS + 1)]
        self._halves = [max(0, 2 * token - 2) for token in tokens]
        self._num_halves = num_halves
        self._of_page = itemgetter(*(slice(2 * half, 2 * half + 2) for half in self._halves))
        self._by_age: deque[_Ghost] = deque()  # may include forgotten ghosts
        self._roots: WeakValueDictionary[bytes, Place] = WeakValueDictionary()
        self._num_ghosts = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_ghosts

    def root(self, seed: bytes) -> Place:
        """The place of an empty prefix; it outlives the tree's root."""
        place = self._roots.get(seed)
        if place is None:
            place = self._roots[seed] = Place()
        return place

    def samples(self, tokens: PackedTokens) -> bytes:
        """One per page of these packed tokens, `SAMPLE_BYTES` each."""
        if len(tokens) == self._page_bytes:
            return b"".join(self._of_page(tokens))
        halves = np.frombuffer(tokens, np.uint16)
        if self._num_halves % (2 * _NUM_TOKENS) == 0:  # evenly spaced, so a slice is faster
            return halves[self._stride - 2 :: self._stride].tobytes()
        return bytes(halves.reshape(-1, self._num_halves)[:, self._halves].tobytes())

    def has(self, place: Place, page: bytes) -> bool:
        """Whether a page with these tokens followed this place and was evicted."""
        return hash(page) in place.ghosts or (place.num_rests > 0 and self.samples(page) in place.ghosts)

    def add(self, place: Place, first_page: bytes, samples: bytearray, *, end: Place | None, max_bytes: int) -> None:
        """Record evicted pages.

        Args:
            place: the place that they followed.
            first_page: packed tokens of the first page.
            samples: `SAMPLE_BYTES` per page; kept without a copy.
            end: the place after them, if ghosts are attached to it.
            max_bytes: memory limit of all ghosts; the oldest are forgotten.
        """
        if end is not None and len(end.ghosts) == 1:  # merge with the run that followed and was evicted before
            ghost = next(iter(end.ghosts.values()))
            samples, end = samples + ghost.samples, ghost.end
            self._forget(ghost)
        self._hang(place, hash(first_page), samples, end)
        while self._num_bytes > max_bytes and self._num_bytes > _LEAST_BYTES:
            self._forget(self._by_age.popleft())
        if len(self._by_age) > 2 * self._num_ghosts + 64:
            self._remove_forgotten()

    def add_rest(self, place: Place, samples: bytearray, *, end: Place | None) -> None:
        """Record evicted pages whose tokens are no longer known; arguments as for `add`."""
        place.num_rests += 1
        self._hang(place, bytes(samples[:SAMPLE_BYTES]), samples, end)

    def give_up(self, place: Place, tokens: bytearray, samples: bytes) -> list[tuple[int, Place]]:
        """Remove newly cached pages from the ghosts at `place`.

        Args:
            place: no cached child of it starts with the first page.
            tokens, samples: of the new pages.
        Returns:
            (number of pages, place after them) wherever other ghosts branch off, ascending.
        """
        ends: list[tuple[int, Place]] = []
        known = 0
        while place.ghosts and known < len(samples):
            page = known // SAMPLE_BYTES * self._page_bytes
            key = hash(bytes(tokens[page : page + self._page_bytes]))
            ghost = place.ghosts.get(key) or place.ghosts.get(samples[known : known + SAMPLE_BYTES])
            if ghost is None:
                break
            num_back = _common(ghost.samples, samples[known:])
            known += num_back
            place = ghost.end or Place()
            if num_back < len(ghost.samples):
                place = Place()
                self.add_rest(place, ghost.samples[num_back:], end=ghost.end)
            self._forget(ghost)
            if place.ghosts:
                ends.append((known // SAMPLE_BYTES, place))
        if len(self._by_age) > 2 * self._num_ghosts + 64:
            self._remove_forgotten()
        return ends

    def clear(self) -> None:
        """Forget all ghosts."""
        while self._by_age:
            self._forget(self._by_age.popleft())

    def check(self) -> None:
        """Assert that every ghost is attached where it says, and that the counts match."""
        ghosts = [ghost for ghost in self._by_age if ghost.place is not None]
        assert all(ghost.place is not None and ghost.place.ghosts[ghost.key] is ghost for ghost in ghosts), "lost"
        assert len(ghosts) == self._num_ghosts, f"{self._num_ghosts} ghosts counted, there are {len(ghosts)}"
        assert len(self._by_age) <= 2 * self._num_ghosts + 64, "too many forgotten ghosts are kept"
        num_bytes = sum(_GHOST_BYTES + len(ghost.samples) for ghost in ghosts)
        assert self._num_bytes == num_bytes, f"{self._num_bytes} bytes counted, there are {num_bytes}"

    def _hang(self, place: Place, key: _Key, samples: bytearray, end: Place | None) -> None:
        ghost = place.ghosts[key] = _Ghost(place, key, samples, end)
        self._by_age.append(ghost)
        self._num_ghosts += 1
        self._num_bytes += _GHOST_BYTES + len(samples)

    def _forget(self, ghost: _Ghost) -> None:
        place = ghost.place
        if place is None:
            return
        del place.ghosts[ghost.key]
        if isinstance(ghost.key, bytes):
            place.num_rests -= 1
        ghost.place = None
        self._num_ghosts -= 1
        self._num_bytes -= _GHOST_BYTES + len(ghost.samples)

    def _remove_forgotten(self) -> None:
        self._by_age = deque(ghost for ghost in self._by_age if ghost.place is not None)


def _common(first: bytearray, second: bytes) -> int:
    """Length in bytes of the common prefix of whole samples."""
    if second.startswith(first):
        return len(first)
    size = min(len(first), len(second))
    differs = np.frombuffer(first[:size], np.uint64) != np.frombuffer(second[:size], np.uint64)
    return int(differs.argmax()) * SAMPLE_BYTES if differs.any() else size
