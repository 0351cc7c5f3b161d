"""Chunks under cp that pass keys or queries: both ways are right, the cheaper one is taken, nobody reads early."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.flashinfer_tables import passed_table
from raycache.attention.layout import StepLayout
from raycache.attention.passing import PassedBytes, Passing
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, kv
from raycache.parallel.collectives import Group, Started
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.step.exchange import TokenExchange
from tests.oracle.attention import MIXED, Batch, Case, Seat, ThreadGroup, close, on_ranks
from tests.oracle.families import make_family
from tests.oracle.gang import gang_logits
from tests.unit import test_attention as full

HEADS = full.Heads(kv=2, group=3, dim=8)
MOVED = PassedBytes.of(queries=6, dim=8, value_dim=8, key=32, dtype=torch.float32)


@st.composite
def batches_with_chunks(draw: st.DrawFn) -> Case:
    rows = st.tuples(st.just(0) | st.integers(0, 40), st.just(1) | st.integers(1, 24))
    chunk = draw(st.tuples(st.integers(0, 40), st.integers(2, 24)))
    others = draw(st.lists(rows, max_size=4))
    cp, share = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 3, 8]))
    return Case([*others, chunk], cp=cp, share=share, dtype=torch.float64, seed=draw(st.integers(0, 2**20)))


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Let every chunk go one way, or every second."""

    def passes_keys(self: PassedBytes, *, num_new: int, num_cached: int) -> bool:
        return way == "keys" or (way == "both" and num_new % 2 == 0)

    monkeypatch.setattr(PassedBytes, "passes_keys", passes_keys)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["keys", "queries", "both"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("cp", [2, 4])
def test_both_ways_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, cp: int, window: int, has_sinks: bool, way: str
) -> None:
    choose(monkeypatch, way)
    rows = [*MIXED, (13, 7), (33, 2), (16, 8)]
    case = Case(rows, cp=cp, window=window, dtype=torch.float64)
    full.check(TorchBackend(), case, full.Heads(has_sinks=has_sinks))


@pytest.mark.parametrize("way", ["keys", "queries"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_that_goes_on_from_another_one_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, way: str
) -> None:
    """As behind a restore point: its cached tokens are new ones of the step."""
    choose(monkeypatch, way)
    model = make_family(tmp_path / family, family)
    ids = [np.random.default_rng(0).integers(3, 515, 61).tolist()]
    steps = [[(0, 0, 13)], [(0, 13, 40), (0, 40, 53), (0, 53, 61)]]
    wanted, found = (
        gang_logits(model, ids, steps, split=split, dtype=torch.float64) for split in (Split(), Split(cp=2))
    )
    assert np.abs(wanted[0] - found[0]).max() < 1e-9


# --- what kernels are given -------------------------------------------------------------------------------------------


@given(batches_with_chunks(), st.booleans())
def test_the_pages_of_a_run_hold_its_keys_in_order(case: Case, passes_keys: bool) -> None:
    """A kernel of pages sees, up to its last query, each position of the sequence that the rank must look at."""
    batch = Batch(case)
    moved = PassedBytes(query=passes_keys, key=not passes_keys)
    values = [torch.arange(start + count, dtype=torch.float64) + 1000 * i for i, (start, count) in enumerate(case.rows)]

    def work(ctx: ParallelContext) -> None:
        seat = Seat(batch, ctx, [kv("kv", (0,), heads=1, dim=2, fmt=case.fmt)])
        layout, view = StepLayout(seat.inputs), seat.pool.kv(0)
        pairs = [row[:, None, None].expand(-1, 1, 2) for row in values]
        seat.fill(view.write, pairs, pairs, space=FULL)
        passing = Passing(layout, FULL, moved)
        new = seat.local(case.new(pairs))

        def pack(ids: Tensor, to: Tensor) -> None:
            to.copy_(view.k[ids])

        buffer = passing.gather((new,), pack, lambda new: None)[..., 0, 0]
        runs = [(keys, local, run) for keys in passing.keys for local, run in keys.chunk.local_runs()]
        if not runs:
            return
        table = passed_table(runs, page_len=passing.page_len)
        queries = torch.arange(len(seat.inputs.ids))[table.tokens]
        for i, (keys, local, run) in enumerate(runs):
            row, start = keys.chunk.row, keys.chunk.start
            begin = 0 if keys.num_cached else start
            found = buffer[table.ids[table.indptr[i] : table.indptr[i + 1]].tolist()].flatten()[: table.lens[i]]
            assert found.tolist() == values[row][begin : start + run.stop].tolist()
            mine = queries[table.queries[i] : table.queries[i + 1]]
            assert mine.tolist() == list(range(local.start, local.stop)) and len(mine) == len(run)
            assert 1 <= table.last[i] <= passing.page_len
        asking = {row for row, (start, count) in enumerate(case.rows) if count == 1 or (start and not passes_keys)}
        assert (passing.asking is not None) == bool(asking)
        if passing.asking is not None:
            assert passing.asking.num_tokens == sum(case.rows[row][1] for row in asking)
            assert torch.equal(passing.asking.positions, passing.asked(seat.inputs.positions))

    on_ranks(case.cp, work)


# --- the choice -------------------------------------------------------------------------------------------------------


class Counting(ThreadGroup):
    """Counts the bytes that a member gets from others."""

    num_bytes = 0

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        every = super()._exchange(tensor)
        self.num_bytes += tensor.nbytes * (self.size - 1)
        return every

    def all_to_all(self, tensor: Tensor) -> Tensor:
        before = self.num_bytes
        found = super().all_to_all(tensor)
        self.num_bytes = before + tensor.nbytes // self.size * (self.size - 1)
        return found


def received(case: Case, monkeypatch: pytest.MonkeyPatch, way: str | None) -> int:
    """Bytes that rank 0 gets in one layer."""
    board, barrier = [torch.empty(0)] * case.cp, threading.Barrier(case.cp)
    groups = [Counting(rank=rank, board=board, barrier=barrier) for rank in range(case.cp)]
    batch = Batch(case)
    with monkeypatch.context() as patch:
        if way is not None:
            choose(patch, way)

        def work(rank: int) -> None:
            ctx = ParallelContext(Split(cp=case.cp), rank, torch.device("cpu"), cp=groups[rank])
            seat = Seat(batch, ctx, [kv("kv", (0,), heads=HEADS.kv, dim=HEADS.dim, fmt=case.fmt)])
            view = seat.pool.kv(0)
            view.k.zero_(), view.v.zero_()
            q, k, v = (torch.zeros(len(seat.inputs.ids), n, HEADS.dim) for n in (6, 2, 2))
            TorchBackend().plan(seat.inputs).attend(view, q, k, v, scale=1.0, sinks=None)

        with ThreadPoolExecutor(case.cp) as pool:
            list(pool.map(work, range(case.cp)))
    return groups[0].num_bytes


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("start", [64, 128, 192, 256, 512])
def test_the_way_that_is_taken_moves_fewer_bytes(monkeypatch: pytest.MonkeyPatch, start: int, cp: int) -> None:
    case = Case([(start, 48)], cp=cp, share=8)
    keys, queries = (received(case, monkeypatch, way) for way in ("keys", "queries"))
    assert keys != queries and received(case, monkeypatch, None) == min(keys, queries)


def test_new_prompts_exchange_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(0, 48), (0, 16)], cp=2, share=8)
    assert received(case, monkeypatch, None) == 32 * 2 * HEADS.kv * HEADS.dim * 4


