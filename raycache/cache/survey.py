"""The largest cached prefixes of a tree, for operators.

A tree of a million pages takes longer to walk than a step may be delayed, so the work is a generator: it yields every
few microseconds, and the tree may change before it continues. What changes meanwhile is counted as it was when the walk
came by, or not at all. A run with a single continuation and that continuation are one prefix here:

    tree      [system] - [turn 1] - [turn 2]         shown     [system] - [turn 1, turn 2]
                       ` [turn 1']                                      ` [turn 1']
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

from raycache.cache.node import Node, Root
from raycache.cache.tree import RadixTree

MOST_NODES = 200_000
"""Nodes that are visited, continuations of the same node newest first."""
_MOST_BRANCHES = 8_192
"""Continuations of one node that are visited: copying more references would take a millisecond."""
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for.

    Attributes:
        limit: prefixes to return per tree.
        depth: levels of prefixes, tenants included.
        roots: seeds of the trees of prefixes to look at; None: all.
        named: seed -> name of its tenant.
        shown: seed whose tokens are in the answer.
        secret: key of the ids, so that they tell nothing about tokens.
    """

    limit: int
    depth: int
    roots: Sequence[bytes] | None
    named: dict[bytes, str]
    shown: bytes
    secret: bytes


@dataclass(slots=True)
class _Prefix:
    """A run of pages and the sums over its continuations.

    Attributes:
        name: tokens of its first page; of a root, the seed.
        level: prefixes above it, roots included; 0 for the whole tree.
        own_pages: pages of the run.
        pages: those and all that follow.
        num_ends: prefixes that end in it or in a continuation.
        num_branches: continuations that were visited.
        branches: the large ones of these.
        is_chain: whether it has a single continuation.
    """

    name: bytes
    level: int = 0
    own_pages: int = 0
    pages: int = 0
    locked_pages: int = 0
    last_used: int = 0
    num_ends: int = 0
    num_branches: int = 0
    branches: list[_Prefix] = field(default_factory=list)
    is_chain: bool = False


_Path = list[tuple[_Prefix, list[Node]]]
"""From the top to the prefix that is visited: (prefix, continuations still to visit)."""


def largest_prefixes(tree: RadixTree, wanted: Wanted) -> Generator[None, None, dict[str, Any]]:
    """Find the largest prefixes of a tree and sum up the rest.

    Returns:
        The whole tree; below it its roots, then prefixes. Each is {"id", "start" (tokens before its run), "tokens" (of
        the run), "pages" (of it and all that follows), "locked_pages", "last_used" (a step), "ends", "others":
        {"prefixes", "pages"}, "prefixes": [...]}. Roots have "tenant", and prefixes that may be shown "head", the token
        ids of their first page. The whole has "is_complete": false if it was too large to visit all of it.
    """
    top = _Prefix(b"")
    if wanted.roots is None:
        path: _Path = [(top, _newest(tree.trie.roots))]
        is_complete = len(tree.trie.roots) <= _MOST_BRANCHES
    else:
        path = [(top, [tree.trie.roots[seed] for seed in wanted.roots if seed in tree.trie.roots])]
        is_complete = True
    sizes: list[int] = []  # of the `limit` largest prefixes so far, as a heap
    num_nodes = 0
    while path:
        prefix, waiting = path[-1]
        if not waiting or num_nodes >= MOST_NODES:
            is_complete = is_complete and not waiting
            path.pop()
            if path:
                _take(path[-1][0], prefix, sizes, wanted)
            yield
            continue
        node = waiting.pop()
        if node.parent is None and not isinstance(node, Root):
            continue  # evicted meanwhile
        num_nodes += 1
        branches = _newest(node.children)
        is_complete = is_complete and len(branches) == len(node.children)
        path.append((_visited(node, level=prefix.level + (not prefix.is_chain)), branches))
        yield
    answer = yield from _described(top, wanted, page_size=tree.page_size)
    return answer | {"is_complete": is_complete}


