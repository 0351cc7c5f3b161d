"""Paths of page prefixes with their last uses: a tree whose edges hold what has the same last use and no branch.

    keys a b c d e          one edge [a b c d e], used by 1
    keys a b c x y          [a b c] used by 2, and below it [d e] by 1 and [x y] by 2

A key stands for its page and all before it. So a whole edge is on a path if its last key is, and where a path leaves an
edge is found by bisection: what a request costs depends on the branches that it passes and on what it adds, not on how
long it is. Uses do not become more recent along a path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from raycache.achievable.recency import Use

KEY_BYTES = 8


class Stretch(NamedTuple):
    """Keys of a path that follow each other and had the same last use.

    Attributes:
        length: number of keys.
    """

    length: int
    use: Use


class _Edge:
    """Keys, packed, with the edges below their last one."""

    __slots__ = ("below", "keys", "use")

    def __init__(self, keys: bytes, use: Use, below: _Edges | None = None) -> None:
        self.keys, self.use, self.below = keys, use, below


_Edges = dict[bytes, _Edge]
"""By their first key."""


class Paths:
    """The tree.

    Attributes:
        num_keys: in it, those of forgotten uses included until they are dropped.
    """

    def __init__(self) -> None:
        self._roots: _Edges = {}
        self.num_keys = 0

    def use(self, keys: bytes, use: Use) -> list[Stretch]:
        """Give all keys of a path a new last use.

        Returns:
            The last uses that they had, in the order of the path, up to the first unknown one.
        """
        found: list[Stretch] = []
        edges, above, at, end = self._roots, None, 0, len(keys)
        while at < end:
            first = keys[at : at + KEY_BYTES]
            edge = edges.get(first)
            if edge is None or edge.use.place < 0:
                if edge is not None:
                    self.num_keys -= _num_keys({first: edges.pop(first)})
                self._add(keys[at:], use, above, edges)
                break
            matched = _matched(keys, at, edge.keys)
            if found and found[-1].use is edge.use:
                found[-1] = Stretch(found[-1].length + matched // KEY_BYTES, edge.use)
            else:
                found.append(Stretch(matched // KEY_BYTES, edge.use))
            if matched < len(edge.keys):
                _split(edge, matched)
            if above is not None and len(edges) == 1:  # nothing branches off between them any longer
                above.keys += edge.keys
                above.below = edge.below
            else:
                above = edge
            above.use = use
            at += matched
            if above.below is None:
                if at == end:
                    break
                above.below = {}
            edges = above.below
        return found

    def _add(self, keys: bytes, use: Use, above: _Edge | None, edges: _Edges) -> None:
        self.num_keys += len(keys) // KEY_BYTES
        if above is not None and not edges:
            above.keys += keys
            above.below = None
        else:
            edges[keys[:KEY_BYTES]] = _Edge(keys, use)

    def drop_forgotten(self) -> None:
        """Drop the keys of forgotten uses."""
        stack, self.num_keys = [self._roots], 0
        while stack:
            edges = stack.pop()
            for first in [first for first, edge in edges.items() if edge.use.place < 0]:
                del edges[first]  # uses below it are older
            for edge in edges.values():
                self.num_keys += len(edge.keys) // KEY_BYTES
                if edge.below:
                    stack.append(edge.below)

    def keep_smallest(self, num_kept: int) -> tuple[np.uint64, Counter[Use]]:
        """Drop keys, the largest first, until so many are left.

        Returns:
            The smallest of the dropped keys, and how many of each use were dropped.
        """
        edges = list(_all(self._roots))
        numbers = np.frombuffer(b"".join([edge.keys for edge in edges]), np.uint64)
        limit = np.partition(numbers, num_kept)[num_kept]
        is_kept = numbers < limit
        kept = numbers[is_kept].tobytes()
        ends = np.cumsum([len(edge.keys) for edge in edges]) // KEY_BYTES
        kept_ends = (KEY_BYTES * np.cumsum(is_kept)[ends - 1]).tolist()
        begins = [0, *kept_ends[:-1]]
        dropped: Counter[Use] = Counter()
        for edge, begin, end in zip(edges, begins, kept_ends, strict=True):
            if num_dropped := len(edge.keys) - (end - begin):
                dropped[edge.use] += num_dropped // KEY_BYTES
                edge.keys = kept[begin:end]
        self._roots = _without_empty(self._roots)
        self.num_keys = len(kept) // KEY_BYTES
        return limit, dropped


def _matched(keys: bytes, at: int, edge: bytes) -> int:
    """Bytes of an edge that a path goes along from `at` on; its first key is on it."""
    length = min(len(edge), len(keys) - at)
    if keys[at + length - KEY_BYTES : at + length] == edge[length - KEY_BYTES : length]:
        return length
    same, other = 1, length // KEY_BYTES
    while other - same > 1:  # the key before `same` is the same one, that before `other` is not
        middle = (same + other) // 2 * KEY_BYTES
        if keys[at + middle - KEY_BYTES : at + middle] == edge[middle - KEY_BYTES : middle]:
            same = middle // KEY_BYTES
        else:
            other = middle // KEY_BYTES
    return same * KEY_BYTES


def _split(edge: _Edge, at: int) -> None:
    """Make an edge end before byte `at`; the rest of it comes below."""
    rest = _Edge(edge.keys[at:], edge.use, edge.below)
    edge.keys, edge.below = edge.keys[:at], {rest.keys[:KEY_BYTES]: rest}


def _all(edges: _Edges) -> Iterator[_Edge]:
    stack = [edges]
    while stack:
        for edge in stack.pop().values():
            yield edge
            if edge.below:
                stack.append(edge.below)


def _without_empty(edges: _Edges) -> _Edges:
    """Edges by the first keys that they have now; what lies below empty ones takes their place."""
    found: _Edges = {}
    stack = [(edges, found)]
    while stack:
        old, target = stack.pop()
        for edge in old.values():
            below, under = edge.below, target
            if edge.keys:
                target[edge.keys[:KEY_BYTES]] = edge
                if below:
                    under = edge.below = {}
            if below:
                stack.append((below, under))
    return found


def _num_keys(edges: _Edges) -> int:
    return sum(len(edge.keys) for edge in _all(edges)) // KEY_BYTES
