"""Catalog of the host tier in shared memory, from which the next decider recovers the tree.

Only the decider writes it. It may die between any two stores, so a record's `valid` byte is cleared before the record
changes and set once it is complete.

    page    valid 1 | digest 32 | parent 4 | seed 32 (used at the first page of a prefix) | tokens 4 * S
    point   valid 1 | per space: number of ids 4, ids 4 * width         the restore point at the end of that page

Record i describes host page i; each field is a separate array. Recovery verifies every page: its digest must follow
from its parent's digest and its tokens (keys.py).
"""

# Shapes in this file: N host pages, S tokens per page, P pages of one call.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raycache.cache.keys import DIGEST_BYTES, PackedDigests, chain_digests, tag_of
from raycache.cache.node import Parts
from raycache.memory.arena import Arena
from raycache.memory.component import FULL
from raycache.memory.pages import PageIds
from raycache.types import PackedTokens

_ALIGN = 64
_DIGEST = np.dtype(f"V{DIGEST_BYTES}")
_NONE = -1

Holds = Callable[[str, Sequence[int], Sequence[int]], Sequence[bool]]
"""(space, units, expected tags) -> for each unit, whether its slot holds the state with that tag."""


@dataclass(frozen=True)
class Branch:
    """A recovered prefix, from its first page to the last recorded one.

    Attributes:
        seed: start of its digest chain (keys.py).
        tokens: packed; whole pages.
        pages: host page ids, in order.
        points: restore points as (length in pages, parts), ascending; one shared by branches is listed in the first.
    """

    seed: bytes
    tokens: bytes
    pages: PageIds
    points: list[tuple[int, Parts]]


def slots_hold(arena: Arena) -> Holds:
    """Check slot headers in an arena: a unit is intact if the slots of all its ranks carry its tag.

    Units lost on other nodes are not seen here; loading them fails later.
    """
    headers = {
        space: [arena.headers(rank, space) for rank in arena.layout.ranks if arena.layout.pieces(rank, space)]
        for space in arena.layout.spaces
    }

    def holds(space: str, units: Sequence[int], tags: Sequence[int]) -> Sequence[bool]:
        wanted, are_held = np.asarray(tags, np.uint64), np.ones(len(units), np.bool_)
        for header in headers.get(space, ()):
            are_held &= header[list(units), 0] == wanted
        found: list[bool] = are_held.tolist()
        return found

    return holds


