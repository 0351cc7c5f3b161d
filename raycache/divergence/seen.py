"""The prompts seen lately, as a radix tree of token ids for each cache salt, within a bound of bytes.

    root - [system, question 1, answer 1]                 a prompt that continues a known one extends its leaf
               |
    root - [system] - [question 1, answer 1, question 2]  one that leaves it splits the edge where it does
                    ` [question 3]

The least recently used leaf goes first. Edges are bytes, which are compared as fast as memory is read. What was
generated waits at its leaf until a prompt goes on there: most never does.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycache.types import packed

Edge = bytes | memoryview
Tokens = NDArray[np.int32]

NODE_BYTES = 2048
"""At least what a node takes beside its tokens, with its source and note."""
_TOKEN_BYTES = 4
_MOST_TIMES = 4
"""A leaf that is longer than this many times what continues it is not copied, but gets a child."""
_MOST_MERGED = 4096 * _TOKEN_BYTES
"""Bytes of an edge that is joined with another one."""
_FIRST_LOOK = 1024
"""Tokens compared first, then eight times as many: what is compared grows with what is shared, not with the edge."""


@dataclass(slots=True)
class Source:
    """The request that a part of the tree was last seen in.

    Attributes:
        seen_s: its arrival.
        computed_s: when its prompt was computed; inf until then.
        expires_s: end of its cache_ttl_s; inf without one.
        sizes: characters of its last messages, by their index; None: a plain prompt.
    """

    seen_s: float
    computed_s: float = float("inf")
    expires_s: float = float("inf")
    sizes: Mapping[int, int] | None = None


class Node:
    """An edge of the tree and what is below it.

    Attributes:
        edge: its tokens, packed; a view of a prompt's array, or copied.
        first: the first of them, by which its parent knows it.
        num_bytes: of what holds the edge.
        tail: of a leaf, what was generated behind it, packed; not yet part of the tree.
        latest: the child that was used last; it is also the last one to go.
        note: for whoever looks at prompts that part at its end.
    """

    __slots__ = ("children", "edge", "first", "latest", "note", "num_bytes", "parent", "source", "tail")

    def __init__(self, edge: Edge, num_bytes: int, parent: Node | None, source: Source, first: int) -> None:
        self.edge, self.num_bytes, self.parent, self.source, self.first = edge, num_bytes, parent, source, first
        self.children: dict[int, Node] = {}
        self.latest: Node | None = None
        self.tail = b""
        self.note: object = None


class Match(NamedTuple):
    """The longest known prefix of a prompt. A tuple, as there is one for each request.

    Attributes:
        length: its tokens.
        source: the request that had it last; None if the length is 0.
        node: ends where the prompts part; None if they share nothing, or if one is the beginning of the other.
        other: how the known prompt goes on there, the one used last of several; None as `node` is.
        leaf: ends with the prompt; None if a known one goes on there.
    """

    length: int
    source: Source | None
    node: Node | None
    other: Node | None
    leaf: Node | None


class SeenPrompts:
    """The tree.

    Args:
        max_bytes: of all salts together.
    Attributes:
        num_bytes: taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[str, Node] = {}
        self._leaves: OrderedDict[Node, str] = OrderedDict()  # leaf -> salt, the least recently used first
        self.num_bytes = 0

    def add(self, salt: str, tokens: Sequence[int], source: Source) -> Match:
        """Find the longest known prefix of a prompt, then remember the prompt.

        Args:
            tokens: at least one; those of an `array("i")` are read where they are, and must not change. Of a prompt
                that would take more than a quarter of the bound, the beginning is kept.
        """
        prompt = memoryview(tokens if isinstance(tokens, array) else array("i", tokens))
        if 16 * len(prompt) > self._max_bytes:
            prompt = memoryview(array("i", prompt[: self._max_bytes // 16].tobytes()))
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(b"", 0, None, source, 0)
            self.num_bytes += NODE_BYTES
        data, size = prompt.cast("B"), _TOKEN_BYTES * len(prompt)
        node, within, at = self._descend(root, prompt, data)
        goes_on = within < len(node.edge) or bool(node.children) or bool(node.tail)
        known = node.source if at else None
        parted = other = None
        if at < size:
            if within < len(node.edge):
                node = self._split(node, within)
            if at and goes_on:
                parted, other = node, node.latest
            # Copying most of a prompt costs more than keeping all of it.
            held: tuple[Edge, int] = (bytes(data[at:]), size - at) if 4 * at > size else (data[at:], size)
            first = prompt[at // _TOKEN_BYTES]
            leaf: Node | None = self._grow(node, *held, source, salt, first)
            assert leaf is not None
            node = leaf
        else:
            leaf = None if goes_on else node
        self._touch(node, source)
        if self.num_bytes > self._max_bytes:
            self._evict()
            if leaf is not None and leaf not in self._leaves:
                leaf = None
        return Match(at // _TOKEN_BYTES, known, parted, other, leaf)

    def rest(self, match: Match) -> tuple[Tokens, ...]:
        """How the known prompt goes on where one that was just added leaves it, in pieces."""
        node, pieces = match.other, []
        while node is not None:
            pieces.append(np.frombuffer(node.edge, np.int32))
            if node.tail:
                pieces.append(np.frombuffer(node.tail, np.int32))
            node = node.latest
        return tuple(pieces)

    def rest_len(self, match: Match) -> int:
        """Tokens of `rest`."""
        node, size = match.other, 0
        while node is not None:
            size += len(node.edge) + len(node.tail)
            node = node.latest
        return size // _TOKEN_BYTES

    def extend(self, leaf: Node, tokens: Sequence[int], source: Source) -> None:
        """Note what was generated behind a prompt, unless another request has had the leaf since.

        Args:
            leaf, source: of the prompt.
        """
        if leaf.source is source and not leaf.tail and tokens and leaf in self._leaves:
            leaf.tail = packed(tokens)
            self.num_bytes += len(leaf.tail)
            if self.num_bytes > self._max_bytes:
                self._evict()

    def known_length(self, salt: str, tokens: Sequence[int]) -> int:
        """Tokens of the longest known prefix under a salt; changes nothing that is known."""
        root = self._roots.get(salt)
        if root is None:
            return 0
        prompt = memoryview(tokens if isinstance(tokens, array) else array("i", tokens))
        return self._descend(root, prompt, prompt.cast("B"))[2] // _TOKEN_BYTES

    def _descend(self, root: Node, prompt: memoryview, data: memoryview) -> tuple[Node, int, int]:
        """Return the deepest node reached, the bytes that agree of it, and of the whole prompt.

        Args:
            prompt, data: the same tokens, as numbers and as bytes.
        """
        node, at, size = root, 0, len(data)
        while at < size:
            if node.tail:
                node, at = self._settle(node, at)
            child = node.children.get(prompt[at // _TOKEN_BYTES])
            if child is None:
                break
            edge = child.edge
            end = at + len(edge)
            if end > size or isinstance(edge, memoryview) or not edge.startswith(data[at:end]):
                same = _num_equal(edge, data[at:end])
                if same < len(edge):
                    return child, same, at + same
            node, at = child, end
        return node, len(node.edge), at

    def _settle(self, leaf: Node, at: int) -> tuple[Node, int]:
        """Make what was generated behind a leaf a part of the tree; returns where to go on, and at which byte."""
        tail, leaf.tail = leaf.tail, b""
        self.num_bytes -= len(tail)
        length = len(leaf.edge)
        if self._grow(leaf, tail, len(tail), leaf.source, self._leaves[leaf], _first(tail)) is not leaf:
            return leaf, at
        assert leaf.parent is not None
        return leaf.parent, at - length

    def _split(self, node: Node, within: int) -> Node:
        """Divide an edge; returns the upper part, which takes the place of the whole."""
        parent, whole = node.parent, node.edge
        assert parent is not None
        upper = Node(bytes(whole[:within]), within, parent, node.source, node.first)
        self._hold(node, memoryview(whole)[within:])
        node.parent, node.first = upper, _first(node.edge)
        parent.children[upper.first] = upper
        if parent.latest is node:
            parent.latest = upper
        upper.children[node.first] = upper.latest = node
        self.num_bytes += within + NODE_BYTES
        return upper

    def _grow(self, node: Node, tokens: Edge, num_bytes: int, source: Source, salt: str, first: int) -> Node:
        """Put tokens, which hold some bytes, below a node or at the end of a leaf; returns the leaf.

        Args:
            first: of the tokens.
        """
        if node in self._leaves:
            if len(node.edge) <= _MOST_TIMES * len(tokens):
                self._hold(node, b"".join((node.edge, tokens)))
                node.note = None
                return node
            del self._leaves[node]
        leaf = Node(tokens, num_bytes, node, source, first)
        node.children[first] = node.latest = leaf
        self._leaves[leaf] = salt
        self.num_bytes += num_bytes + NODE_BYTES
        return leaf

    def _hold(self, node: Node, edge: Edge) -> None:
        """Give a node another edge, which may be a part of the array that it holds: most of that, or it is copied."""
        if isinstance(edge, bytes) or 4 * len(edge) < 3 * node.num_bytes:
            edge = bytes(edge)
            self.num_bytes += len(edge) - node.num_bytes
            node.num_bytes = len(edge)
        node.edge = edge

    def _touch(self, node: Node, source: Source) -> None:
        """Make a node and those above it the last used ones."""
        if node in self._leaves:
            self._leaves.move_to_end(node)
        while (parent := node.parent) is not None:
            node.source = source
            parent.latest = node
            node = parent

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._leaves) > 1:
            leaf, salt = self._leaves.popitem(last=False)
            self._remove(leaf, salt)

    def _remove(self, leaf: Node, salt: str) -> None:
        node: Node = leaf
        while node.parent is not None and not node.children:
            self.num_bytes -= node.num_bytes + len(node.tail) + NODE_BYTES
            del node.parent.children[node.first]
            if node.parent.latest is node:
                node.parent.latest = None
            node = node.parent
        if node.parent is None:
            if not node.children:
                del self._roots[salt]
                self.num_bytes -= NODE_BYTES
        elif len(node.children) == 1:
            self._merge(node)

    def _merge(self, node: Node) -> None:
        """Join a node with its only child, which keeps the tree flat, unless that would copy much."""
        (child,) = node.children.values()
        assert node.parent is not None
        if len(node.edge) + len(child.edge) > _MOST_MERGED:
            return
        self.num_bytes -= node.num_bytes
        self._hold(child, b"".join((node.edge, child.edge)))
        child.parent, child.first = node.parent, node.first
        node.parent.children[child.first] = child
        if node.parent.latest is node:
            node.parent.latest = child
        self.num_bytes -= NODE_BYTES


def _first(edge: Edge) -> int:
    """The first token."""
    return int.from_bytes(edge[:_TOKEN_BYTES], sys.byteorder)


def _num_equal(edge: Edge, data: memoryview) -> int:
    """Bytes of whole tokens at the beginning that an edge and a prompt share."""
    return _TOKEN_BYTES * common(np.frombuffer(edge, np.int32), np.frombuffer(data, np.int32))


def common(one: Tokens, other: Tokens) -> int:
    """Tokens at the beginning that two sequences share."""
    length = min(len(one), len(other))
    begin, end = 0, _FIRST_LOOK
    while begin < length:
        differs = one[begin:end] != other[begin:end] if end <= length else one[begin:length] != other[begin:length]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
        begin, end = end, 8 * end
    return length
