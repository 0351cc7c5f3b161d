"""Plans of CUDA graphs that are made without FlashInfer's wrappers, against those that the wrappers make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention.flashinfer_kernels import Heads, KernelCache, LatentKernel, PagedKernel
from raycache.attention.flashinfer_replans import Replans, StaticRows
from raycache.attention.flashinfer_tables import Table, decode_table
from raycache.step.inputs import Pages

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
PAGE_LEN, MAX_PAGES, NUM_PAGES = 16, 20, 1400
MAX_PLAN = 1 << 20
"""Bytes, more than those of any plan here."""
STEPS = 36
"""More than two pages of tokens."""


@pytest.fixture(scope="module")
def direct() -> KernelCache:
    return KernelCache(DEVICE)


@pytest.fixture(scope="module")
def by_wrapper() -> KernelCache:
    kernels = KernelCache(DEVICE)
    kernels.shortcut.close("for comparison")
    return kernels


def growing(rows: int, *, window: int = 0) -> Iterator[Table]:
    """Tables of a batch whose rows get a token per step; some are short, some end at a page, one has most pages."""
    random = np.random.default_rng(rows)
    starts = random.integers(1, (MAX_PAGES - 3) * PAGE_LEN, rows)
    starts[:3] = [(MAX_PAGES - 3) * PAGE_LEN, PAGE_LEN - 1, 1][: min(rows, 3)]
    every = random.permutation(NUM_PAGES).astype(np.int32).reshape(-1, MAX_PAGES)[np.arange(rows)]
    for step in range(STEPS):
        ends = starts + step
        first = np.maximum(ends - window, 0) // PAGE_LEN if window else np.zeros_like(ends)
        lens = (ends - first * PAGE_LEN).astype(np.int32)
        ids = [row[begin : -(-end // PAGE_LEN)] for row, begin, end in zip(every, first, ends, strict=True)]
        indptr = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        pages = Pages(indptr, np.concatenate(ids), first.astype(np.int32), lens, lens, np.zeros_like(lens))
        yield decode_table(pages, lens, page_len=PAGE_LEN)


def replans_of(kernel: PagedKernel | LatentKernel) -> Replans:
    assert kernel._replans is not None
    return kernel._replans


def same_plans(one: PagedKernel | LatentKernel, other: PagedKernel | LatentKernel, table: Table) -> None:
    """What kernels read of the tables, and of the plans all bytes that a plan writes."""
    assert torch.equal(replans_of(one).table.ids[: len(table.ids)], replans_of(other).table.ids[: len(table.ids)])
    for name in ("queries", "indptr"):
        assert torch.equal(getattr(replans_of(one).table, name), getattr(replans_of(other).table, name)), name
    planner = replans_of(one)._planner
    assert planner is not None
    torch.cuda.synchronize()
    plans = []
    for byte in (0, 255):
        for buffer in planner.buffers[1:]:
            buffer[:MAX_PLAN].fill_(byte)
        assert planner.plan(replans_of(one).table) == list(other._wrapper._plan_info)
        plans.append(planner.buffers[1][:MAX_PLAN].cpu())
    written = plans[0] == plans[1]
    assert written.sum() > 4 * len(table.lens)
    assert torch.equal(plans[0][written], other._wrapper._int_workspace_buffer[:MAX_PLAN].cpu()[written])


def equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "window"),
    [(64, 8, 64, 0), (64, 8, 64, 128), (32, 8, 128, 0), (40, 40, 128, 0), (16, 2, 512, 0)],
    ids=["plain", "window", "128", "no-split", "512"],
)
def test_keys_and_values(
    direct: KernelCache, by_wrapper: KernelCache, queries: int, keys: int, dim: int, window: int, rows: int
) -> None:
    heads = Heads(queries, keys, dim, dim, torch.bfloat16, dim**-0.5)
    one, other = (PagedKernel(kernels, "fa2", StaticRows(rows, MAX_PAGES)) for kernels in (direct, by_wrapper))
    random = torch.Generator(DEVICE).manual_seed(rows)
    k, v = torch.randn(
        2, NUM_PAGES, PAGE_LEN, keys, dim, generator=random, device=DEVICE, dtype=torch.bfloat16
    ).unbind()
    q = torch.randn(rows, queries, dim, generator=random, device=DEVICE, dtype=torch.bfloat16)
    for step, table in enumerate(growing(rows, window=window)):
        torch.cuda.synchronize()
        for kernel in (one, other):
            kernel.plan(table, heads, is_causal=True, window=window)
        assert replans_of(one).is_direct == (step > 0)
        assert not replans_of(other).is_direct
        equal(one.run(q, k, v, lse_base="ln"), other.run(q, k, v, lse_base="ln"))
        if step:
            assert torch.equal(replans_of(one).table.last, replans_of(other).table.last)
            same_plans(one, other, table)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("queries", [16, 32, 128])
def test_latents(direct: KernelCache, by_wrapper: KernelCache, queries: int, rows: int) -> None:
    heads = Heads(queries, 1, 64, 512, torch.bfloat16, 192**-0.5)
    one, other = (LatentKernel(kernels, StaticRows(rows, MAX_PAGES)) for kernels in (direct, by_wrapper))
    random = torch.Generator(DEVICE).manual_seed(rows)
    latent, rope = (
        torch.randn(NUM_PAGES, PAGE_LEN, size, generator=random, device=DEVICE, dtype=torch.bfloat16)
        for size in (512, 64)
    )
    q, q_rope = (
        torch.randn(rows, queries, size, generator=random, device=DEVICE, dtype=torch.bfloat16) for size in (512, 64)
    )
    for step, table in enumerate(growing(rows)):
        torch.cuda.synchronize()
        for kernel in (one, other):
            kernel.plan(table, heads, is_causal=False, has_lse=True)
        assert replans_of(one).is_direct == (step > 0)
        assert not replans_of(other).is_direct
        equal(one.run(q, q_rope, latent, rope), other.run(q, q_rope, latent, rope))
        if step:
            assert torch.equal(replans_of(one).table.lens, replans_of(other).table.lens)
            same_plans(one, other, table)
