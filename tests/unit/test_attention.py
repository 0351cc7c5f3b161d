"""Every attention backend against dense attention in float64: what all of them share, and keys and values.

Latents, the indexer and recurrent layers are in test_attention_latent.py, _sparse.py and _states.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionBackend, AttentionStep, Capabilities
from raycache.attention.full import WINDOW_BLOCK
from raycache.attention.merge import attend_all, attend_causal, attend_masked, join, merge
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import kv
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

ERROR = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of a case; `group` query heads read one key head."""

    kv: int = 2
    group: int = 3
    dim: int = 8
    has_sinks: bool = False


class Sequences:
    """Random sequences of a case: queries, keys and values of all of their tokens."""

    def __init__(self, case: Case, heads: Heads) -> None:
        self.case, self.heads, self.scale = case, heads, heads.dim**-0.5
        self.q = case.draw(heads.kv * heads.group, heads.dim, salt=1)
        self.k, self.v = (case.draw(heads.kv, heads.dim, salt=salt) for salt in (2, 3))
        self.sinks = case.draw_one(heads.kv * heads.group) if heads.has_sinks else None

    def attend(self, backend: AttentionBackend) -> list[Tensor]:
        case, heads = self.case, self.heads
        component = kv(
            "window" if case.window else "kv", (0,), heads=heads.kv, dim=heads.dim, fmt=case.fmt, window=case.window
        )
        new = case.new(self.q), case.new(self.k), case.new(self.v)

        def work(seat: Seat, step: AttentionStep) -> Tensor:
            view = seat.pool.kv(0)
            view.k.fill_(float("nan"))
            view.v.fill_(float("nan"))
            seat.fill(view.write, self.k, self.v, space=view.space)
            # As a model gives them: parts of one product, so with strides.
            qkv = torch.cat([seat.local(rows) for rows in new], dim=1)
            q, k, v = qkv.split([heads.kv * heads.group, heads.kv, heads.kv], dim=1)
            sinks = None if self.sinks is None else self.sinks.to(q.device)
            out = step.attend(view, q, k, v, scale=self.scale, sinks=sinks)
            assert out.shape == q.shape and out.dtype == q.dtype
            flat = view.k.flatten(0, 1), view.v.flatten(0, 1)
            assert seat.holds_new(lambda slots: tuple(x[slots] for x in flat), self.k, self.v, space=view.space)
            return out

        return Batch(case).run(backend, [component], work)

    def right(self) -> list[Tensor]:
        return [
            dense(q, k, v, scale=self.scale, window=self.case.window, sinks=self.sinks)
            for q, k, v in zip(self.case.new(self.q), self.k, self.v, strict=True)
        ]


def check(backend: AttentionBackend, case: Case, heads: Heads) -> None:
    sequences = Sequences(case, heads)
    for out, right in zip(sequences.attend(backend), sequences.right(), strict=True):
        close(out, right, ERROR[case.dtype])


# --- the protocol -----------------------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("protocol", [AttentionBackend, AttentionStep])
def test_a_backend_implements_every_method_with_the_same_arguments(backend: AttentionBackend, protocol: type) -> None:
    if protocol is AttentionBackend:
        kind: type = type(backend)
    else:
        kind = planned_step_type(backend)
    methods = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method) and name[0] != "_"}
    assert methods
    for name, method in methods.items():
        found = vars(kind).get(name)
        assert inspect.isfunction(found), f"{kind.__name__} has no {name} of its own"
        wanted = [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        assert [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()] == wanted, name


def planned_step_type(backend: AttentionBackend) -> type:
    kinds: list[type] = []

    def work(seat: Seat, step: AttentionStep) -> Tensor:
        kinds.append(type(step))
        return torch.zeros(sum(map(len, seat.mine)))

    Batch(Case([(0, 2)])).run(backend, [], work)
    return kinds[0]


@each_backend
def test_capabilities_are_facts(backend: AttentionBackend) -> None:
    capabilities = backend.capabilities
    assert isinstance(capabilities, Capabilities)
    assert "cpu" in capabilities.device_types and capabilities.dtypes <= DTYPES.keys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        capabilities.name = "other"  # type: ignore[misc]


# --- keys and values --------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    starts = st.just(0) | st.integers(0, 40)
    counts = st.just(1) | st.integers(1, 24)
    return Case(
        rows=draw(st.lists(st.tuples(starts, counts), min_size=1, max_size=5)),
        cp=draw(st.sampled_from([1, 2, 3, 4])),
        share=draw(st.sampled_from([1, 3, 8])),
        window=draw(st.just(0) | st.integers(1, 40)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**20)),
    )


