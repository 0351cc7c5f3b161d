"""A decode batch at fixed places says what `build_inputs` says of the same plan, and keeps its padding to itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycache.memory.component import FULL, CacheFormat, kv, recurrent
from raycache.memory.device import DevicePool
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.graphs import batch_sizes
from raycache.rank.last_tokens import LastTokens
from raycache.step.inputs import build_inputs
from raycache.step.page_tables import PageTables
from raycache.step.single_rows import in_single_rows
from raycache.wire.plan import Row, StepPlan

SIZE, WINDOW, NUM_PAGES, NUM_STATES = 8, 11, 60, 9
FMT = CacheFormat("float32")
COMPONENTS = [
    kv("kv", [0], heads=4, dim=4, fmt=FMT),
    kv("window", [1], heads=4, dim=4, fmt=FMT, window=WINDOW),
    recurrent([2], heads=4, key_dim=2, value_dim=2, fmt=FMT),
]


def seat(cp: int, rank: int) -> tuple[DevicePool, ParallelContext]:
    ctx = ParallelContext(Split(cp=cp), rank, torch.device("cpu"), cp=Group(rank=rank, size=cp))
    sizes = {FULL: NUM_PAGES, "window": NUM_PAGES, "state": NUM_STATES}
    return DevicePool(COMPONENTS, num_layers=3, sizes=sizes, page_size=SIZE, ctx=ctx, has_scratch=True), ctx


def plan_of(starts: list[int], seed: int) -> tuple[StepPlan, dict[str, PageTables]]:
    random = np.random.default_rng(seed)
    tables = {FULL: PageTables(), "window": PageTables()}
    slots = random.permutation(12)[: len(starts)].tolist()
    rows = []
    for slot, start in zip(slots, starts, strict=True):
        for space, of_space in tables.items():
            ids = random.permutation(NUM_PAGES)[: start // SIZE + 1]
            if space == "window":
                ids[: max(start - WINDOW + 1, 0) // SIZE] = -1
            of_space.begin(slot, ids.tolist())
        token = np.int32(100 + slot).tobytes()
        read, write = random.integers(0, NUM_STATES, 2).tolist()
        rows.append(Row(slot, start, token, output_position=0, read_state=read, write_state=write))
    return StepPlan(1, rows), tables


@given(
    batches=st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), min_size=1, max_size=3),
    cp=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
    has_all_tokens=st.booleans(),
)
def test_a_batch_says_what_the_plan_says(batches: list[list[int]], cp: int, seed: int, has_all_tokens: bool) -> None:
    has_all_tokens = has_all_tokens and cp > 1
    for rank in range(cp):
        pool, ctx = seat(cp, rank)
        batch = DecodeBatch(8, pool, ctx, has_all_tokens=has_all_tokens)
        places = {id(batch.inputs.ids), id(batch.inputs.positions), id(batch.inputs.places[FULL].slots)}
        for turn, starts in enumerate(batches):
            plan, tables = plan_of(starts, seed + turn)
            of_slots = {row.slot: {space: table.of(row.slot) for space, table in tables.items()} for row in plan.rows}
            wanted = build_inputs(
                plan, of_slots, page_size=SIZE, windows=pool.windows, ctx=ctx, has_all_tokens=has_all_tokens
            )
            batch.fill(plan, tables)
            found, count, total = batch.inputs, len(wanted.ids), len(starts)
            assert batch.num_local == count
            assert torch.equal(found.logits[:count], wanted.logits)
            assert torch.equal(found.ids[:count], wanted.ids) and torch.equal(found.positions[:count], wanted.positions)
            assert torch.equal(found.read_states[:total], wanted.read_states)
            assert torch.equal(found.write_states[:total], wanted.write_states)
            assert (found.read_states[total:] == NUM_STATES).all() and (found.write_states[total:] == NUM_STATES).all()
            for space in pool.windows:
                mine, right = found.places[space], wanted.places[space]
                written = dict(zip(mine.owned.tolist(), mine.slots.tolist(), strict=True))
                expected = dict(zip(right.owned.tolist(), right.slots.tolist(), strict=True))
                scratch = NUM_PAGES * SIZE // cp
                assert written == {token: expected.get(token, scratch) for token in range(8)}
                real = right.pages.indptr[-1]
                assert (mine.pages.ids[:real] == right.pages.ids).all() and (mine.pages.ids[real:] == NUM_PAGES).all()
                assert (mine.pages.indptr[: total + 1] == right.pages.indptr).all()
                for column in ("first", "cached", "total", "begins"):
                    assert (getattr(mine.pages, column)[:total] == getattr(right.pages, column)).all()
                for prefix, start, begin in zip(right.prefixes, starts, right.pages.begins.tolist(), strict=True):
                    window = pool.windows[space] or start + 1
                    assert begin == (prefix.positions <= start - window).sum()
                assert mine.prefixes[:total] and [p.runs for p in mine.prefixes[:total]] == [
                    p.runs for p in right.prefixes
                ]
        assert places == {id(batch.inputs.ids), id(batch.inputs.positions), id(batch.inputs.places[FULL].slots)}


def test_last_tokens_are_kept_by_the_slots_of_the_batch_as_by_those_of_the_plan() -> None:
    pool, ctx = seat(1, 0)
    batch = DecodeBatch(8, pool, ctx)
    one, other = LastTokens(12, ctx), LastTokens(12, ctx)
    for turn, starts in enumerate([[3, 9, 20], [0, 5, 6, 7, 40], [1]]):
        plan, tables = plan_of(starts, turn)
        batch.fill(plan, tables)
        tokens = torch.arange(len(starts)) + 100 * turn + 1
        one.keep(plan, tokens)
        other.keep(plan, tokens, slots=batch.slots[: batch.num_local])
        assert [one.tokens[row.slot, 0] for row in plan.rows] == tokens.tolist()
        assert torch.equal(one.tokens, other.tokens)


@given(
    batches=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_recurrent_layers_take_a_row_with_drafts_as_one(batches: list[list[int]], seed: int) -> None:
    """Every token of the batch belongs to one row: those of the plan, then padding, then rows without tokens."""
    size = 20
    pool, ctx = seat(1, 0)
    batch = DecodeBatch(size, pool, ctx, longest=4)
    for turn, drafts in enumerate(batches):
        random = np.random.default_rng(seed + turn)
        plan, tables = plan_of(random.integers(0, 30, len(drafts)).tolist(), seed + turn)
        rows = []
        for row, count in zip(plan.rows, drafts, strict=True):
            for of_space in tables.values():
                of_space.begin(row.slot, random.permutation(NUM_PAGES)[: (row.start + count) // SIZE + 1].tolist())
            kept, tokens = tuple(random.integers(0, NUM_STATES, count).tolist()), random.integers(0, 99, 1 + count)
            known = tokens.astype(np.int32).tobytes()
            rows.append(replace(row, tokens=known, num_drafts=count, draft_states=kept))
        plan = replace(plan, rows=rows)
        batch.fill(plan, tables)
        single = DecodeBatch(size, pool, ctx)
        single.fill(in_single_rows(plan), tables)
        for mine, right in ((batch.inputs.ids, single.inputs.ids), (batch.inputs.positions, single.inputs.positions)):
            assert torch.equal(mine, right)
        found = batch.inputs.state_rows
        assert found is not None and found.longest == 4
        spans, reads, writes, kept = (x.tolist() for x in (found.spans, found.reads, found.writes, found.kept))
        num_tokens = sum(1 + count for count in drafts)
        wanted = [(row.read_state, (row.write_state, *row.draft_states)) for row in rows]
        wanted += [(NUM_STATES, (NUM_STATES,))] * (size - num_tokens)
        wanted += [(-1, ())] * (size - len(wanted))
        assert [(read, tuple(writes[i : i + n])) for read, (i, n) in zip(reads, spans, strict=True)] == wanted
        assert kept == [n for _, n in spans]
        assert [token for i, n in spans for token in range(i, i + n)] == list(range(size))


def test_padding_lies_behind_the_pool() -> None:
    pool, ctx = seat(1, 0)
    batch = DecodeBatch(8, pool, ctx)
    assert pool.kv(0).k.shape[0] == NUM_PAGES + 1 and pool.state(2).state.shape[0] == NUM_STATES + 1
    assert batch.inputs.places[FULL].slots.tolist() == [NUM_PAGES * SIZE] * 8
    assert len(replace(batch.inputs).rows) == 8


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_recorded_sizes_suit_the_ranks_and_reach_the_largest_batch(cp: int) -> None:
    for most in (1, 3, 64, 100, 300):
        sizes = batch_sizes(most, multiple_of=cp)
        assert all(size % cp == 0 for size in sizes)
        assert max(sizes) >= min(most, 256) and max(sizes) < min(most, 256) + cp