class Catalog:
    """Records of host pages and of restore points at their ends.

    Args:
        memory: at least `num_bytes` long; zeroed when new.
        sizes: component space -> number of host units.
        page_size: tokens per page.
        part_widths: space -> maximum ids per restore point; 1 for state slots.
    """

    def __init__(
        self, memory: memoryview, *, sizes: Mapping[str, int], page_size: int, part_widths: Mapping[str, int]
    ) -> None:
        self._sizes, self._widths = dict(sizes), dict(part_widths)
        self._page_bytes = 4 * page_size
        self._records = _Records(memory, _fields(sizes[FULL], page_size, part_widths), spaces=tuple(part_widths))

    @staticmethod
    def num_bytes(*, sizes: Mapping[str, int], page_size: int, part_widths: Mapping[str, int]) -> int:
        """Bytes that a catalog of these sizes needs."""
        fields = _fields(sizes[FULL], page_size, part_widths)
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in fields)

    def add_pages(
        self, ids: PageIds, *, digests: PackedDigests, tokens: PackedTokens | memoryview, parent: int, seed: bytes
    ) -> None:
        """Record consecutive pages.

        Args:
            ids: P host pages.
            digests: P digests.
            tokens: packed, exactly P * S.
            parent: preceding host page, -1 if they start a prefix.
            seed: start of the digest chain.
        """
        if not len(ids):
            return
        assert len(digests) == len(ids) * DIGEST_BYTES, f"{len(digests)} bytes of digests of {len(ids)} pages"
        assert len(tokens) == len(ids) * self._page_bytes, f"{len(tokens) // 4} tokens of {len(ids)} pages"
        records = self._records
        self.drop_pages(ids)
        records.digests[ids] = np.frombuffer(digests, _DIGEST)
        records.tokens[ids] = np.frombuffer(tokens, records.tokens.dtype)
        records.parents[ids[1:]] = ids[:-1].astype(np.int32)  # faster than to convert while assigning
        records.parents[ids[0]] = parent
        if parent == _NONE:
            records.seeds[ids[0]] = np.frombuffer(seed, _DIGEST)[0]
        records.valid[ids] = 1

    def drop_pages(self, ids: PageIds) -> None:
        """Erase the records of pages, with the restore points at their ends."""
        if self._widths:
            self._records.has_point[ids] = 0
        self._records.valid[ids] = 0

    def digests(self, ids: PageIds) -> PackedDigests:
        """Digests of recorded pages."""
        return self._records.digests.take(ids).tobytes()

    def add_point(self, page: int, parts: Parts) -> None:
        """Record the restore point at the end of a page; `parts` must cover every point space."""
        assert set(parts) == set(self._widths), f"a restore point has parts of {set(self._widths)}, got {set(parts)}"
        records = self._records
        records.has_point[page] = 0
        for space, units in parts.items():
            records.num_parts[space][page] = len(units)
            records.parts[space][page, : len(units)] = units
        records.has_point[page] = 1

    def drop_point(self, page: int) -> None:
        """Erase the restore point at the end of a page."""
        self._records.has_point[page] = 0

    def recover(self, holds: Holds = lambda space, units, tags: [True] * len(units)) -> list[Branch]:
        """Read an earlier decider's records; damaged and unreachable ones are marked invalid.

        Args:
            holds: check of the slots' headers.
        Returns:
            Branches that restore all pages and points when inserted into a RadixTree in this order.
        """
        records = self._records
        chains = _Chains(records, holds)
        lost = np.flatnonzero(records.valid)
        self.drop_pages(lost[~np.isin(lost, list(chains.depths))])
        points = self._points(chains, holds)
        lost = np.flatnonzero(records.has_point)
        records.has_point[lost[~np.isin(lost, list(points))]] = 0
        return [
            Branch(
                records.seeds[path[0]].tobytes(),
                records.tokens[path].tobytes(),
                np.asarray(path, np.intp),
                [(number + 1, points[path[number]]) for number in range(first, len(path)) if path[number] in points],
            )
            for path, first in chains.paths()
        ]

    def _points(self, chains: _Chains, holds: Holds) -> dict[int, Parts]:
        """Restore points with intact parts, by the page at whose end they stand."""
        points, taken = dict[int, Parts](), set[tuple[str, int]]()
        most = max(self._widths.values(), default=0)
        for path, first in chains.paths():
            for number in range(first, len(path)):
                parts = self._point(path[number])
                if parts is None or not _are_held(
                    parts, chains.tags(path[max(0, number + 1 - most) : number + 1]), holds
                ):
                    continue
                # Restore points may share window pages, but not state slots.
                own = {(space, unit) for space, units in parts.items() for unit in units if self._widths[space] == 1}
                if not own & taken:
                    points[path[number]] = parts
                    taken |= own
        return points

    def _point(self, page: int) -> Parts | None:
        """The restore point at the end of a page, or None if there is none or its ids are out of range."""
        if not self._records.has_point[page]:
            return None
        parts = dict[str, Sequence[int]]()
        for space, width in self._widths.items():
            count = int(self._records.num_parts[space][page])
            if not 0 <= count <= width:
                return None
            parts[space] = tuple(self._records.parts[space][page, :count].tolist())
            if not all(0 <= unit < self._sizes[space] for unit in parts[space]):
                return None
        return parts


