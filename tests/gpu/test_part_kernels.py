"""Partial results packed for an exchange over cp and merged, against the merge in plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from raycache.attention.merge import merge

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 32, 128), (7, 12, 64), (64, 8, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("has_sinks", "is_log2"), [(False, True), (True, False), (True, True)])
def test_parts_of_all_ranks_are_merged_as_in_torch(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, size: int, has_sinks: bool, is_log2: bool
) -> None:
    from raycache.attention import part_kernels

    generator = torch.Generator("cuda").manual_seed(tokens)
    outs = torch.randn(size, tokens, heads, dim, device="cuda", generator=generator).to(dtype)
    lses = 5 * torch.randn(size, tokens, heads, device="cuda", generator=generator)
    lses[0, 0, : heads // 2] = -torch.inf  # no keys on this rank
    sinks = torch.randn(heads, device="cuda", generator=generator).to(dtype) if has_sinks else None
    wanted = merge(outs.double(), lses.double(), None if sinks is None else sinks.double())
    assert part_kernels.takes(outs[0], lses[0])
    given = lses / math.log(2) if is_log2 else lses
    packed = [part_kernels.pack(out, lse, size=size, is_log2=is_log2) for out, lse in zip(outs, given, strict=True)]
    for rank in range(size):
        own = slice(rank * heads // size, (rank + 1) * heads // size)
        every = torch.stack([of_rank[rank] for of_rank in packed])
        own_sinks = None if sinks is None else sinks[own].contiguous()
        found = part_kernels.merge(every, own_sinks, dtype=dtype)
        bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * float(wanted.abs().max())
        assert float((found.double() - wanted[:, own]).abs().max()) <= bound


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(7, 12, 64), (50, 6, 80), (130, 16, 128), (9, 6, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(("has_sinks", "is_log2"), [(False, True), (True, False), (True, True)])
def test_parts_of_some_tokens_are_merged_as_in_torch(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, has_own: bool, has_sinks: bool, is_log2: bool
) -> None:
    from raycache.attention import part_kernels

    generator = torch.Generator("cuda").manual_seed(tokens)
    outs = torch.randn(3, tokens, heads, dim, device="cuda", generator=generator).to(dtype)
    lses = 5 * torch.randn(3, tokens, heads, device="cuda", generator=generator)
    lses[0, ::2] = -torch.inf  # no keys on this rank
    sinks = torch.randn(heads, device="cuda", generator=generator).to(dtype) if has_sinks else None
    chosen = torch.randperm(tokens, device="cuda", generator=generator)[: tokens // 2]
    padded = torch.cat([chosen, chosen.new_zeros(2)])
    parts = slice(0, 3 if has_own else 2)
    wanted = merge(outs[parts].double(), lses[parts].double(), None if sinks is None else sinks.double())[chosen]
    given = lses / math.log(2) if is_log2 else lses
    pairs = zip(outs[:2], given, strict=False)
    packed = torch.stack([part_kernels.pack(out, lse, size=1, is_log2=is_log2, tokens=padded)[0] for out, lse in pairs])
    own = (outs[2][chosen], given[2][chosen]) if has_own else None
    found = part_kernels.merge(packed, sinks, dtype=dtype, num_tokens=len(chosen), own=own, is_log2=is_log2)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * float(wanted.abs().max())
    assert found.shape == wanted.shape and float((found.double() - wanted).abs().max()) <= bound


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 32, 128), (7, 12, 64), (130, 6, 256), (9, 6, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_others", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_that_are_apart_in_memory_are_merged_as_in_torch(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, num_others: int, has_sinks: bool
) -> None:
    from raycache.attention.merge_kernels import merge_apart

    generator = torch.Generator("cuda").manual_seed(tokens)
    outs = torch.randn(num_others + 2, tokens + 3, heads, dim, device="cuda", generator=generator).to(dtype)[:, :tokens]
    lses = 5 * torch.randn(num_others + 2, tokens + 5, heads, device="cuda", generator=generator)[:, :tokens]
    lses[0, ::2] = -torch.inf  # no keys on this rank
    lses[-1, 0] = -torch.inf  # nor on another one
    sinks = torch.randn(heads, device="cuda", generator=generator).to(dtype) if has_sinks else None
    wanted = merge(outs.double(), lses.double() * math.log(2), None if sinks is None else sinks.double())
    found = merge_apart((outs[0], lses[0]), (outs[1], lses[1]), (outs[2:], lses[2:]), sinks)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * float(wanted.abs().max())
    assert float((found.double() - wanted).abs().max()) <= bound


def test_rows_without_keys_on_any_rank_are_finite() -> None:
    from raycache.attention import part_kernels

    out = torch.randn(3, 8, 64, device="cuda").bfloat16()
    packed = part_kernels.pack(out, torch.full((3, 8), -torch.inf, device="cuda"), size=2, is_log2=True)
    assert bool(part_kernels.merge(packed, None, dtype=torch.bfloat16).isfinite().all())
