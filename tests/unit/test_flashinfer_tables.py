"""Rows as FlashInfer's kernels get them, against the readable description of the same rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionStep
from raycache.attention.flashinfer_tables import (
    Tokens,
    decode_table,
    is_partition,
    page_table,
    pieces,
    run_segments,
    together,
)
from raycache.attention.layout import StepLayout
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL
from raycache.step.inputs import StepInputs
from tests.oracle.attention import Batch, Case, Seat


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = st.just(1) | st.integers(1, 20)
    return Case(
        rows=draw(st.lists(st.tuples(st.just(0) | st.integers(0, 40), counts), min_size=1, max_size=5)),
        cp=draw(st.sampled_from([1, 2, 3])),
        share=draw(st.sampled_from([1, 3, 8])),
        seed=draw(st.integers(0, 2**20)),
    )


def inputs_of(case: Case) -> list[StepInputs]:
    """Per cp rank."""
    found: dict[int, StepInputs] = {}

    def work(seat: Seat, step: AttentionStep) -> Tensor:
        found[seat.ctx.cp.rank] = seat.inputs
        return torch.zeros(sum(map(len, seat.mine)))

    Batch(case).run(TorchBackend(), [], work)
    return [found[rank] for rank in range(case.cp)]


def indices(tokens: Tokens, count: int) -> list[int]:
    return torch.arange(count)[tokens].tolist()


@given(cases())
def test_the_table_of_a_decode_batch_is_that_of_its_rows(case: Case) -> None:
    for inputs in inputs_of(replace(case, rows=[(start, 1) for start, _ in case.rows])):
        pages = inputs.places[FULL].pages
        for lens in (pages.cached, pages.total):
            found = decode_table(pages, lens, page_len=case.share)
            wanted = page_table(
                pages, range(len(case.rows)), lens, queries=[row.tokens for row in inputs.rows], page_len=case.share
            )
            assert found.tokens == wanted.tokens
            assert found.page_len == wanted.page_len
            for name in ("queries", "indptr", "ids", "lens", "last"):
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


@given(cases(), st.data())
def test_a_table_has_the_pages_of_the_cached_tokens(case: Case, data: st.DataObject) -> None:
    for inputs in inputs_of(case):
        places = inputs.places[FULL]
        rows = sorted(data.draw(st.sets(st.sampled_from(range(len(case.rows))), min_size=1)))
        table = page_table(
            places.pages, rows, places.pages.cached, queries=[row.tokens for row in inputs.rows], page_len=case.share
        )
        expected = [token for row in rows for token in inputs.rows[row].tokens]
        assert indices(table.tokens, inputs.num_tokens) == expected
        for i, row in enumerate(rows):
            ids = table.ids[table.indptr[i] : table.indptr[i + 1]].astype(np.int64)
            slots = (ids[:, None] * case.share + np.arange(case.share)).ravel()[: table.lens[i]].tolist()
            assert slots == slots_of(inputs, row)
            # What the kernels take for the number of keys.
            assert max(len(ids) - 1, 0) * case.share + table.last[i] == len(slots)
            assert table.queries[i + 1] - table.queries[i] == len(inputs.rows[row].tokens)


@given(cases(), st.integers(1, 30))
def test_pieces_hold_each_cached_token_once_and_in_order(case: Case, length: int) -> None:
    for inputs in inputs_of(case):
        places, rows = inputs.places[FULL], range(len(case.rows))
        found: dict[int, list[int]] = {row: [] for row in rows}
        cut = list(pieces(places.pages, rows, inputs=inputs.rows, page_len=case.share, length=length))
        for piece in cut:
            segments = piece.segments
            spans = itertools.pairwise(segments.keys.tolist())
            asked = indices(segments.tokens, inputs.num_tokens)
            for (a, b), (first, last) in zip(spans, itertools.pairwise(segments.queries.tolist()), strict=True):
                row = next(i for i in rows if inputs.rows[i].tokens.start == asked[first])
                assert asked[first:last] == list(inputs.rows[row].tokens)
                found[row] += piece.slots[a:b].tolist()
        assert all(len(piece.slots) == length for piece in cut[:-1]) and all(len(piece.slots) for piece in cut)
        assert [found[row] for row in rows] == [slots_of(inputs, row) for row in rows]


@given(cases())
def test_runs_of_chunks_see_their_chunk_up_to_their_end(case: Case) -> None:
    for inputs in inputs_of(case):
        seen: dict[int, list[int]] = {}
        for segments in run_segments(StepLayout(inputs).chunks):
            local = indices(segments.tokens, len(inputs.ids))
            assert len(segments.queries) == len(segments.keys) and segments.queries[-1] == len(local)
            keys, queries = itertools.pairwise(segments.keys.tolist()), itertools.pairwise(segments.queries.tolist())
            for (begin, end), (first, last) in zip(keys, queries, strict=True):
                for i, token in enumerate(local[first:last]):
                    # Causal at the end, as the kernels align them.
                    assert token not in seen
                    seen[token] = list(range(begin, end - (last - first) + i + 1))
        right = {
            row.local.start + i: list(range(row.tokens.start, row.tokens.start + at + 1))
            for row in inputs.rows
            for i, at in enumerate(at for run in row.runs for at in run)
        }
        assert seen == right


def test_tokens_that_lie_together_are_a_view() -> None:
    assert together([range(3, 5), range(5, 9)]) == slice(3, 9)
    apart = together([range(3, 5), range(7, 9)])
    assert isinstance(apart, Tensor) and apart.tolist() == [3, 4, 7, 8]


def slots_of(inputs: StepInputs, row: int) -> list[int]:
    return [s for first, count in inputs.places[FULL].prefixes[row].runs for s in range(first, first + count)]


def test_slices_is_partition_if_they_have_each_token_once() -> None:
    assert is_partition([slice(2, 5), slice(0, 2)], 5)
    assert is_partition([], 0)
    assert not is_partition([slice(0, 2), slice(3, 5)], 5)
    assert not is_partition([slice(0, 3), slice(2, 5)], 5)
    assert not is_partition([slice(0, 4)], 5)
    assert not is_partition([slice(0, 2), torch.tensor([2, 3, 4])], 5)