heads_ = st.builds(
    Heads, kv=st.integers(1, 3), group=st.integers(1, 4), dim=st.sampled_from([4, 16]), has_sinks=st.booleans()
)


@each_backend
@given(cases(), heads_)
def test_any_batch_on_any_pages_equals_dense_attention(backend: AttentionBackend, case: Case, heads: Heads) -> None:
    check(backend, case, heads)


@each_backend
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@each_dtype
@each_device
def test_keys_and_values_in_every_dtype(
    backend: AttentionBackend, device: str, dtype: str, has_sinks: bool, window: int, cp: int
) -> None:
    skip_unless_declared(backend, dtype, device)
    for rows in ([(0, 9)], [(17, 1)], MIXED):
        case = Case(rows, cp=cp, window=window, dtype=DTYPES[dtype], device=device)
        check(backend, case, Heads(has_sinks=has_sinks))


@each_backend
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("cp", [1, 2])
def test_long_prefixes_and_chunks_cross_the_blocks_of_a_kernel(backend: AttentionBackend, cp: int, window: int) -> None:
    case = Case([(1100, 130), (700, 1), (0, 4 * WINDOW_BLOCK + 50)], cp=cp, share=16, window=window)
    check(backend, case, Heads(kv=1, group=2, dim=16))


@pytest.mark.parametrize("cp", [1, 2])
def test_scores_of_a_hundred_do_not_overflow(cp: int) -> None:
    sequences = Sequences(Case([(20, 7), (0, 5), (9, 1)], cp=cp), Heads())
    sequences.q = [100 * q for q in sequences.q]
    for out, right in zip(sequences.attend(TorchBackend()), sequences.right(), strict=True):
        close(out, right, 1e-4)


@given(st.integers(1, 40), st.sampled_from([0, 1, 5, 17]), st.integers(0, 2**20), st.integers(1, 5), st.data())
def test_a_chunk_may_end_anywhere(length: int, window: int, seed: int, chunks: int, data: st.DataObject) -> None:
    """A sequence computed in chunks through the pages equals one computed at once."""
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=chunks)) | {length})
    cp = data.draw(st.sampled_from([1, 2]))
    whole = Sequences(Case([(0, length)], cp=cp, window=window, dtype=torch.float64, seed=seed), Heads())
    (right,) = whole.right()
    start = 0
    for stop in cuts:
        part = Sequences(dataclasses.replace(whole.case, rows=[(start, stop - start)]), Heads())
        part.q, part.k, part.v = ([x[0][:stop]] for x in (whole.q, whole.k, whole.v))
        (out,) = part.attend(TorchBackend())
        close(out, right[start:stop], 1e-12)
        start = stop


def test_a_window_needs_memory_for_itself_and_not_for_the_whole_chunk() -> None:
    tokens, window, heads = 4096, 64, Heads(kv=1, group=1, dim=4)
    sequences = Sequences(Case([(200, tokens)], share=16, window=window), heads)
    component = kv("window", (0,), heads=1, dim=4, fmt=sequences.case.fmt, window=window)

    def work(seat: Seat, step: AttentionStep) -> Tensor:
        view = seat.pool.kv(0)
        q, k, v = (seat.local(sequences.case.new(rows)) for rows in (sequences.q, sequences.k, sequences.v))
        with LargestTensor() as largest:
            out = step.attend(view, q, k, v, scale=1.0, sinks=None)
        assert largest.num_bytes <= tokens * (window + WINDOW_BLOCK)
        return out

    Batch(sequences.case).run(TorchBackend(), [component], work)