def _newest(nodes: dict[bytes, Any]) -> list[Node]:
    """The newest nodes, the very newest last."""
    if len(nodes) <= _MOST_BRANCHES:
        return [*nodes.values()]
    return [*islice(reversed(nodes.values()), _MOST_BRANCHES)][::-1]


def _visited(node: Node, *, level: int) -> _Prefix:
    is_root, count = isinstance(node, Root), node.num_pages
    return _Prefix(
        node.seed if isinstance(node, Root) else node.name,
        level,
        own_pages=count,
        pages=count,
        locked_pages=count if node.is_protected else 0,
        last_used=node.last_used,
        num_ends=int(not node.children and not is_root),
        is_chain=len(node.children) == 1 and not is_root,
    )


def _take(above: _Prefix, prefix: _Prefix, sizes: list[int], wanted: Wanted) -> None:
    """Add a prefix, all of which was visited, to the one that it continues."""
    above.pages += prefix.pages
    above.locked_pages += prefix.locked_pages
    above.last_used = max(above.last_used, prefix.last_used)
    above.num_ends += prefix.num_ends
    if above.is_chain:
        above.own_pages += prefix.own_pages
        above.num_branches, above.branches = prefix.num_branches, prefix.branches
        return
    above.num_branches += 1
    if prefix.level > wanted.depth:
        return
    if len(sizes) < wanted.limit:
        heapq.heappush(sizes, prefix.pages)
    elif prefix.pages > sizes[0]:
        heapq.heapreplace(sizes, prefix.pages)
    elif prefix.own_pages or prefix.pages < sizes[0]:
        return  # `limit` others are as large; a root may have one of them below it
    above.branches.append(prefix)


@dataclass(slots=True)
class _Branches:
    """The branches of a prefix that is in the answer, largest first, as far as they are not in it."""

    above: dict[str, Any]
    above_id: bytes
    root: bytes
    depth: int
    start: int
    left: list[_Prefix]


def _described(top: _Prefix, wanted: Wanted, *, page_size: int) -> Generator[None, None, dict[str, Any]]:
    """The answer: the largest prefixes, each below the one that it continues, which is at least as large."""
    answer, number = _facts(top, start=0, page_size=page_size), 0
    left = [_Branches(answer, b"", b"", 0, 0, _by_size(top.branches))]
    heap = [(-one.left[-1].pages, number, one) for one in left if one.left]
    for _ in range(wanted.limit):
        if not heap:
            break
        _, _, among = heapq.heappop(heap)
        prefix = among.left.pop()
        root = among.root or prefix.name
        own_id = blake2b(among.above_id + prefix.name, digest_size=_ID_BYTES, key=wanted.secret).digest()
        found = {"id": own_id.hex(), **_facts(prefix, start=among.start, page_size=page_size)}
        if not among.depth:
            found["tenant"] = wanted.named.get(prefix.name)
        elif root == wanted.shown:
            found["head"] = memoryview(prefix.name).cast("i").tolist()
        among.above["prefixes"].append(found)
        among.above["others"]["prefixes"] -= 1
        among.above["others"]["pages"] -= prefix.pages
        start = among.start + prefix.own_pages * page_size
        below = _Branches(found, own_id, root, among.depth + 1, start, [])
        if below.depth < wanted.depth:
            below.left = _by_size(prefix.branches)
        for one in (among, below):
            if one.left:
                number += 1
                heapq.heappush(heap, (-one.left[-1].pages, number, one))
        yield
    return answer


def _facts(prefix: _Prefix, *, start: int, page_size: int) -> dict[str, Any]:
    return {
        "start": start,
        "tokens": prefix.own_pages * page_size,
        "pages": prefix.pages,
        "locked_pages": prefix.locked_pages,
        "last_used": prefix.last_used,
        "ends": prefix.num_ends,
        "others": {"prefixes": prefix.num_branches, "pages": prefix.pages - prefix.own_pages},
        "prefixes": [],
    }


def _by_size(prefixes: Iterable[_Prefix]) -> list[_Prefix]:
    """The largest last."""
    return sorted(prefixes, key=lambda prefix: prefix.pages)
