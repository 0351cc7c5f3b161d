"""Layout of rows outside the device: one envelope per unit and rank.

An envelope holds one rank's share of a unit (a page or a state slot) of a component space: a contiguous piece per group
of fields that are split in the same way. A piece is a box of layers x tokens x heads, and is stored as one object.

    envelope of a page     [ kv: k [L, T, H, D], v [L, T, H, D] | latent: latent [L, T, 1, R], rope ... | index ... ]

Data that several ranks replicate (latents, index keys, KV heads fewer than ranks) is stored once per node: each of n
replicas stores an n-th of the tokens, or of the layers if a unit has one row. Ranks never read the memory of other
nodes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raycache.memory.box import Box
from raycache.memory.component import ITEMSIZE, Component, Reuse, RowField
from raycache.parallel.sharding import Coords, Split, even_range, shared_head_range, state_part

ALIGN = 64
"""Bytes to which pieces and envelopes are aligned."""


@dataclass(frozen=True)
class FieldPlace:
    """One field's rows in an envelope.

    Attributes:
        offset: in the envelope, bytes.
        shape: [layers, tokens, heads, *rest of a row]; one token for states, one head for fields without heads.
    """

    field: RowField
    offset: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the field in one envelope."""
        return math.prod(self.shape) * ITEMSIZE[self.field.dtype]


