"""The prompts seen lately, as a radix tree of token ids for each cache salt, within a bound of bytes.

    root - [system, question 1, answer 1]                 a prompt that continues a known one extends its leaf
               |
    root - [system] - [question 1, answer 1, question 2]  one that leaves it splits the edge where it does
                    ` [question 3]

The least recently used leaf goes first. Comparisons are numpy's, so a long prompt costs about as much as reading it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

NODE_BYTES = 2048
"""At least what a node takes beside its tokens, with its source and note."""
_MOST_TIMES = 4
"""A leaf that is longer than this many times what continues it is not copied, but gets a child."""
_MOST_MERGED = 4096
_FIRST_LOOK = 1024
"""Tokens compared first, then eight times as many: what is compared grows with what is shared, not with the edge."""


@dataclass(slots=True)
class Source:
    """The request that a part of the tree was last seen in.

    Attributes:
        seen_s: its arrival.
        computed_s: when its prompt was computed; inf until then.
        expires_s: end of its cache_ttl_s; inf without one.
        sizes: characters of its last messages, by their index.
    """

    seen_s: float
    computed_s: float = float("inf")
    expires_s: float = float("inf")
    sizes: Mapping[int, int] = field(default_factory=dict)


class Node:
    """An edge of the tree and what is below it.

    Attributes:
        num_bytes: of the array that holds the tokens, which may be larger than they are.
        note: for whoever looks at prompts that part at its end.
    """

    __slots__ = ("children", "note", "num_bytes", "parent", "source", "tokens")

    def __init__(self, tokens: Tokens, num_bytes: int, parent: Node | None, source: Source) -> None:
        self.tokens, self.num_bytes, self.parent, self.source = tokens, num_bytes, parent, source
        self.children: dict[int, Node] = {}  # by their first token, the last used one last
        self.note: object = None


class Match(NamedTuple):
    """The longest known prefix of a prompt. A tuple, as there is one for each request.

    Attributes:
        length: its tokens.
        source: the request that had it last; None if the length is 0.
        rest: how that request went on, in pieces; empty if it ended there.
        node: ends where the prompts part; None if they share nothing, or if one is the beginning of the other.
        leaf: ends with the prompt; None if a known one goes on there.
    """

    length: int
    source: Source | None
    rest: tuple[Tokens, ...]
    node: Node | None
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

    def add(self, salt: str, tokens: Sequence[int] | Tokens, source: Source) -> Match:
        """Find the longest known prefix of a prompt, then remember the prompt.

        Args:
            tokens: at least one. An array may be kept, so it must not change; of a prompt that would take more than a
                quarter of the bound, the beginning is.
        """
        prompt = np.asarray(tokens, dtype=np.int32)
        if 16 * len(prompt) > self._max_bytes:
            prompt = prompt[: self._max_bytes // 16].copy()
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(prompt[:0].copy(), 0, None, source)
            self.num_bytes += NODE_BYTES
        node, within, length = self._descend(root, prompt)
        rest = self._rest(node, within)
        found = None if length == 0 else node.source
        if length < len(prompt):
            if within < len(node.tokens):
                node = self._split(node, within)
            leaf = self._grow(node, prompt[length:], prompt, source, salt)
        else:
            leaf = node
        self._touch(leaf, source)
        self._evict()
        parted = node if 0 < length < len(prompt) and rest else None
        return Match(
            length, found, rest, parted, leaf if leaf in self._leaves and not (parted is None and rest) else None
        )

    def extend(self, leaf: Node, tokens: Sequence[int], source: Source) -> None:
        """Add what was generated behind a prompt, unless another request has had the leaf since.

        Args:
            leaf, source: of the prompt.
        """
        if leaf in self._leaves and leaf.source is source and tokens:
            added = np.array(tokens, dtype=np.int32)
            grown = self._grow(leaf, added, added, source, self._leaves[leaf])
            self._leaves.move_to_end(grown)
            self._evict()

    def known_length(self, salt: str, tokens: Tokens) -> int:
        """Tokens of the longest known prefix under a salt; changes nothing."""
        root = self._roots.get(salt)
        return 0 if root is None else self._descend(root, tokens)[2]

    def _descend(self, root: Node, prompt: Tokens) -> tuple[Node, int, int]:
        """Return the deepest node reached, the tokens that agree of it, and of the whole prompt."""
        node, length, size = root, 0, len(prompt)
        while length < size:
            child = node.children.get(prompt.item(length))
            if child is None:
                break
            node, edge = child, child.tokens
            end = length + len(edge)
            # Most edges are short and agree: as bytes, they are compared in a fifth of the time.
            if len(edge) > _FIRST_LOOK or edge.tobytes() != prompt[length:end].tobytes():
                same = common(edge, prompt[length:])
                if same < len(edge):
                    return node, same, length + same
            length = end
        return node, len(node.tokens), length

    def _rest(self, node: Node, within: int) -> tuple[Tokens, ...]:
        """What follows on the most recently used path."""
        pieces = [node.tokens[within:]] if within < len(node.tokens) else []
        while node.children:
            node = next(reversed(node.children.values()))
            pieces.append(node.tokens)
        return tuple(pieces)

    def _split(self, node: Node, within: int) -> Node:
        """Divide an edge; returns the upper part, which takes the place of the whole."""
        assert node.parent is not None
        whole, num_bytes = node.tokens, node.num_bytes
        upper = Node(*_held(whole[:within], num_bytes), node.parent, node.source)
        node.tokens, node.num_bytes = _held(whole[within:], num_bytes)
        self.num_bytes += upper.num_bytes + node.num_bytes - num_bytes
        node.parent.children[int(upper.tokens[0])] = upper
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        self.num_bytes += NODE_BYTES
        return upper

    def _grow(self, node: Node, tokens: Tokens, whole: Tokens, source: Source, salt: str) -> Node:
        """Put tokens, a part of `whole`, below a node or at the end of a leaf; returns the leaf."""
        is_leaf = node in self._leaves
        if is_leaf and len(node.tokens) <= _MOST_TIMES * len(tokens):
            self._set(node, np.concatenate((node.tokens, tokens)))
            node.note = None
            return node
        if is_leaf:
            del self._leaves[node]
        leaf = Node(*_held(tokens, whole.nbytes), node, source)
        node.children[int(tokens[0])] = leaf
        self._leaves[leaf] = salt
        self.num_bytes += leaf.num_bytes + NODE_BYTES
        return leaf

    def _set(self, node: Node, tokens: Tokens) -> None:
        self.num_bytes += tokens.nbytes - node.num_bytes
        node.tokens, node.num_bytes = tokens, tokens.nbytes

    def _touch(self, node: Node, source: Source) -> None:
        """Make a node and those above it the last used ones."""
        if node in self._leaves:
            self._leaves.move_to_end(node)
        while (parent := node.parent) is not None:
            node.source = source
            siblings = parent.children
            if len(siblings) > 1:
                first = node.tokens.item(0)
                siblings[first] = siblings.pop(first)
            node = parent

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes and len(self._leaves) > 1:
            leaf, salt = self._leaves.popitem(last=False)
            self._remove(leaf, salt)

    def _remove(self, leaf: Node, salt: str) -> None:
        node: Node = leaf
        while node.parent is not None and not node.children:
            self.num_bytes -= node.num_bytes + NODE_BYTES
            del node.parent.children[int(node.tokens[0])]
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
        if len(node.tokens) + len(child.tokens) > _MOST_MERGED:
            return
        self.num_bytes -= node.num_bytes
        self._set(child, np.concatenate((node.tokens, child.tokens)))
        child.parent = node.parent
        # In place: the order of the children is that of their last use.
        node.parent.children[int(node.tokens[0])] = child
        self.num_bytes -= NODE_BYTES


def _held(tokens: Tokens, num_bytes: int) -> tuple[Tokens, int]:
    """Tokens to keep, and the bytes that they hold: most of an array may keep it, a smaller part is copied."""
    return (tokens, num_bytes) if 4 * tokens.nbytes >= 3 * num_bytes else (tokens.copy(), tokens.nbytes)


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
