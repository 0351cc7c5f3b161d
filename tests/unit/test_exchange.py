"""How tokens travel between cp ranks, and what a plan looks like from one of them: threads as ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.memory.component import FULL
from raycache.parallel.collectives import Group
from raycache.parallel.context import GroupHandle, ParallelContext, Store, build_group
from raycache.parallel.sharding import Split, shared_head_range
from raycache.step.inputs import StepInputs, build_inputs
from raycache.step.single_rows import emitted_tokens, in_single_rows
from raycache.wire.plan import Row, StepPlan
from tests.oracle.gang import on_gang

CPU = torch.device("cpu")
PAGE_SIZE = 8
WINDOW = 11

T = TypeVar("T")

rows_of_all_kinds = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 30))), min_size=1, max_size=6
)
"""(first position, new tokens) per row: decodes, short and long chunks, with and without a prefix."""

each_cp = st.sampled_from([1, 2, 4])


@dataclass(frozen=True)
class Batch:
    """A plan with its page tables; token ids number all new tokens of the step, from 1."""

    plan: StepPlan
    tables: dict[int, dict[str, NDArray[np.int32]]]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]], *, seed: int = 0) -> Batch:
        pages = [-(-(start + count) // PAGE_SIZE) for start, count in rows]
        shuffled = np.random.default_rng(seed).permutation(sum(pages)).astype(np.int32)
        by_row = np.split(shuffled, np.cumsum(pages)[:-1])
        known = 0
        found = []
        for slot, (start, count) in enumerate(rows):
            ids = np.arange(known + 1, known + count + 1, dtype=np.int32)
            known += count
            found.append(Row(slot=slot, start=start, tokens=ids.tobytes(), output_position=0))
        tables = {slot: {FULL: table, "window": _kept(table, *rows[slot])} for slot, table in enumerate(by_row)}
        return cls(StepPlan(1, found), tables)

    def inputs(self, ctx: ParallelContext, *, has_all_tokens: bool = False) -> StepInputs:
        return build_inputs(
            self.plan,
            self.tables,
            page_size=PAGE_SIZE,
            windows={FULL: 0, "window": WINDOW},
            ctx=ctx,
            has_all_tokens=has_all_tokens,
        )

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.plan.rows)

    def on_ranks(self, cp: int, work: Callable[[StepInputs], T], *, has_all_tokens: bool = False) -> list[T]:
        return on_gang(Split(cp=cp), lambda ctx: work(self.inputs(ctx, has_all_tokens=has_all_tokens)))

    def numbers(self, *shape: int) -> Tensor:
        """A different number at every place of [T, *shape]."""
        return torch.arange(self.num_tokens * int(np.prod(shape)), dtype=torch.float64).view(self.num_tokens, *shape)


def _kept(table: NDArray[np.int32], start: int, count: int) -> NDArray[np.int32]:
    """Without the pages that neither these queries nor those after them see, but for new tokens beside them."""
    pages = np.arange(len(table))
    is_before = pages < max(0, start - WINDOW + 1) // PAGE_SIZE
    is_passed = (pages * PAGE_SIZE >= start) & (pages < max(0, start + count - WINDOW + 1) // PAGE_SIZE)
    return np.where(is_before | is_passed, np.int32(-1), table)


def mine(inputs: StepInputs, every: Tensor) -> Tensor:
    """[T, ...] -> [T_local, ...], by the token ids."""
    return every[inputs.ids - 1]


# --- the exchange -----------------------------------------------------------------------------------------------------


@given(rows=rows_of_all_kinds, cp=each_cp)
def test_every_token_is_on_one_rank(rows: list[tuple[int, int]], cp: int) -> None:
    batch = Batch.of(rows)
    ids = torch.cat(batch.on_ranks(cp, lambda inputs: inputs.ids))
    assert sorted(ids.tolist()) == list(range(1, batch.num_tokens + 1))


@given(rows=rows_of_all_kinds, cp=each_cp, shape=st.sampled_from([(), (3,), (2, 5)]))
def test_gather_gives_all_tokens_in_the_order_of_the_plan(
    rows: list[tuple[int, int]], cp: int, shape: tuple[int, ...]
) -> None:
    batch = Batch.of(rows)
    every = batch.numbers(*shape)
    for found in batch.on_ranks(cp, lambda inputs: inputs.exchange.gather(mine(inputs, every))):
        assert torch.equal(found, every)


@given(rows=rows_of_all_kinds, cp=each_cp, shape=st.sampled_from([(), (3,)]))
def test_parts_of_different_shapes_are_gathered_at_once(
    rows: list[tuple[int, int]], cp: int, shape: tuple[int, ...]
) -> None:
    batch = Batch.of(rows)
    parts = [batch.numbers(3, *shape), batch.numbers(4), batch.numbers(1, *shape), batch.numbers(2, 5)]
    for found in batch.on_ranks(cp, lambda inputs: inputs.exchange.gather_parts(*(mine(inputs, x) for x in parts))):
        assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


@given(rows=rows_of_all_kinds, cp=each_cp, heads_per_rank=st.integers(1, 3), shape=st.sampled_from([(), (2,), (2, 3)]))
def test_to_heads_gives_all_tokens_of_own_heads_and_to_tokens_brings_them_back(
    rows: list[tuple[int, int]], cp: int, heads_per_rank: int, shape: tuple[int, ...]
) -> None:
    batch = Batch.of(rows)
    every = batch.numbers(cp * heads_per_rank, *shape)

    def there_and_back(inputs: StepInputs) -> None:
        local = mine(inputs, every)
        (found,) = inputs.exchange.to_heads(local)
        heads = inputs.ctx.cp.rank * heads_per_rank
        assert torch.equal(found, every[:, heads : heads + heads_per_rank])
        assert torch.equal(inputs.exchange.to_tokens(found), local)

    batch.on_ranks(cp, there_and_back)


@given(rows=rows_of_all_kinds, cp=st.sampled_from([2, 4]), data=st.data())
def test_heads_fewer_than_ranks_are_shared_by_neighbours(
    rows: list[tuple[int, int]], cp: int, data: st.DataObject
) -> None:
    batch = Batch.of(rows)
    num_heads = data.draw(st.sampled_from([count for count in (1, 2) if count < cp]))
    every = batch.numbers(num_heads, 3)

    def there(inputs: StepInputs) -> None:
        head = shared_head_range(num_heads, inputs.ctx.cp.rank, cp).start
        assert torch.equal(inputs.exchange.to_heads(mine(inputs, every))[0], every[:, head : head + 1])

    batch.on_ranks(cp, there)


@given(rows=rows_of_all_kinds, cp=each_cp, shape=st.sampled_from([(), (2, 3)]))
def test_give_back_brings_every_part_to_the_rank_of_its_token(
    rows: list[tuple[int, int]], cp: int, shape: tuple[int, ...]
) -> None:
    batch = Batch.of(rows)
    parts = [batch.numbers(*shape) + 1000.0 * rank for rank in range(cp)]

    def back(inputs: StepInputs) -> None:
        found = inputs.exchange.give_back(parts[inputs.ctx.cp.rank])
        assert torch.equal(found, torch.stack([mine(inputs, part) for part in parts]))

    batch.on_ranks(cp, back)


@pytest.mark.parametrize("rows", [[(5, 1)], [(0, 1), (9, 1)], [(0, 2)]], ids=str)
def test_ranks_without_tokens_take_part(rows: list[tuple[int, int]]) -> None:
    batch = Batch.of(rows)
    every = batch.numbers(4, 2)
    counts = batch.on_ranks(4, lambda inputs: inputs.exchange.num_local)
    assert 0 in counts and sum(counts) == batch.num_tokens

    def there_and_back(inputs: StepInputs) -> None:
        (found,) = inputs.exchange.to_heads(mine(inputs, every))
        assert torch.equal(found, every[:, inputs.ctx.cp.rank : inputs.ctx.cp.rank + 1])
        assert torch.equal(inputs.exchange.to_tokens(found), mine(inputs, every))

    batch.on_ranks(4, there_and_back)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_the_exchange_works_over_gloo_in_any_dtype(dtype: torch.dtype) -> None:
    store = Store("127.0.0.1")
    handle = GroupHandle("cp.0", "cp", (0, 1), "gloo", *store.address, epoch=1, timeout_s=20.0)
    batch = Batch.of([(0, 5), (3, 1), (7, 1), (2, 3)])
    every = batch.numbers(4, 3).to(dtype)

    def work(rank: int) -> None:
        group = build_group(handle, member=rank, epoch=1, host="127.0.0.1", device=CPU)
        inputs = batch.inputs(ParallelContext(split=Split(cp=2), rank=rank, device=CPU, cp=group))
        local = mine(inputs, every)
        (found,) = inputs.exchange.to_heads(local)
        assert torch.equal(found, every[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(inputs.exchange.to_tokens(found), local)
        assert torch.equal(inputs.exchange.gather(local), every)
        assert torch.equal(inputs.exchange.give_back(every), torch.stack([local, local]))
        group.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


# --- all tokens on every rank -----------------------------------------------------------------------------------------

decodes = st.lists(st.tuples(st.integers(0, 40), st.just(1)), min_size=1, max_size=6)


@given(rows=decodes, cp=st.sampled_from([2, 4]), heads_per_rank=st.integers(1, 3), shape=st.sampled_from([(), (2, 3)]))
def test_with_all_tokens_a_rank_continues_with_its_heads(
    rows: list[tuple[int, int]], cp: int, heads_per_rank: int, shape: tuple[int, ...]
) -> None:
    batch = Batch.of(rows)
    every = batch.numbers(cp * heads_per_rank, *shape)
    parts = [every + 1000.0 * rank for rank in range(cp)]

    def check(inputs: StepInputs) -> None:
        exchange, first = inputs.exchange, inputs.ctx.cp.rank * heads_per_rank
        own = slice(first, first + heads_per_rank)
        assert torch.equal(exchange.gather(every), every)
        assert exchange.gather_parts(every, every[:, :1])[0] is every
        assert torch.equal(exchange.own(every), every[:, own])
        assert torch.equal(exchange.to_heads(every)[0], every[:, own])
        assert torch.equal(exchange.to_tokens(every[:, own]), every)
        mine = parts[inputs.ctx.cp.rank]
        assert torch.equal(exchange.scatter(mine), torch.stack([part[:, own] for part in parts]))
        assert torch.equal(exchange.give_back(mine), torch.stack(parts))

    batch.on_ranks(cp, check, has_all_tokens=True)


@given(rows=decodes, num_heads=st.sampled_from([1, 2]))
def test_with_all_tokens_heads_fewer_than_ranks_are_shared_by_neighbours(
    rows: list[tuple[int, int]], num_heads: int
) -> None:
    batch = Batch.of(rows)
    every = batch.numbers(num_heads, 3)

    def check(inputs: StepInputs) -> None:
        head = shared_head_range(num_heads, inputs.ctx.cp.rank, 4).start
        assert torch.equal(inputs.exchange.to_heads(every)[0], every[:, head : head + 1])

    batch.on_ranks(4, check, has_all_tokens=True)


@given(rows=decodes, cp=st.sampled_from([2, 4]))
def test_with_all_tokens_every_rank_has_them_and_writes_its_own(rows: list[tuple[int, int]], cp: int) -> None:
    batch = Batch.of(rows)

    def written(inputs: StepInputs) -> tuple[list[int], list[int]]:
        return inputs.places[FULL].owned.tolist(), inputs.places[FULL].slots.tolist()

    assert batch.on_ranks(cp, written, has_all_tokens=True) == batch.on_ranks(cp, written)
    for inputs in batch.on_ranks(cp, lambda inputs: inputs, has_all_tokens=True):
        assert inputs.ids[inputs.logits].tolist() == inputs.ids.tolist() == list(range(1, len(rows) + 1))


@given(rows=rows_of_all_kinds, cp=each_cp, has_drafts=st.booleans())
def test_single_rows_are_the_tokens_of_the_step_and_emit_what_its_rows_do(
    rows: list[tuple[int, int]], cp: int, has_drafts: bool
) -> None:
    batch = Batch.of(rows)
    drafts = [replace(row, num_drafts=row.num_tokens - 1) if has_drafts else row for row in batch.plan.rows]
    batch = replace(batch, plan=replace(batch.plan, rows=drafts))
    singles = in_single_rows(batch.plan).rows
    assert [(row.slot, row.start, row.num_tokens) for row in singles] == [
        (slot, start + i, 1) for slot, (start, count) in enumerate(rows) for i in range(count)
    ]
    ids = np.frombuffer(b"".join(row.tokens for row in singles), np.int32)
    assert ids.tolist() == list(range(1, batch.num_tokens + 1))
    for rank, found in enumerate(batch.on_ranks(cp, lambda inputs: inputs.ids[inputs.logits])):
        assert ids[emitted_tokens(batch.plan, cp_rank=rank, cp_size=cp)].tolist() == found.tolist()


# --- a plan, for one rank ---------------------------------------------------------------------------------------------


@given(rows=rows_of_all_kinds, cp=each_cp)
def test_local_tokens_stand_where_their_rows_say(rows: list[tuple[int, int]], cp: int) -> None:
    batch = Batch.of(rows)
    first_ids = np.cumsum([1, *(count for _, count in rows)])

    def check(inputs: StepInputs) -> None:
        assert inputs.num_tokens == batch.num_tokens
        for (start, count), row, first in zip(rows, inputs.rows, first_ids, strict=False):
            of_row = slice(row.local.start, row.local.stop)
            offsets = inputs.ids[of_row] - int(first)
            assert ((offsets >= 0) & (offsets < count)).all()
            assert torch.equal(inputs.positions[of_row], start + offsets)
            assert row.tokens == range(int(first) - 1, int(first) - 1 + count)
            if count > 1:
                assert offsets.tolist() == [place for run in row.runs for place in run]
            else:
                assert row.runs == ()

    batch.on_ranks(cp, check)


@given(rows=rows_of_all_kinds, cp=each_cp, seed=st.integers(0, 9))
def test_the_pages_of_all_ranks_hold_each_token_that_a_query_sees_once(
    rows: list[tuple[int, int]], cp: int, seed: int
) -> None:
    batch = Batch.of(rows, seed=seed)
    share = PAGE_SIZE // cp

    def read(inputs: StepInputs, space: str, row: int) -> list[int]:
        """Positions of the prefix, read from slots in which every token of every sequence has left its own."""
        rows_of_pool = np.full(sum(len(table[FULL]) for table in batch.tables.values()) * share, -1)
        table = batch.tables[row][FULL]
        for position in range(sum(rows[row])):
            if position % PAGE_SIZE // share == inputs.ctx.cp.rank:
                rows_of_pool[table[position // PAGE_SIZE] * share + position % share] = position
        prefix = inputs.places[space].prefixes[row]
        found = [p for first, count in prefix.runs for p in rows_of_pool[first : first + count].tolist()]
        assert found == prefix.positions.tolist()
        return found

    def read_all(inputs: StepInputs) -> list[tuple[str, int, int]]:
        return [
            (space, row, position)
            for space in (FULL, "window")
            for row in range(len(rows))
            for position in read(inputs, space, row)
        ]

    wanted = []
    for row, (start, count) in enumerate(rows):
        seen = start + (count == 1)
        wanted += [(FULL, row, position) for position in range(seen)]
        # Whole pages, from that of the first token that the first query sees.
        first = max(0, start - WINDOW + 1) // PAGE_SIZE * PAGE_SIZE
        wanted += [("window", row, position) for position in range(first, seen)]
    assert sorted(chain.from_iterable(batch.on_ranks(cp, read_all))) == sorted(wanted)


@given(rows=rows_of_all_kinds, cp=each_cp, seed=st.integers(0, 9))
def test_every_new_token_is_written_once_where_its_page_lies(rows: list[tuple[int, int]], cp: int, seed: int) -> None:
    batch = Batch.of(rows, seed=seed)
    share = PAGE_SIZE // cp

    def written(inputs: StepInputs) -> list[tuple[str, int, int, int]]:
        return [
            (space, token, inputs.ctx.cp.rank, slot)
            for space, places in inputs.places.items()
            for token, slot in zip(places.owned.tolist(), places.slots.tolist(), strict=True)
        ]

    wanted = []
    for space in (FULL, "window"):
        positions = [(row, start + i) for row, (start, count) in enumerate(rows) for i in range(count)]
        for token, (row, position) in enumerate(positions):
            page = batch.tables[row][space][position // PAGE_SIZE]
            if page >= 0:
                wanted.append((space, token, position % PAGE_SIZE // share, int(page * share + position % share)))
    assert sorted(chain.from_iterable(batch.on_ranks(cp, written))) == sorted(wanted)


@given(rows=rows_of_all_kinds, cp=each_cp)
def test_the_last_token_of_every_row_gives_logits_on_its_rank(rows: list[tuple[int, int]], cp: int) -> None:
    batch = Batch.of(rows)
    ids = torch.cat(batch.on_ranks(cp, lambda inputs: inputs.ids[inputs.logits]))
    assert sorted(ids.tolist()) == np.cumsum([count for _, count in rows]).tolist()


@pytest.mark.parametrize("has_all_tokens", [False, True])
@pytest.mark.parametrize("is_log2", [False, True])
def test_parts_of_all_ranks_are_merged(has_all_tokens: bool, is_log2: bool) -> None:
    batch, generator = Batch.of([(20, 1), (3, 1), (9, 1)]), torch.Generator().manual_seed(1)
    outs = torch.randn(3, 3, 4, 6, generator=generator, dtype=torch.float64)
    lses = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    lses[0, 1] = -torch.inf  # no keys on this rank
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    num_parts = 2 if has_all_tokens else 3  # tokens that are split over ranks have a part of their own
    weights = torch.cat([lses[:num_parts], sinks.expand(1, 3, 4)]).softmax(0)[:num_parts]
    wanted = (outs[:num_parts] * weights[..., None]).sum(0)

    def check(inputs: StepInputs) -> None:
        rank, given = inputs.ctx.cp.rank, lses / math.log(2) if is_log2 else lses
        causal = None if has_all_tokens else (mine(inputs, outs[2]), mine(inputs, given[2]))
        found = StepLayout(inputs).combine((outs[rank], given[rank]), causal, sinks, is_log2=is_log2)
        own = wanted[:, 2 * rank : 2 * rank + 2] if has_all_tokens else mine(inputs, wanted)
        torch.testing.assert_close(found, own)

    batch.on_ranks(2, check, has_all_tokens=has_all_tokens)


def test_columns_of_all_members_are_gathered_in_their_order() -> None:
    columns = torch.arange(24.0).view(3, 8)

    def check(inputs: StepInputs) -> None:
        group = inputs.ctx.cp
        own = columns.tensor_split(group.size, dim=1)[group.rank]
        assert torch.equal(group.gather_columns(own), columns)

    for cp in (1, 2, 4):
        Batch.of([(0, 1)]).on_ranks(cp, check)


def test_a_group_of_one_moves_nothing() -> None:
    inputs = Batch.of([(0, 3), (4, 1)]).inputs(ParallelContext(split=Split(), rank=0, device=CPU, cp=Group()))
    local = torch.randn(4, 2, 3)
    assert inputs.exchange.gather(local) is local
    assert inputs.exchange.to_heads(local)[0] is local
    assert inputs.exchange.to_tokens(local) is local
    assert torch.equal(inputs.exchange.give_back(local), local[None])