def test_single_tokens_never_pass_keys() -> None:
    assert not MOVED.passes_keys(num_new=2, num_cached=64) and MOVED.passes_keys(num_new=64, num_cached=64)

    def work(ctx: ParallelContext) -> None:
        seat = Seat(batch, ctx, [])
        asking = Passing(StepLayout(seat.inputs), FULL, PassedBytes(query=1, key=0)).asking
        assert asking is not None and [row.start for row in asking.rows] == [1, 9] and asking.is_decode

    batch = Batch(Case([(1, 1), (30, 8), (9, 1), (0, 3)], cp=2))
    on_ranks(2, work)


# --- overlap ----------------------------------------------------------------------------------------------------------


class Late(ThreadGroup):
    """A gather arrives when it is waited for, and reads what is sent only then."""

    def iall_gather(self, tensor: Tensor, *, out: Tensor) -> Started:
        out.fill_(float("nan"))

        def wait() -> None:
            out.copy_(self.all_gather(tensor))

        return Started(wait, lambda: False)


@pytest.mark.parametrize("way", ["keys", "queries", "both"])
def test_nothing_is_read_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    choose(monkeypatch, way)
    monkeypatch.setattr("tests.oracle.attention.ThreadGroup", Late)
    full.check(TorchBackend(), Case([*MIXED, (13, 7)], cp=3, dtype=torch.float64), full.Heads())


def test_a_started_gather_of_parts_is_that_of_all_of_them() -> None:
    case = Case(MIXED, cp=3)
    batch = Batch(case)
    one, other = case.draw(2, 4, salt=1), case.draw(3, 4, salt=2)

    def work(ctx: ParallelContext) -> None:
        seat = Seat(batch, ctx, [])
        exchange = seat.inputs.exchange
        assert isinstance(exchange, TokenExchange)
        every, wait = exchange.start(seat.local(case.new(one)), seat.local(case.new(other)))
        wait()
        wanted = torch.cat([torch.cat(case.new(one)), torch.cat(case.new(other))], dim=1)
        close(every[exchange.where], wanted, 0.0)

    on_ranks(3, work)


def test_a_group_of_one_gathers_at_once() -> None:
    out = torch.zeros(1, 3)
    started = Group().iall_gather(torch.ones(3), out=out)
    assert started.is_done() and out.sum() == 3
