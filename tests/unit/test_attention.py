"""Every attention backend against dense softmax attention in float64, written out here."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionBackend, Capabilities
from raycache.attention.merge import attend_all, attend_causal, merge
from raycache.attention.torch_ref import TorchBackend
from raycache.engine.inputs import build_inputs
from raycache.engine.plan import Row, StepPlan, local_positions
from raycache.memory.component import Component, RowField
from raycache.memory.device import DevicePool, KVView
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split

BACKENDS: list[AttentionBackend] = [TorchBackend()]
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
ERROR = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# --- cp ranks as threads ----------------------------------------------------------------------------------------------


class ThreadGroup(Group):
    """A member of a group of threads that hand tensors to each other."""

    def __init__(self, *, rank: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank=rank, size=len(board))
        self._board, self._barrier = board, barrier

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._exchange(tensor)])

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(20)
        every = [theirs.clone() for theirs in self._board]
        self._barrier.wait(20)
        assert len({theirs.shape for theirs in every}) == 1, "members of a collective give the same shape"
        return every


def on_ranks(cp: int, work: Callable[[ParallelContext], None]) -> None:
    """Run on `cp` ranks at once."""
    board, barrier = [torch.empty(0)] * cp, threading.Barrier(cp)

    def run(rank: int) -> None:
        group = ThreadGroup(rank=rank, board=board, barrier=barrier) if cp > 1 else Group()
        try:
            work(ParallelContext(split=Split(cp=cp), rank=rank, device=torch.device("cpu"), cp=group))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(cp) as pool:
        for done in [pool.submit(run, rank) for rank in range(cp)]:
            done.result()


# --- a batch, and what is right for it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch of rows on scattered pages.

    Attributes:
        rows: (start, new tokens) each.
        share: tokens of a page on one cp rank.
        kv_heads, group, dim: of the heads; group query heads read one key head.
    """

    rows: Sequence[tuple[int, int]]
    cp: int = 1
    share: int = 4
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def page_size(self) -> int:
        return self.share * self.cp

    @property
    def scale(self) -> float:
        return self.dim**-0.5