# --- merge ------------------------------------------------------------------------------------------------------------


def random_parts(seed: int, tokens: int, keys: int, kv_heads: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and the scores [T, Hq, L] at scale 0.3."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, kv_heads * group, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, keys, kv_heads, 8, generator=random, dtype=torch.float64)
    return q, k, v, torch.einsum("thd,lhd->thl", q, k.repeat_interleave(group, 1)) * 0.3


@given(st.integers(1, 6), st.integers(1, 30), st.integers(1, 3), st.integers(1, 3), st.data())
def test_parts_of_the_keys_merge_to_the_whole(
    tokens: int, keys: int, kv_heads: int, group: int, data: st.DataObject
) -> None:
    q, k, v, scores = random_parts(data.draw(st.integers(0, 2**20)), tokens, keys, kv_heads, group)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, keys - 1), max_size=3) if keys > 1 else st.just(set()))), keys]
    parts = [attend_all(q, k[a:b], v[a:b], scale=0.3) for a, b in itertools.pairwise(cuts)]
    # A part without keys: its numbers do not count.
    parts.append((torch.full_like(q, 7.0), torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)))
    right = torch.cat([dense(q[i : i + 1], k, v, scale=0.3) for i in range(tokens)])
    close(merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])), right, 1e-12)
    out, lse = parts[-1]
    for part in parts:
        out, lse = join((out, lse), part)
    close(out, right, 1e-12)
    close(lse, scores.logsumexp(-1), 1e-12)


@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3))
def test_causal_attention_and_its_log_sum_exp(tokens: int, kv_heads: int, group: int) -> None:
    q, k, v, scores = random_parts(tokens, tokens, tokens, kv_heads, group)
    out, lse = attend_causal(q, k, v, scale=0.3)
    close(out, dense(q, k, v, scale=0.3), 1e-12)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[:, None]
    close(lse, scores.masked_fill(mask, float("-inf")).logsumexp(-1), 1e-12)


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**20))
def test_a_query_that_sees_nothing_is_an_empty_part(
    tokens: int, keys: int, kv_heads: int, group: int, seed: int
) -> None:
    q, k, v, scores = random_parts(seed, tokens, keys, kv_heads, group)
    mask = torch.rand(tokens, keys, generator=torch.Generator().manual_seed(seed)) < 0.2
    out, lse = attend_masked(q, k, v, mask, scale=0.3)
    close(lse, scores.masked_fill(~mask[:, None], float("-inf")).logsumexp(-1), 1e-12)
    sees = mask.any(1)
    assert out.isfinite().all() and not out[~sees].any()
    for i in sees.nonzero()[:, 0].tolist():
        close(out[i : i + 1], dense(q[i : i + 1], k[mask[i]], v[mask[i]], scale=0.3), 1e-12)


def test_values_may_be_smaller_or_larger_than_keys() -> None:
    random = torch.Generator().manual_seed(0)
    for dim, value_dim in ((12, 8), (8, 12)):
        q, k = (torch.randn(6, 4, dim, generator=random, dtype=torch.float64) for _ in range(2))
        v = torch.randn(6, 2, value_dim, generator=random, dtype=torch.float64).repeat_interleave(2, 1)
        close(attend_causal(q, k, v, scale=0.3)[0], dense(q, k, v, scale=0.3), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merging_many_parts_in_half_precision_loses_no_more_than_rounding(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    outs = torch.randn(8, 50, 4, 16, generator=random).to(dtype)
    lses = torch.randn(8, 50, 4, generator=random)
    exact = torch.einsum("pthd,pth->thd", outs.double(), torch.softmax(lses.double(), 0))
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (merge(outs, lses).double() - exact).abs().max() <= 2 * rounding
