"""Envelopes: what they hold is the whole model, each row once on a node, and every rank finds what its device holds."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raycache.memory.box import Box
from raycache.memory.component import ITEMSIZE, CacheFormat, Component, Reuse, index_keys, kv, latent, recurrent
from raycache.memory.rows import ALIGN, EnvelopeLayout, groups, num_heads
from raycache.parallel.sharding import Split
from tests.oracle.staged import staged

NUM_LAYERS, PAGE_SIZE = 6, 8
SPLITS = st.builds(
    Split, tp=st.sampled_from([1, 2, 3, 4, 8]), pp=st.integers(1, 4), cp=st.sampled_from([1, 2, 4, 8])
).map(lambda split: staged(split, NUM_LAYERS))


@st.composite
def models(draw: st.DrawFn) -> list[Component]:
    """Some of all kinds of components, on any of the layers."""
    heads, dims = st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 9)
    layers = st.lists(st.integers(0, NUM_LAYERS - 1), min_size=1, unique=True).map(sorted)
    fmt = CacheFormat(draw(st.sampled_from(["float32", "bfloat16"])), has_fp8_latent=draw(st.booleans()))
    conv = [("x", draw(heads), draw(dims)), ("b", draw(heads), draw(dims))]
    kinds = [
        kv("kv", draw(layers), heads=draw(heads), dim=draw(dims), fmt=fmt),
        kv("window", draw(layers), heads=draw(heads), dim=draw(dims), fmt=fmt, window=5),
        latent(draw(layers), rank=128 * draw(st.integers(1, 2)), rope_dim=draw(dims), fmt=fmt),
        index_keys(draw(layers), dim=draw(dims), fmt=fmt),
        recurrent(
            draw(layers), heads=draw(heads), key_dim=draw(dims), value_dim=draw(dims), fmt=fmt, conv=conv, conv_kernel=4
        ),
    ]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True))


def layout_of(model: list[Component], split: Split) -> EnvelopeLayout:
    return EnvelopeLayout(model, num_layers=NUM_LAYERS, page_size=PAGE_SIZE, split=split)


def cells(group: Component) -> np.ndarray:
    """A counter per layer, token and head of the whole model."""
    tokens = 1 if group.reuse is Reuse.STATE_HERE else PAGE_SIZE
    return np.zeros((len(group.layers), tokens, num_heads(group.fields[0])), int)


def count(where: np.ndarray, box: Box) -> None:
    where[tuple(slice(first, end) for first, end in box.ranges)] += 1


@given(models(), SPLITS)
def test_every_row_of_the_model_is_stored_once(model: list[Component], split: Split) -> None:
    layout = layout_of(model, split)
    stored = {group: cells(group) for component in model for group in groups(component)}
    pieces = [
        (space, piece)
        for space, rank in itertools.product(layout.spaces, range(split.world_size))
        for piece in layout.pieces(rank, space)
    ]
    for space, piece in pieces:
        assert piece.group.space == space
        count(stored[piece.group], piece.box)
    assert all((where == 1).all() for where in stored.values())
    for space in layout.spaces:
        # The same in bytes, from the components' own words.
        whole = sum(
            field.num_bytes * len(component.layers) * (1 if component.reuse is Reuse.STATE_HERE else PAGE_SIZE)
            for component in model
            if component.space == space
            for field in component.fields
        )
        num_pieces = sum(at == space for at, _ in pieces)
        assert sum(piece.num_bytes for at, piece in pieces if at == space) == whole
        assert whole <= layout.unit_bytes(space) < whole + ALIGN * max(num_pieces, 1)


@given(models(), SPLITS)
def test_every_rank_finds_all_rows_of_its_device_once(model: list[Component], split: Split) -> None:
    layout = layout_of(model, split)
    for rank in range(split.world_size):
        for component in model:
            for group in groups(component):
                assert_found(layout, group, rank)


@st.composite
def spread(draw: st.DrawFn) -> tuple[Split, list[int]]:
    """A split, and the node of each rank: any, in the order of their lowest ranks."""
    split = draw(SPLITS)
    at = draw(st.lists(st.integers(0, 3), min_size=split.world_size, max_size=split.world_size))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(at))}
    return split, [numbers[node] for node in at]


@given(models(), spread())
def test_every_rank_finds_its_rows_once_on_its_own_node(model: list[Component], at: tuple[Split, list[int]]) -> None:
    split, nodes = at
    shape = {"num_layers": NUM_LAYERS, "page_size": PAGE_SIZE, "split": split, "nodes": nodes}
    layouts = [EnvelopeLayout(model, **shape, node=node) for node in range(max(nodes) + 1)]
    whole = EnvelopeLayout(model, **shape)
    for group in [group for component in model for group in groups(component)]:
        everywhere = cells(group)
        for node, layout in enumerate(layouts):
            here, needed = cells(group), cells(group)
            for rank in range(split.world_size):
                pieces = [piece for piece in layout.pieces(rank, group.space) if piece.group == group]
                if nodes[rank] != node:
                    assert not pieces and layout.envelope_bytes(rank, group.space) == 0
                    continue
                assert layout.pieces(rank, group.space) == whole.pieces(rank, group.space)
                assert layout.sources(rank, group.space) == whole.sources(rank, group.space)
                for piece in pieces:
                    count(here, piece.box)
                if (held := layout.device_box(group, rank)) is not None:
                    needed[tuple(slice(first, end) for first, end in held.ranges)] = 1
                assert {nodes[peer] for peer, _ in layout.sources(rank, group.space)} <= {node}
                assert_found(layout, group, rank)
            # Once each, and nothing that no rank of the node holds.
            np.testing.assert_array_equal(here, needed)
            everywhere += here
        assert (everywhere >= 1).all(), "what no node has is lost"
    for space in whole.spaces:
        assert whole.unit_bytes(space) == sum(layout.unit_bytes(space) for layout in layouts)


def assert_found(layout: EnvelopeLayout, group: Component, rank: int) -> None:
    """A rank finds all rows of a group that its device holds, each once."""
    found, held = cells(group), cells(group)
    if (box := layout.device_box(group, rank)) is not None:
        count(held, box)
    for peer, piece in layout.sources(rank, group.space):
        assert piece in layout.pieces(peer, group.space)
        if piece.group == group:
            count(found, piece.box)
    np.testing.assert_array_equal(found, held)


@given(models(), SPLITS)
def test_fields_lie_behind_each_other_and_are_aligned(model: list[Component], split: Split) -> None:
    layout = layout_of(model, split)
    for rank, space in itertools.product(range(split.world_size), layout.spaces):
        end = 0
        for piece in layout.pieces(rank, space):
            assert piece.offset % ALIGN == 0 and piece.offset >= end
            end = piece.offset
            for place in piece.fields:
                assert place.offset == end, "a piece is one object, without gaps"
                assert place.offset % ITEMSIZE[place.field.dtype] == 0
                assert place.shape[:3] == piece.box.shape
                assert place.num_bytes == math.prod(place.shape) * ITEMSIZE[place.field.dtype]
                end += place.num_bytes
            assert piece.num_bytes == end - piece.offset
        assert end <= layout.envelope_bytes(rank, space) < end + ALIGN


def test_an_fp8_latent_over_four_ranks_takes_a_quarter_on_each() -> None:
    model = [latent(range(3), rank=512, rope_dim=64, fmt=CacheFormat("bfloat16", has_fp8_latent=True))]
    layout = EnvelopeLayout(model, num_layers=3, page_size=64, split=Split(tp=4))
    assert [layout.envelope_bytes(rank, "full") for rank in range(4)] == [3 * 16 * 656] * 4
    assert [peer for peer, _ in layout.sources(2, "full")] == [0, 1, 2, 3]


def test_states_on_more_ranks_than_heads_are_shared_out_by_layers() -> None:
    model = [recurrent(range(4), heads=2, key_dim=4, value_dim=4, fmt=CacheFormat("float32"))]
    layout = EnvelopeLayout(model, num_layers=4, page_size=64, split=Split(tp=2, cp=2))
    boxes = [piece.box for rank in range(4) for piece in layout.pieces(rank, "state")]
    # Ranks count cp before tp, heads tp before cp: ranks 0 and 2 have head 0, ranks 1 and 3 have head 1.
    assert boxes == [Box(0, 2, 0, 1, 0, 1), Box(0, 2, 0, 1, 1, 2), Box(2, 4, 0, 1, 0, 1), Box(2, 4, 0, 1, 1, 2)]