class Batch:
    """Random sequences of a case: queries of the new tokens, keys and values of all of them."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(case.seed)

        def draw(count: int, heads: int) -> Tensor:
            return torch.randn(count, heads, case.dim, generator=random, dtype=torch.float64).to(case.dtype)

        self.q = [draw(count, case.kv_heads * case.group) for _, count in case.rows]
        self.k = [draw(start + count, case.kv_heads) for start, count in case.rows]
        self.v = [draw(start + count, case.kv_heads) for start, count in case.rows]
        numbers = [-(-(start + count) // case.page_size) for start, count in case.rows]
        pages = np.random.default_rng(case.seed).permutation(sum(numbers) + 3).astype(np.int32)
        self.num_pages = len(pages)
        self.tables = dict(enumerate(np.split(pages[: sum(numbers)], np.cumsum(numbers)[:-1])))
        self.plan = StepPlan(1, [Row(i, start, bytes(4 * count)) for i, (start, count) in enumerate(case.rows)])


def dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The slow twin: query i of n sees the first L - n + i + 1 of L keys. [n, Hq, D] -> [n, Hq, D] in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            keys, values = k[:seen, head // group].double(), v[:seen, head // group].double()
            weights = torch.softmax(keys @ q[i, head].double() * scale, 0)
            out[i, head] = weights @ values
    return out


def make_pool(case: Case, batch: Batch, ctx: ParallelContext) -> DevicePool:
    """A pool that holds the prefixes, each token where the placement rule says, and nonsense elsewhere."""
    shape = (case.kv_heads, case.dim)
    kv = Component("kv", (0,), (RowField("k", shape, 0), RowField("v", shape, 0)), case.dtype.itemsize)
    pool = DevicePool(
        [kv], num_layers=1, num_pages=batch.num_pages, page_size=case.page_size, ctx=ctx, dtype=case.dtype
    )
    view = pool.view("kv", 0)
    view.k.fill_(float("nan"))
    view.v.fill_(float("nan"))
    for i, (start, _) in enumerate(case.rows):
        for position in range(start):
            page, offset = batch.tables[i][position // case.page_size], position % case.page_size
            if offset // case.share == ctx.cp.rank:
                view.k[page, offset % case.share] = batch.k[i][position]
                view.v[page, offset % case.share] = batch.v[i][position]
    return pool


def holds_new_tokens(view: KVView, case: Case, batch: Batch, rank: int) -> bool:
    for i, (start, count) in enumerate(case.rows):
        for position in range(start, start + count):
            page, offset = batch.tables[i][position // case.page_size], position % case.page_size
            if offset // case.share == rank and not (
                torch.equal(view.k[page, offset % case.share], batch.k[i][position])
                and torch.equal(view.v[page, offset % case.share], batch.v[i][position])
            ):
                return False
    return True


def attend(backend: AttentionBackend, case: Case, batch: Batch) -> list[Tensor]:
    """What the backend gives for each row, put together from all ranks."""
    outs = [torch.full_like(q, float("nan")) for q in batch.q]

    def work(ctx: ParallelContext) -> None:
        view = make_pool(case, batch, ctx).view("kv", 0)
        mine = local_positions(batch.plan, cp_rank=ctx.cp.rank, cp_size=case.cp)
        inputs = build_inputs(batch.plan, batch.tables, page_size=case.page_size, ctx=ctx)
        new = (
            [k[start:] for k, (start, _) in zip(batch.k, case.rows, strict=True)],
            [v[start:] for v, (start, _) in zip(batch.v, case.rows, strict=True)],
        )
        # As a model gives them: parts of one product, so with strides.
        qkv = torch.cat([torch.cat([rows[i][at] for i, at in enumerate(mine)]) for rows in (batch.q, *new)], dim=1)
        q, k, v = qkv.split([case.kv_heads * case.group, case.kv_heads, case.kv_heads], dim=1)
        out = backend.plan(inputs, scale=case.scale).attend(view, q, k, v)
        assert out.shape == q.shape and out.dtype == q.dtype
        assert holds_new_tokens(view, case, batch, ctx.cp.rank), "new tokens are not where they belong"
        for i, part in enumerate(out.split([len(at) for at in mine])):
            outs[i][mine[i]] = part

    with torch.inference_mode():
        on_ranks(case.cp, work)
    return outs


def check(backend: AttentionBackend, case: Case) -> None:
    batch = Batch(case)
    for out, q, k, v in zip(attend(backend, case, batch), batch.q, batch.k, batch.v, strict=True):
        torch.testing.assert_close(
            out.double(), dense(q, k, v, scale=case.scale), atol=ERROR[case.dtype], rtol=ERROR[case.dtype]
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    starts = st.just(0) | st.integers(0, 40)
    counts = st.just(1) | st.integers(1, 24)
    return Case(
        rows=draw(st.lists(st.tuples(starts, counts), min_size=1, max_size=5)),
        cp=draw(st.sampled_from([1, 2, 3, 4])),
        share=draw(st.sampled_from([1, 3, 8])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        dim=draw(st.sampled_from([4, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**20)),
    )


@settings(max_examples=60)
@given(cases())
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.capabilities.name)
def test_any_batch_on_any_pages_equals_dense_attention(backend: AttentionBackend, case: Case) -> None:
    check(backend, case)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.capabilities.name)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_method_of_a_backend_takes_the_same_arguments(backend: AttentionBackend, dtype: str, cp: int) -> None:
    capabilities = backend.capabilities
    assert isinstance(capabilities, Capabilities)
    assert "cpu" in capabilities.device_types and capabilities.dtypes <= DTYPES.keys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        capabilities.name = "other"  # type: ignore[misc]
    if dtype not in capabilities.dtypes:
        pytest.skip(f"{capabilities.name} does not declare {dtype}")
    for rows in ([(0, 9)], [(17, 1)], [(17, 1), (0, 9), (30, 8), (5, 1)]):
        check(backend, Case(rows, cp=cp, dtype=DTYPES[dtype], dim=min(16, capabilities.max_head_dim)))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.capabilities.name)
@pytest.mark.parametrize("cp", [1, 2])
def test_long_prefixes_and_chunks_cross_the_blocks_of_a_kernel(backend: AttentionBackend, cp: int) -> None:
    check(backend, Case([(1100, 130), (700, 1), (0, 600)], cp=cp, share=16, kv_heads=1, group=2, dim=16))


@pytest.mark.parametrize("cp", [1, 2])
def test_scores_of_a_hundred_do_not_overflow(cp: int) -> None:
    case = Case([(20, 7), (0, 5), (9, 1)], cp=cp)
    batch = Batch(case)
    batch.q = [100 * q for q in batch.q]
    for out, q, k, v in zip(attend(TorchBackend(), case, batch), batch.q, batch.k, batch.v, strict=True):
        torch.testing.assert_close(out.double(), dense(q, k, v, scale=case.scale), atol=1e-4, rtol=1e-4)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(0, 2**20), st.integers(1, 5), st.data())
def test_a_chunk_may_end_anywhere(length: int, seed: int, chunks: int, data: st.DataObject) -> None:
    """A sequence computed in chunks through the pages equals one computed at once."""
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=chunks)) | {length})
    cp = data.draw(st.sampled_from([1, 2]))
    whole = Batch(Case([(0, length)], cp=cp, dtype=torch.float64, seed=seed))
    right = dense(whole.q[0], whole.k[0], whole.v[0], scale=8**-0.5)
    start = 0
    for stop in cuts:
        case = Case([(start, stop - start)], cp=cp, dtype=torch.float64, seed=seed)
        part = Batch(case)
        part.q, part.k, part.v = [whole.q[0][start:stop]], [whole.k[0][:stop]], [whole.v[0][:stop]]
        (out,) = attend(TorchBackend(), case, part)
        torch.testing.assert_close(out, right[start:stop], atol=1e-12, rtol=1e-12)
        start = stop


# --- merge ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.data())
def test_parts_of_the_keys_merge_to_the_whole(
    tokens: int, keys: int, kv_heads: int, group: int, data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    q = torch.randn(tokens, kv_heads * group, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, keys, kv_heads, 8, generator=random, dtype=torch.float64)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, keys - 1), max_size=3) if keys > 1 else st.just(set()))), keys]
    parts = [attend_all(q, k[a:b], v[a:b], scale=0.3) for a, b in itertools.pairwise(cuts)]
    # A part without keys: its numbers do not count.
    parts.append((torch.full_like(q, 7.0), torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)))
    merged = merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    right = torch.cat([dense(q[i : i + 1], k, v, scale=0.3) for i in range(tokens)])
    torch.testing.assert_close(merged, right, atol=1e-12, rtol=1e-12)
    scores = torch.einsum("thd,lhd->thl", q, k.repeat_interleave(group, 1)) * 0.3
    torch.testing.assert_close(torch.logsumexp(torch.stack([lse for _, lse in parts]), 0), scores.logsumexp(-1))


@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_causal_attention_and_its_log_sum_exp(tokens: int, kv_heads: int, group: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, kv_heads * group, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, tokens, kv_heads, 8, generator=random, dtype=torch.float64)
    out, lse = attend_causal(q, k, v, scale=0.3)
    torch.testing.assert_close(out, dense(q, k, v, scale=0.3), atol=1e-12, rtol=1e-12)
    scores = torch.einsum("thd,lhd->thl", q, k.repeat_interleave(group, 1)) * 0.3
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[:, None]
    torch.testing.assert_close(lse, scores.masked_fill(mask, float("-inf")).logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merging_many_parts_in_half_precision_loses_no_more_than_rounding(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    outs = torch.randn(8, 50, 4, 16, generator=random).to(dtype)
    lses = torch.randn(8, 50, 4, generator=random)
    exact = torch.einsum("pthd,pth->thd", outs.double(), torch.softmax(lses.double(), 0))
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (merge(outs, lses).double() - exact).abs().max() <= 2 * rounding