class _Records:
    """The catalog's arrays, with one entry per host page.

    Attributes:
        valid, has_point: 0 or 1.
        digests, tokens, seeds: as bytes.
        parents: host pages, -1 for none.
        num_parts, parts: space -> number of ids of the restore point, and the ids.
    """

    def __init__(self, memory: memoryview, fields: Iterable[_Field], *, spaces: Sequence[str]) -> None:
        arrays, offset = [], 0
        for dtype, shape in fields:
            arrays.append(np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape))
            offset += _aligned(arrays[-1].nbytes)
        self.valid, self.has_point, self.digests, self.seeds, self.tokens, self.parents, *parts = arrays
        self.num_parts = dict(zip(spaces, parts[::2], strict=True))
        self.parts = dict(zip(spaces, parts[1::2], strict=True))


_Field = tuple[np.dtype[Any], tuple[int, ...]]
"""Type and shape of an array."""


def _fields(num_pages: int, page_size: int, part_widths: Mapping[str, int]) -> list[_Field]:
    """The arrays, in memory order."""
    flag, number = np.dtype(np.uint8), np.dtype(np.int32)
    types = (flag, flag, _DIGEST, _DIGEST, np.dtype(f"V{4 * page_size}"), number)
    fields: list[_Field] = [(dtype, (num_pages,)) for dtype in types]
    for width in part_widths.values():
        fields += [(number, (num_pages,)), (number, (num_pages, width))]
    return fields


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


class _Chains:
    """Pages reachable from the first page of a prefix, with verified digests.

    Attributes:
        depths: page -> its index in the prefix, in depth-first order: parents before children.
    """

    def __init__(self, records: _Records, holds: Holds) -> None:
        self._records = records
        pages = np.flatnonzero(records.valid)
        tags = [tag_of(digest) for digest in records.digests[pages].tolist()]
        pages = pages[np.asarray(holds(FULL, pages.tolist(), tags), np.bool_)]
        children: dict[int, list[int]] = {}
        for page, parent in zip(pages.tolist(), records.parents[pages].tolist(), strict=True):
            children.setdefault(parent, []).append(page)
        self.depths = self._verified(children)

    def tags(self, pages: Sequence[int]) -> list[int]:
        """Tags of the pages' digests."""
        return [tag_of(digest) for digest in self._records.digests[pages].tolist()]

    def paths(self) -> Iterator[tuple[list[int], int]]:
        """For each leaf: (pages from the root to it, how many of them the previous path shares)."""
        path, num_known = list[int](), 0
        for page, depth in self.depths.items():
            if depth < len(path):
                yield path, num_known
                path, num_known = path[:depth], depth
            path.append(page)
        if path:
            yield path, num_known

    def _verified(self, children: Mapping[int, Sequence[int]]) -> dict[int, int]:
        depths, known = dict[int, int](), set[bytes]()
        waiting = [(page, 0) for page in children.get(_NONE, ())]
        while waiting:
            page, depth = waiting.pop()
            digest = self._records.digests[page].tobytes()
            # A duplicate was being moved by a decider that died before it could drop the old record.
            if digest not in known and digest == self._digest(page):
                known.add(digest)
                depths[page] = depth
                waiting += [(child, depth + 1) for child in children.get(page, ())]
        return depths

    def _digest(self, page: int) -> bytes:
        """The expected digest of a page."""
        records = self._records
        parent = int(records.parents[page])
        before = records.seeds[page] if parent == _NONE else records.digests[parent]
        tokens = records.tokens[page].tobytes()
        return chain_digests(before.tobytes(), tokens, first=0, stop=1, page_size=len(tokens) // 4)


def _are_held(parts: Parts, tags: Sequence[int], holds: Holds) -> bool:
    """Whether the slots of a restore point hold the state of these last pages: a unit for each page, or one for all."""
    return all(
        len(units) <= len(tags) and all(holds(space, units, tags[len(tags) - len(units) :]))
        for space, units in parts.items()
    )
