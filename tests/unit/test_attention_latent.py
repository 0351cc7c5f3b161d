"""Latent attention of every backend against keys and values made of all latents in float64, written out here."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionBackend, AttentionStep, LatentProjection, Selection
from raycache.attention.latent import pieces
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, CacheFormat, index_keys, latent
from tests.oracle.attention import (
    DTYPES,
    MIXED,
    Batch,
    Case,
    LargestTensor,
    Seat,
    close,
    dense,
    each_backend,
    each_device,
    each_dtype,
    skip_unless_declared,
)

# Absorbed queries and the latents' mean are rounded once more than in the usual form.
ERROR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}
SCALE = 0.2
NOTHING = nullcontext()


@dataclass(frozen=True)
class Sizes:
    """Of a latent layer; the value's may be smaller or larger than the key's."""

    heads: int = 3
    dim: int = 6
    rope: int = 4
    value: int = 5
    rank: int = 16


class Sequences:
    """Random sequences: queries and latents of all tokens."""

    def __init__(self, case: Case, sizes: Sizes) -> None:
        self.case, self.sizes = case, sizes
        self.q = case.draw(sizes.heads, sizes.dim + sizes.rope, salt=1)
        self.latent, self.rope = case.draw(sizes.rank, salt=2), case.draw(sizes.rope, salt=3)
        small = sizes.rank**-0.5
        self.key = case.draw_one(sizes.heads, sizes.dim, sizes.rank, salt=4) * small
        self.value = case.draw_one(sizes.heads, sizes.value, sizes.rank, salt=5) * small

    def right(self, row: int, allowed: list[list[int]] | None = None) -> Tensor:
        latents, rope = self.latent[row].double(), self.rope[row].double()
        k = torch.einsum("lr,hdr->lhd", latents, self.key.double())
        k = torch.cat([k, rope[:, None].expand(-1, self.sizes.heads, -1)], -1)
        v = torch.einsum("lr,hdr->lhd", latents, self.value.double())
        return dense(self.case.new(self.q)[row], k, v, scale=SCALE, allowed=allowed)

    def attend(
        self,
        backend: AttentionBackend,
        fmt: CacheFormat | None = None,
        *,
        top_k: int = 0,
        watch: AbstractContextManager[object] = NOTHING,
    ) -> list[Tensor]:
        """With a `top_k`, an indexer whose scores are all 0 chooses the first ones."""
        case = self.case
        fmt = fmt or case.fmt
        components = [latent([0], rank=self.sizes.rank, rope_dim=self.sizes.rope, fmt=fmt)]
        components.append(index_keys([0], dim=2, fmt=case.fmt))

        def work(seat: Seat, step: AttentionStep) -> Tensor:
            view = seat.pool.latent(0)
            seat.fill(view.write, self.latent, self.rope, space=FULL)
            selection: Selection | None = None
            q, c, r = (seat.local(case.new(rows)) for rows in (self.q, self.latent, self.rope))
            if top_k:
                index = seat.pool.index(0)
                index.key.fill_(0)
                zeros = q.new_zeros(len(q), 2)
                selection = step.select(index, zeros[:, None], zeros, zeros[:, :1], top_k=top_k)
            projection = LatentProjection(self.key.to(q.device), self.value.to(q.device))
            with watch:
                out = step.attend_latent(view, q, c, r, projection, scale=SCALE, selection=selection)
            assert out.shape == (len(q), self.sizes.heads, self.sizes.value) and out.dtype == q.dtype
            if not fmt.has_fp8_latent:
                assert seat.holds_new(
                    lambda slots: view.take(slots, dtype=case.dtype), self.latent, self.rope, space=FULL
                )
            return out

        return Batch(case).run(backend, components, work)


def check(backend: AttentionBackend, case: Case, sizes: Sizes) -> None:
    sequences = Sequences(case, sizes)
    for row, out in enumerate(sequences.attend(backend)):
        close(out, sequences.right(row), ERROR[case.dtype])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = st.just(1) | st.integers(1, 20)
    return Case(
        rows=draw(st.lists(st.tuples(st.just(0) | st.integers(0, 40), counts), min_size=1, max_size=4)),
        cp=draw(st.sampled_from([1, 2, 3, 4])),
        share=draw(st.sampled_from([1, 3, 8])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**20)),
    )


sizes_ = st.builds(
    Sizes,
    heads=st.integers(1, 4),
    dim=st.integers(1, 8),
    rope=st.integers(1, 6),
    value=st.integers(1, 16),
    rank=st.integers(1, 24),
)


@each_backend
@given(cases(), sizes_)
def test_any_batch_equals_attention_to_expanded_keys(backend: AttentionBackend, case: Case, sizes: Sizes) -> None:
    check(backend, case, sizes)


@each_backend
@pytest.mark.parametrize("cp", [1, 2, 4])
@each_dtype
@each_device
def test_latents_in_every_dtype(backend: AttentionBackend, device: str, dtype: str, cp: int) -> None:
    skip_unless_declared(backend, dtype, device)
    for rows in ([(0, 9)], [(17, 1)], MIXED):
        check(backend, Case(rows, cp=cp, dtype=DTYPES[dtype], device=device), Sizes())


@each_backend
@given(cases(), st.integers(1, 30))
def test_equal_scores_are_won_by_the_earliest_tokens(backend: AttentionBackend, case: Case, top_k: int) -> None:
    sequences = Sequences(case, Sizes())
    for row, out in enumerate(sequences.attend(backend, top_k=top_k)):
        start, count = case.rows[row]
        allowed = [list(range(min(top_k, start + i + 1))) for i in range(count)]
        close(out, sequences.right(row, allowed), ERROR[case.dtype])


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("top_k", [0, 12])
def test_cached_latents_in_fp8_are_rounded_and_new_ones_of_a_chunk_are_not(cp: int, top_k: int) -> None:
    sequences = Sequences(Case(MIXED, cp=cp), Sizes(rank=128))
    fmt = CacheFormat("float32", has_fp8_latent=True)
    outs = sequences.attend(TorchBackend(), fmt, top_k=top_k)
    exact = list(sequences.latent)
    for row, (start, count) in enumerate(sequences.case.rows):
        cached = start if count > 1 else start + 1
        # Three bits of mantissa, and a rotary part in bfloat16.
        scale = (exact[row].abs().amax(-1, keepdim=True) / 448).float()
        rounded = (exact[row] / scale).to(torch.float8_e4m3fn).float() * scale
        sequences.latent[row] = torch.cat([rounded[:cached], exact[row][cached:]])
        rope = sequences.rope[row]
        sequences.rope[row] = torch.cat([rope[:cached].bfloat16().float(), rope[cached:]])
        allowed = [list(range(min(top_k or 1000, start + i + 1))) for i in range(count)]
        close(outs[row], sequences.right(row, allowed), 1e-5)


@pytest.mark.parametrize("top_k", [0, 300])
@pytest.mark.parametrize("length", [600, 1200])
def test_expanded_prefixes_stay_below_their_bound_however_long_they_are(length: int, top_k: int) -> None:
    bound, largest = 20_000, LargestTensor()
    sequences = Sequences(Case([(length, 5)], share=16), Sizes())
    (out,) = sequences.attend(TorchBackend(expanded_bytes=bound), top_k=top_k, watch=largest)
    allowed = [list(range(min(top_k or length + 5, length + i + 1))) for i in range(5)]
    close(out, sequences.right(0, allowed), ERROR[torch.float32])
    assert bound / 4 < largest.num_bytes <= bound / 2, "keys are half of it, whatever the length"


def test_a_decode_makes_nothing_per_head_of_the_prefix() -> None:
    sizes = Sizes(heads=16)
    sequences = Sequences(Case([(600, 1)], share=16), sizes)
    largest = LargestTensor()
    (out,) = sequences.attend(TorchBackend(), watch=largest)
    close(out, sequences.right(0), ERROR[torch.float32])
    assert largest.num_bytes == 601 * (sizes.rank + sizes.rope) * 4, "the latents that are read"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=5), st.integers(1, 8))
def test_pieces_are_the_runs_in_order(runs: list[tuple[int, int]], length: int) -> None:
    cut = list(pieces(runs, length))
    slots = [[slot for first, count in piece for slot in range(first, first + count)] for piece, _ in cut]
    assert [slot for piece in slots for slot in piece] == [
        s for first, count in runs for s in range(first, first + count)
    ]
    assert [len(piece) for piece in slots] == [size for _, size in cut]
    assert all(size == length for _, size in cut[:-1]) and all(0 < size <= length for _, size in cut[-1:])
