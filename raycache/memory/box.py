"""The part of a page that a rank or an object in storage holds."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_PACKED = struct.Struct("<6H")
BOX_BYTES = _PACKED.size


@dataclass(frozen=True)
class Box:
    """A part of a page, as half-open ranges.

    Attributes:
        first_layer, end_layer: indices in `Component.layers`, not model layers, so that other kinds of layers between
            them do not matter.
        first_token, end_token: within the page; (0, 1) for a state.
        first_head, end_head: of the whole model; (0, 1) without heads.
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
        """The intersection, None if it is empty."""
        ends = []
        for (first, end), (other_first, other_end) in zip(self.ranges, other.ranges, strict=True):
            low, high = max(first, other_first), min(end, other_end)
            if low >= high:
                return None
            ends += [low, high]
        return Box(*ends)

    def minus(self, other: Box) -> list[Box]:
        """The difference, as at most six boxes without overlap."""
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
        """Its slices of an array [layers, tokens, heads, ...] that holds `outer`."""
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
            ValueError: these are not ranges.
        """
        return cls(*_PACKED.unpack(packed))

    def packed(self) -> bytes:
        """Pack into 12 bytes, the end of a storage key."""
        return _PACKED.pack(*(end for bounds in self.ranges for end in bounds))


def cover(wanted: Box, stored: Iterable[Box]) -> list[tuple[Box, Box]]:
    """Cover a box with stored boxes, which may have been written with another split.

    Args:
        stored: available boxes, preferred ones first.
    Returns:
        (stored box, part of `wanted` to take from it), without overlap; empty if a part would be missing.
    """
    missing, taken = [wanted], []
    for box in stored:
        parts = [part for part in (rest.common(box) for rest in missing) if part is not None]
        taken += [(box, part) for part in parts]
        missing = [rest for before in missing for rest in before.minus(box)]
        if not missing:
            return taken
    return []