@dataclass(frozen=True)
class Piece:
    """A box of one group's rows, contiguous in an envelope.

    Attributes:
        group: the component, restricted to fields that are split in the same way.
        offset: in the envelope, bytes.
        fields: in order, without gaps.
    """

    group: Component
    box: Box
    offset: int
    fields: tuple[FieldPlace, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the piece as an object in storage."""
        return sum(place.num_bytes for place in self.fields)


def groups(component: Component) -> list[Component]:
    """Group a component's fields by their number of heads, which determines how they are split."""
    by_heads: dict[int, list[RowField]] = {}
    for field in component.fields:
        by_heads.setdefault(num_heads(field), []).append(field)
    # Wide dtypes first, so that all fields are aligned without gaps.
    return [
        replace(component, fields=tuple(sorted(fields, key=lambda field: -ITEMSIZE[field.dtype])))
        for fields in by_heads.values()
    ]


def num_heads(field: RowField) -> int:
    """Heads of the whole model; 1 for fields without heads."""
    assert field.head_axis in (None, 0), "heads are the first axis of a row"
    return 1 if field.head_axis is None else field.shape[0]


def row_shape(field: RowField) -> tuple[int, ...]:
    """Shape of one head's row."""
    return field.shape if field.head_axis is None else field.shape[1:]


def place_fields(group: Component, box: Box, *, offset: int = 0) -> tuple[FieldPlace, ...]:
    """Place the fields of a box one after another, from `offset` on."""
    places = []
    for field in group.fields:
        place = FieldPlace(field, offset, (*box.shape, *row_shape(field)))
        places.append(place)
        offset += place.num_bytes
    return tuple(places)


class EnvelopeLayout:
    """Envelopes of all ranks of a gang, or of those on one node.

    Args:
        num_layers: of the whole model.
        page_size: tokens per page.
        nodes: index of each rank's node; empty if all are on one.
        node: the node whose ranks have envelopes here; None for all.
    Attributes:
        spaces: component spaces, in order.
        ranks: ranks that have envelopes here, ascending.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        num_layers: int,
        page_size: int,
        split: Split,
        nodes: Sequence[int] = (),
        node: int | None = None,
    ) -> None:
        assert not nodes or len(nodes) == split.world_size, f"{len(nodes)} nodes given for {split.world_size} ranks"
        self._num_layers, self._page_size, self.split = num_layers, page_size, split
        self._nodes = tuple(nodes) or (0,) * split.world_size
        self.ranks = tuple(rank for rank, at in enumerate(self._nodes) if node is None or at == node)
        self._groups = [group for component in components for group in groups(component)]
        self.spaces = tuple(dict.fromkeys(group.space for group in self._groups))
        ranks = range(split.world_size)
        self._held = [{group: self.device_box(group, rank) for group in self._groups} for rank in ranks]
        self._pieces = [{space: tuple(self._place(space, rank)) for space in self.spaces} for rank in ranks]

    def groups(self, space: str) -> list[Component]:
        """Groups of a space, in the order of their pieces."""
        return [group for group in self._groups if group.space == space]

    def pieces(self, rank: int, space: str) -> tuple[Piece, ...]:
        """Pieces of a rank's envelope; empty if it has no layers of the space, or is on another node."""
        return self._pieces[rank][space]

    def envelope_bytes(self, rank: int, space: str) -> int:
        """Bytes of one unit on one rank."""
        return _end(self.pieces(rank, space))

    def unit_bytes(self, space: str) -> int:
        """Bytes of one unit on all ranks that have envelopes here."""
        return sum(self.envelope_bytes(rank, space) for rank in self.ranks)

    def sources(self, rank: int, space: str) -> list[tuple[int, Piece]]:
        """Pieces with all rows that a rank's device holds of a unit: (rank whose slab it is in, piece)."""
        return [
            (peer, piece)
            for peer in self.ranks
            if self._nodes[peer] == self._nodes[rank]
            for piece in self.pieces(peer, space)
            if self._held[peer][piece.group] == self._held[rank][piece.group]
        ]

    def whole_box(self, group: Component) -> Box:
        """All rows of a group of one unit."""
        tokens = 1 if group.reuse is Reuse.STATE_HERE else self._page_size
        return Box(0, len(group.layers), 0, tokens, 0, num_heads(group.fields[0]))

    def device_box(self, group: Component, rank: int) -> Box | None:
        """The rows of a group that a rank's device holds of one unit; None for none."""
        at = self.split.coords(rank)
        mine = self.split.held_layers(self._num_layers, at.pp)
        layers = range(bisect.bisect_left(group.layers, mine.start), bisect.bisect_left(group.layers, mine.stop))
        if not layers:
            return None
        tokens, heads = self._tokens(group, at), self._heads(group, at)
        return Box(layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop)

    def _tokens(self, group: Component, at: Coords) -> range:
        if group.reuse is Reuse.STATE_HERE:
            return range(1)
        share = self._page_size // self.split.cp
        return range(at.cp * share, (at.cp + 1) * share)

    def _heads(self, group: Component, at: Coords) -> range:
        field = group.fields[0]
        if field.head_axis is None:
            return range(1)
        part, parts = (at.tp, self.split.tp) if group.reuse is not Reuse.STATE_HERE else state_part(self.split, at)
        return shared_head_range(num_heads(field), part, parts)

    def _place(self, space: str, rank: int) -> Iterator[Piece]:
        offset = 0
        for group in self.groups(space):
            box = self._stored_box(group, rank)
            if box is not None:
                piece = Piece(group, box, offset, place_fields(group, box, offset=offset))
                yield piece
                offset = _end((piece,))

    def _stored_box(self, group: Component, rank: int) -> Box | None:
        """A rank's part of the rows that it and its replicas on the same node share."""
        held = self._held[rank][group]
        if held is None or rank not in self.ranks:
            return None
        here = self._nodes[rank]
        replicas = [peer for peer in self.ranks if self._nodes[peer] == here and self._held[peer][group] == held]
        layers, tokens, _ = held.shape
        part = even_range(tokens if tokens > 1 else layers, replicas.index(rank), len(replicas))
        if not part:
            return None
        if tokens > 1:
            return replace(held, first_token=held.first_token + part.start, end_token=held.first_token + part.stop)
        return replace(held, first_layer=held.first_layer + part.start, end_layer=held.first_layer + part.stop)


def _end(pieces: Sequence[Piece]) -> int:
    """Bytes up to the end of the last piece, aligned."""
    if not pieces:
        return 0
    return -(-(pieces[-1].offset + pieces[-1].num_bytes) // ALIGN) * ALIGN
