"""The part of a page that a rank holds, or that an object in storage is made of."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_PACKED = struct.Struct("<6H")
BOX_BYTES = _PACKED.size


@dataclass(frozen=True)
class Box:
    """The part of a page that an object holds: half-open ranges.

    Attributes:
        first_layer, end_layer: places in `Component.layers`, not model layers, so that layers of other kinds between
            them do not tell equal objects apart.
        first_token, end_token: within the page; (0, 1) for a state, of which a sequence has one.
        first_head, end_head: of the whole model; (0, 1) for what has no heads.
    Raises:
        ValueError: a range is empty or does not fit 16 bits.
    """

    first_layer: int
    end_layer: int
    first_token: int
    end_token: int
    first_head: int
    end_head: int

    def __post_init__(self) -> None:
        for first, end in self.ranges:
            if not 0 <= first < end <= 0xFFFF:
                raise ValueError(f"{self} has an empty or too large range {first}..{end}")

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of layers, tokens and heads."""
        return (
            (self.first_layer, self.end_layer),
            (self.first_token, self.end_token),
            (self.first_head, self.end_head),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, tokens, heads)."""
        layers, tokens, heads = (end - first for first, end in self.ranges)
        return layers, tokens, heads

    def common(self, other: Box) -> Box | None:
        """What both cover, None for nothing."""
        ends = []
        for (first, end), (other_first, other_end) in zip(self.ranges, other.ranges, strict=True):
            low, high = max(first, other_first), min(end, other_end)
            if low >= high:
                return None
            ends += [low, high]
        return Box(*ends)

    def minus(self, other: Box) -> list[Box]:
        """What this covers and `other` does not, as at most six boxes without overlap."""
        common = self.common(other)
        if common is None:
            return [self]
        rest, ends = list[Box](), [end for bounds in self.ranges for end in bounds]
        for axis, (low, high) in enumerate(common.ranges):
            first, end = 2 * axis, 2 * axis + 1
            before, after = list(ends), list(ends)
            before[end], after[first] = low, high
            rest += [Box(*part) for part in (before, after) if part[first] < part[end]]
            ends[first], ends[end] = low, high
        return rest

    def within(self, outer: Box) -> tuple[slice, slice, slice]:
        """Where it lies in an array [layers, tokens, heads, ...] that holds `outer`."""
        layers, tokens, heads = (
            slice(first - outer_first, end - outer_first)
            for (first, end), (outer_first, _) in zip(self.ranges, outer.ranges, strict=True)
        )
        return layers, tokens, heads

    @property
    def volume(self) -> int:
        """Rows in it: layers * tokens * heads."""
        return math.prod(self.shape)

    @classmethod
    def unpack(cls, packed: bytes) -> Box:
        """Inverse of `packed`.

        Raises:
            ValueError: these are no ranges.
        """
        return cls(*_PACKED.unpack(packed))

    def packed(self) -> bytes:
        """The last 12 bytes of a key."""
        return _PACKED.pack(*(end for bounds in self.ranges for end in bounds))


def cover(wanted: Box, stored: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Join stored boxes into one that is wanted, whatever split wrote them.

    Args:
        wanted: to be filled.
        stored: boxes that are there, those to prefer first.
    Returns:
        (stored box, part of `wanted` to take from it), without overlap; empty when something would be missing.
    """
    missing, taken = [wanted], []
    for box in stored:
        parts = [part for part in (rest.common(box) for rest in missing) if part is not None]
        taken += [(box, part) for part in parts]
        missing = [rest for before in missing for rest in before.minus(box)]
        if not missing:
            return taken
    return []
