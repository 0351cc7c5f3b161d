"""Kernels for a vocabulary that is split over ranks, against torch on the CPU; each rank is simulated."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 1000, 4096])
def test_parts_of_an_embedding_add_up(size: int, dtype: torch.dtype) -> None:
    from raycache.layers.vocab_kernels import embed

    table = torch.randn(30, size, dtype=dtype)
    for num_tokens, members in itertools.product((1, 5, 300), (1, 2, 3)):
        ids = torch.randint(0, 30, (num_tokens,))
        parts = table.cuda().split(30 // members)
        found = sum(embed(ids.cuda(), part, member * len(part)) for member, part in enumerate(parts))
        assert isinstance(found, torch.Tensor) and torch.equal(found.cpu(), F.embedding(ids, table))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [3, 17, 1000, 151936, 262145])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_first_of_the_largest_logits_is_found(members: int, vocab_size: int, dtype: torch.dtype) -> None:
    from raycache.layers.vocab_kernels import best_of_all, best_of_part

    share = -(-vocab_size // members)
    for rows, kind in itertools.product((1, 7, 64), ("ties", "any", "one", "none")):
        logits = torch.randn(rows, members * share)
        if kind == "ties":
            logits = logits.mul(2).round().clamp(max=4)
        elif kind != "any":
            logits.fill_(-torch.inf)
            if kind == "one":
                logits[:, vocab_size - 1] = -3.0
        logits = logits.to(dtype)
        every = logits[:, :vocab_size]
        first = (every == every.amax(-1, keepdim=True)).int().argmax(-1)
        logits[:, vocab_size:] = 100
        best = []
        for member, part in enumerate(logits.cuda().split(share, dim=1)):
            tokens = range(member * share, min((member + 1) * share, vocab_size))
            best.append(best_of_part(part, tokens, num_parts=16))
        found = best_of_all(torch.stack(best))
        assert torch.equal(found.cpu(), first), (kind, rows)
