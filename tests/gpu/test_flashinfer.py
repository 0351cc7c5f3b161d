"""FlashInfer's backend on a CUDA device against dense attention in float64; with more cp ranks as threads on it.

Errors are relative: the norm of the difference over the norm of what is right. bfloat16 has a rounding error of 0.2 %,
scores and results are rounded once each, absorbed queries and mean latents once more.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention import flashinfer_selected, selected_latent
from raycache.attention.base import (
    AttentionBackend,
    AttentionStep,
    LatentProjection,
    NotRecordableError,
    StaticStep,
)
from raycache.attention.flashinfer_kernels import LatentKernel
from raycache.attention.flashinfer_selected import SlotChoice
from raycache.errors import ConfigError
from raycache.memory.component import FULL, CacheFormat, Component, kv, latent
from raycache.memory.device import DevicePool
from raycache.parallel.context import ParallelContext
from raycache.rank.decode_batch import DecodeBatch
from raycache.step.page_tables import PageTables
from tests.oracle.attention import DTYPES, MIXED, Batch, Case, OnePerRank, Seat, on_ranks
from tests.unit import test_attention as full
from tests.unit import test_attention_latent as latents
from tests.unit import test_attention_sparse as sparse
from tests.unit import test_attention_states as states
from tests.unit import test_passing as passing

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ERROR, LATENT_ERROR = 0.008, 0.015
LONG = [(700, 1), (1100, 130), (0, 300), (90, 5), (640, 128)]
"""Few and many queries per row, prefixes over many pages."""
EXPANDED = [(700, 1), (1100, 130), (0, 300), (90, 5), (640, 260), (350, 256)]
"""The same for latents: of the last two, one has a prefix of several pieces, and they share a piece."""
DECODES = [(17, 1), (0, 1), (300, 1), (63, 1), (64, 1)]
SIZES = latents.Sizes(heads=16, dim=128, rope=64, value=128, rank=512)
WIDE_SIZES = latents.Sizes(heads=16, dim=192, rope=64, value=256, rank=512)
"""Of GLM-5."""
PIECE_TOKENS = 300
BOTH_FORMATS = pytest.mark.parametrize("has_fp8", [False, True], ids=["bfloat16", "fp8"])


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return OnePerRank(new_backend)


def new_backend() -> AttentionBackend:
    from raycache.attention.flashinfer import FlashInferBackend

    expanded_bytes = PIECE_TOKENS * 2 * SIZES.heads * (SIZES.dim + SIZES.rope + SIZES.value)
    return FlashInferBackend(torch.device(DEVICE), max_pages=128, expanded_bytes=expanded_bytes)


def near(found: Sequence[Tensor], right: Sequence[Tensor], error: float) -> None:
    """Row by row, so that a short row is as important as a long one."""
    for row, (one, other) in enumerate(zip(found, right, strict=True)):
        assert one.isfinite().all(), row
        distance = float((one.double() - other).norm() / other.norm())
        print(f"row {row}: {distance:.5f}")
        assert distance < error, (row, distance)


def exact(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """The last queries of a row against all of its keys, all at once in float64; else as `dense` of the oracle."""
    q, k, v = (x.to(DEVICE).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k), device=DEVICE)[:, None] - torch.arange(len(k), device=DEVICE)
    is_seen = (distance >= 0) & (distance < (window or len(k)))
    scores = torch.einsum("thd,lhd->htl", q, k).mul(scale).masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        more = sinks.to(DEVICE).double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, more], -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(k)], v).cpu()


def right(sequences: full.Sequences) -> list[Tensor]:
    window, sinks = sequences.case.window, sequences.sinks
    rows = zip(sequences.case.new(sequences.q), sequences.k, sequences.v, strict=True)
    return [exact(q, k, v, scale=sequences.scale, window=window, sinks=sinks) for q, k, v in rows]


def right_latents(sequences: latents.Sequences) -> list[Tensor]:
    key, value = sequences.key.to(DEVICE).double(), sequences.value.to(DEVICE).double()
    found = []
    for q, c, r in zip(sequences.case.new(sequences.q), sequences.latent, sequences.rope, strict=True):
        rows, turned = c.to(DEVICE).double(), r.to(DEVICE).double()[:, None].expand(-1, len(key), -1)
        k = torch.cat([torch.einsum("lr,hdr->lhd", rows, key), turned], -1)
        found.append(exact(q, k, torch.einsum("lr,hdr->lhd", rows, value), scale=latents.SCALE))
    return found


def format_of(case: Case, *, has_fp8: bool) -> CacheFormat:
    return dataclasses.replace(case.fmt, has_fp8_latent=has_fp8)


def round_cached(sequences: latents.Sequences, *, has_new: bool = False) -> None:
    """Latents that are read from float8 pages: those of prefixes and single tokens, or also all `has_new` ones."""
    for row, (start, count) in enumerate(sequences.case.rows):
        cached = start if count > 1 and not has_new else start + count
        blocks = sequences.latent[row].float().unflatten(-1, (-1, 128))
        scale = blocks.abs().amax(-1, keepdim=True) / 448
        rounded = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
        sequences.latent[row] = torch.cat([rounded[:cached], sequences.latent[row][cached:].float()])
        turned = sequences.rope[row]
        sequences.rope[row] = torch.cat([turned[:cached].bfloat16().to(turned.dtype), turned[cached:]])


def case_of(rows: Sequence[tuple[int, int]], *, cp: int = 1, page_size: int = 64, window: int = 0) -> Case:
    return Case(rows, cp=cp, share=page_size // cp, window=window, dtype=torch.bfloat16, device=DEVICE)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_every_method_of_the_protocols_is_there_with_the_same_arguments() -> None:
    from raycache.attention.flashinfer import FlashInferBackend, FlashInferStaticStep, FlashInferStep

    for protocol, kind in (
        (AttentionBackend, FlashInferBackend),
        (AttentionStep, FlashInferStep),
        (StaticStep, FlashInferStaticStep),
    ):
        methods = {name: m for name, m in vars(protocol).items() if inspect.isfunction(m) and name[0] != "_"}
        assert methods
        for name, method in methods.items():
            wanted, found = (inspect.signature(m).parameters.values() for m in (method, vars(kind)[name]))
            assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in wanted], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cp", [1, 2])
def test_shapes_without_a_kernel_are_right(backend: AttentionBackend, cp: int, dtype: str) -> None:
    """The cases that the torch backend is tested with on every device, all of which it computes."""
    case = Case(MIXED, cp=cp, window=7 * (cp - 1), dtype=DTYPES[dtype], device=DEVICE)
    full.check(backend, case, full.Heads(has_sinks=True))
    latents.check(backend, case, latents.Sizes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cp", [1, 2])
def test_an_indexer_and_the_latents_that_it_selects(backend: AttentionBackend, cp: int, dtype: torch.dtype) -> None:
    case = Case(MIXED, cp=cp, dtype=dtype, device=DEVICE)
    for top_k in (5, 100):
        sparse.check(backend, case, magnitude=1, top_k=top_k)


@pytest.mark.parametrize("cp", [1, 2])
def test_recurrent_layers(backend: AttentionBackend, cp: int) -> None:
    case = Case([(17, 1), (0, 9), (30, 8), (0, 1)], cp=cp, dtype=torch.bfloat16, device=DEVICE)
    states.check(backend, states.Sequences(case, has_beta=True, per_channel=True))


def test_a_missing_kernel_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = new_backend()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            full.check(backend, case_of([(0, 3), (9, 1)]), full.Heads(dim=24))
    said = [record.getMessage().split(";")[0] for record in caplog.records]
    assert said == ["attention: no kernel for a head size of 24"]


def test_a_kernel_that_cannot_be_compiled_is_a_setting_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    case = dataclasses.replace(case_of([(0, 3)]), dtype=torch.float16)
    with pytest.raises(
        ConfigError, match=r"fa2 for heads of 256 in torch\.float16 cannot be compiled.*--attention torch"
    ):
        full.Sequences(case, full.Heads(dim=256)).attend(new_backend())


# --- keys and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [
        (full.Heads(kv=2, group=1, dim=128), 16),
        (full.Heads(kv=2, group=4, dim=128), 64),
        (full.Heads(kv=1, group=8, dim=64, has_sinks=True), 16),
        (full.Heads(kv=2, group=4, dim=256), 64),
        (full.Heads(kv=96, group=2, dim=256), 64),
        (full.Heads(kv=2, group=8, dim=512), 64),
        (full.Heads(kv=1, group=3, dim=512, has_sinks=True), 16),
    ],
    ids=["128x1", "128x4", "64x8-sinks", "256x4", "256x2-many", "512x8", "512x3-sinks"],
)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_keys_and_values(
    backend: AttentionBackend, cp: int, heads: full.Heads, page_size: int, rows: Sequence[tuple[int, int]]
) -> None:
    sequences = full.Sequences(case_of(rows, cp=cp, page_size=page_size), heads)
    near(sequences.attend(backend), right(sequences), ERROR)


@pytest.mark.parametrize("way", ["keys", "queries", "both"])
@pytest.mark.parametrize("dim", [128, 512])
@pytest.mark.parametrize("cp", [2, 4])
def test_chunks_that_pass_keys_or_queries(
    backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch, cp: int, dim: int, way: str
) -> None:
    passing.choose(monkeypatch, way)
    for has_sinks in (False, True):
        heads = full.Heads(kv=2, group=4, dim=dim, has_sinks=has_sinks)
        sequences = full.Sequences(case_of([(300, 200), (77, 1), (90, 331), (0, 65), (129, 24)], cp=cp), heads)
        near(sequences.attend(backend), right(sequences), ERROR)


@pytest.mark.parametrize("window", [1, 40, 200])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("cp", [1, 2])
def test_windows(backend: AttentionBackend, cp: int, dim: int, window: int) -> None:
    heads = full.Heads(kv=2, group=4, dim=dim, has_sinks=dim == 64)
    for rows in (MIXED, LONG, [(300, 200), (0, 290)]):
        sequences = full.Sequences(case_of(rows, cp=cp, page_size=16, window=window), heads)
        near(sequences.attend(backend), right(sequences), ERROR)


@pytest.mark.parametrize("rows", [DECODES, [(0, 9)], [(128, 200), (64, 150)]], ids=["decodes", "chunk", "chunks"])
@pytest.mark.parametrize("cp", [1, 2])
def test_batches_of_one_kind_of_rows(backend: AttentionBackend, cp: int, rows: Sequence[tuple[int, int]]) -> None:
    sequences = full.Sequences(case_of(rows, cp=cp), full.Heads(kv=2, group=4, dim=128))
    near(sequences.attend(backend), right(sequences), ERROR)


# --- latents ----------------------------------------------------------------------------------------------------------


def check_latents(backend: AttentionBackend, sequences: latents.Sequences, *, has_fp8: bool) -> None:
    found = sequences.attend(backend, format_of(sequences.case, has_fp8=has_fp8))
    if has_fp8:
        round_cached(sequences)
    near(found, right_latents(sequences), LATENT_ERROR)


@BOTH_FORMATS
@pytest.mark.parametrize("rows", [MIXED, EXPANDED, DECODES], ids=["mixed", "long", "decodes"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_latents(backend: AttentionBackend, cp: int, rows: Sequence[tuple[int, int]], has_fp8: bool) -> None:
    check_latents(backend, latents.Sequences(case_of(rows, cp=cp), SIZES), has_fp8=has_fp8)


@BOTH_FORMATS
@pytest.mark.parametrize("heads", [6, 32, 128])
def test_latents_of_heads_that_fill_no_tile_or_many(backend: AttentionBackend, heads: int, has_fp8: bool) -> None:
    sizes = latents.Sizes(heads=heads, dim=128, rope=64, value=128, rank=512)
    sequences = latents.Sequences(case_of([(40, 1), (70, 9), (0, 30), (900, 1)], page_size=16), sizes)
    check_latents(backend, sequences, has_fp8=has_fp8)


@BOTH_FORMATS
def test_latents_of_larger_heads(has_fp8: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_latents(new_backend(), latents.Sequences(case_of(EXPANDED), WIDE_SIZES), has_fp8=has_fp8)
    assert "no kernel" not in caplog.text


def test_heads_of_any_size_are_absorbed_and_torch_expands_what_flashinfer_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, sizes = new_backend(), latents.Sizes(heads=16, dim=96, rope=64, value=80, rank=512)
    with caplog.at_level(logging.WARNING):
        check_latents(backend, latents.Sequences(case_of(DECODES), sizes), has_fp8=False)
        assert "no kernel" not in caplog.text
        check_latents(backend, latents.Sequences(case_of(MIXED), sizes), has_fp8=False)
    assert "no kernel for latents for heads of 160 and 80" in caplog.text


def test_a_long_row_in_fp8_is_split(backend: AttentionBackend) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case = dataclasses.replace(case_of([(20_000, 1), (30, 1), (2000, 1)]), dtype=dtype)
        check_latents(backend, latents.Sequences(case, SIZES), has_fp8=True)


def test_latents_are_written_to_fp8_pages_and_read_as_torch_does() -> None:
    from raycache.attention.fp8_page_kernels import read_latents, write_latents

    case = case_of([(0, 200)])
    (every,), (rope,) = (case.draw(size, salt=1) for size in (700, 64))
    latent_rows, rope = (every[:, :512] * torch.logspace(-6, 4, 200)[:, None].bfloat16()).to(DEVICE), rope.to(DEVICE)
    latent_rows[7], latent_rows[8, 300] = 0, torch.nan
    slots = torch.randperm(256, device=DEVICE)[:200]
    component = latent([0, 1], rank=512, rope_dim=64, fmt=format_of(case, has_fp8=True))
    views = {}
    for device in ("cpu", DEVICE):
        ctx = ParallelContext.single(torch.device(device))
        pool = DevicePool([component], num_layers=1, sizes={FULL: 4}, page_size=64, ctx=ctx)
        for field in pool.rows("latent").values():
            field.view(torch.uint8).zero_()
        views[device] = pool.latent(0)
    # On CUDA, torch multiplies by 1 / 448 where it divides by 448 on a CPU.
    views["cpu"].write(slots.cpu(), latent_rows.cpu(), rope.cpu())
    one = views[DEVICE]
    write_latents(latent_rows, rope, slots.int(), to=one.pages)
    assert one.pages[0].float().isnan().any(), "what is wrong stays visible"
    for rows, right_rows in zip(one.pages, views["cpu"].pages, strict=True):
        assert torch.equal(rows.float().nan_to_num(7.0).cpu(), right_rows.float().nan_to_num(7.0))
    for dtype in (torch.bfloat16, torch.float16):
        found, wanted = read_latents(slots, pages=one.pages, dtype=dtype), one.take(slots, dtype=dtype)
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True))


# --- chosen latents ---------------------------------------------------------------------------------------------------


class Chosen(latents.Sequences):
    """Each query sees some of the tokens up to itself, drawn at random, at most `top_k`."""

    def __init__(self, case: Case, sizes: latents.Sizes, *, top_k: int) -> None:
        super().__init__(case, sizes)
        random = np.random.default_rng(case.seed)
        self.top_k = top_k
        self.allowed = [
            [sorted(random.permutation(start + i + 1)[:top_k].tolist()) for i in range(count)]
            for start, count in case.rows
        ]

    def choice(self, seat: Seat) -> SlotChoice:
        """The share of a rank."""
        slots = [seat.slots(row, of, FULL) for row, every in enumerate(self.allowed) for of in every]
        # Not a multiple of anything.
        padded = torch.full((len(slots), self.top_k + 3), -1, dtype=torch.int32, device=DEVICE)
        for i, (_, some) in enumerate(slots):
            padded[i, : len(some)] = some
        lengths = torch.tensor([len(some) for _, some in slots], dtype=torch.int32, device=DEVICE)
        return SlotChoice(padded, lengths, self.top_k)

    def found(self, backend: AttentionBackend, *, has_fp8: bool = False) -> list[Tensor]:
        fmt = format_of(self.case, has_fp8=has_fp8)
        component = latent([0], rank=self.sizes.rank, rope_dim=self.sizes.rope, fmt=fmt)

        def work(seat: Seat, step: AttentionStep) -> Tensor:
            view = seat.pool.latent(0)
            seat.fill(view.write, self.latent, self.rope, space=FULL)
            q, c, r = (seat.local(self.case.new(rows)) for rows in (self.q, self.latent, self.rope))
            projection = LatentProjection(self.key.to(DEVICE), self.value.to(DEVICE))
            chosen = self.choice(seat)
            return step.attend_latent(view, q, c, r, projection, scale=latents.SCALE, selection=chosen)

        return Batch(self.case).run(backend, [component], work)

    def exact(self) -> list[Tensor]:
        return [self.right(row, self.allowed[row]) for row in range(len(self.case.rows))]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("sizes", [SIZES, WIDE_SIZES, latents.Sizes()], ids=["kernel", "wide", "torch"])
def test_chosen_latents(backend: AttentionBackend, sizes: latents.Sizes, cp: int) -> None:
    sequences = Chosen(case_of([*MIXED, (150, 3)], cp=cp, page_size=16), sizes, top_k=20)
    near(sequences.found(backend), sequences.exact(), LATENT_ERROR)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("sizes", [SIZES, latents.Sizes(rank=128)], ids=["kernel", "torch"])
def test_chosen_latents_in_fp8(backend: AttentionBackend, sizes: latents.Sizes, cp: int) -> None:
    """New ones, too, are read from pages."""
    sequences = Chosen(case_of([*MIXED, (450, 3)], cp=cp, page_size=16), sizes, top_k=300)
    found = sequences.found(backend, has_fp8=True)
    round_cached(sequences, has_new=True)
    near(found, sequences.exact(), LATENT_ERROR)


def test_more_queries_than_one_plan_has_room_for(backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_selected, "MAX_QUERIES", 5)
    # Blocks of the same lengths share a plan, and later steps plan others with its buffers.
    for rows in (MIXED, [(40, 23)], [(0, 23)], [(3, 20)], [(70, 25)]):
        sequences = Chosen(case_of(rows, page_size=16), SIZES, top_k=8)
        near(sequences.found(backend), sequences.exact(), LATENT_ERROR)


@pytest.mark.parametrize("cp", [1, 2])
def test_more_queries_than_are_absorbed_at_once(
    backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch, cp: int
) -> None:
    monkeypatch.setattr(selected_latent, "BLOCK_BYTES", 5 * SIZES.heads * SIZES.rank * 2)
    sequences = Chosen(case_of([*MIXED, (150, 3)], cp=cp, page_size=16), SIZES, top_k=20)
    found = sequences.found(backend, has_fp8=cp == 1)
    if cp == 1:
        round_cached(sequences, has_new=True)
    near(found, sequences.exact(), LATENT_ERROR)


def test_plans_of_chosen_latents_are_made_with_the_buffers_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    new, by_wrapper = OnePerRank(new_backend), []
    plan = LatentKernel._plan_by_wrapper

    def noted(*args: Any, **how: Any) -> Sequence[int]:
        by_wrapper.append(args)
        return plan(*args, **how)

    monkeypatch.setattr(LatentKernel, "_plan_by_wrapper", noted)
    for rows in ([(40, 23)], [(0, 23)], [(3, 20)]):
        sequences = Chosen(case_of(rows, page_size=16), SIZES, top_k=8)
        near(sequences.found(new), sequences.exact(), LATENT_ERROR)
    assert len(by_wrapper) == 1


# --- recorded steps ---------------------------------------------------------------------------------------------------


class Recorded:
    """A decode batch of 8 rows with one layer, recorded when the first rows run, for cases of fewer rows."""

    def __init__(
        self, backend: AttentionBackend, component: Component, *, page_size: int, ctx: ParallelContext | None = None
    ) -> None:
        self.ctx = ctx or ParallelContext.single(torch.device(DEVICE))
        sizes = {component.space: 64} | {FULL: 64}
        self.pool = DevicePool(
            [component], num_layers=1, sizes=sizes, page_size=page_size, ctx=self.ctx, has_scratch=True
        )
        for field in self.pool.rows(component.name).values():
            field.view(torch.uint8).zero_()
        self.batch = DecodeBatch(8, self.pool, self.ctx)
        self.step = backend.plan_static(self.batch.inputs)
        self.step.replan(self.batch.inputs)

    def record(self, run: Callable[[StaticStep], Tensor]) -> Callable[[], Tensor]:
        run(self.step)  # plans, and builds what is built at first use
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(self.step)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def fill(self, batch: Batch) -> None:
        tables = {space: PageTables() for space in self.pool.windows}
        for slot, spaces in batch.tables.items():
            for space in tables:
                tables[space].begin(slot, spaces[space].tolist())
        self.batch.fill(batch.plan, tables)
        self.step.replan(self.batch.inputs)


REPLAYED = [DECODES, [(5, 1)], [(290, 1), (1, 1), (16, 1), (130, 1)]]


@pytest.mark.parametrize(
    ("window", "kv_heads", "dim"),
    [
        (0, 2, 64),
        (20, 2, 64),
        (200, 5, 64),
        (270, 2, 64),
        (0, 40, 64),
        (0, 2, 256),
        (0, 40, 256),
        (200, 40, 256),
        (0, 2, 512),
        (0, 40, 512),
    ],
    ids=[
        "plain",
        "window",
        "longer-window",
        "long-window",
        "many-heads",
        "256",
        "256-many-heads",
        "256-many-heads-window",
        "512",
        "512-no-split",
    ],
)
def test_a_recorded_decode_step_is_replayed_with_other_rows(
    backend: AttentionBackend, kv_heads: int, window: int, dim: int
) -> None:
    """With 40 heads the rows fill a device, and FlashInfer does not split keys: heads of 256 use our own kernel then,
    smaller ones always."""
    heads = full.Heads(kv=kv_heads, group=4, dim=dim, has_sinks=window > 0 or dim > 256)
    cases = [case_of(rows, page_size=16, window=window) for rows in REPLAYED]
    component = kv("window" if window else "kv", (0,), heads=kv_heads, dim=dim, fmt=cases[0].fmt, window=window)
    recorded = Recorded(backend, component, page_size=16)
    view = recorded.pool.kv(0)
    sinks = full.Sequences(cases[0], heads).sinks
    on_device = None if sinks is None else sinks.to(DEVICE)
    q = torch.zeros(8, 4 * kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.zeros(2, 8, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
    with torch.inference_mode():
        replay = recorded.record(lambda step: step.attend(view, q, k, v, scale=dim**-0.5, sinks=on_device))
        for case in cases:
            sequences = full.Sequences(case, heads)
            sequences.sinks = sinks
            batch = Batch(case)
            Seat(batch, recorded.ctx, []).fill(view.write, sequences.k, sequences.v, space=view.space)
            for static, rows in ((q, sequences.q), (k, sequences.k), (v, sequences.v)):
                static[: len(case.rows)] = torch.cat([row[-1:] for row in rows]).to(DEVICE)
            recorded.fill(batch)
            out = replay()[: len(case.rows)].cpu()
            near(out.split(1), right(sequences), ERROR)


@BOTH_FORMATS
def test_a_recorded_step_over_latents_is_replayed_with_other_rows(backend: AttentionBackend, has_fp8: bool) -> None:
    cases = [case_of(rows, page_size=16) for rows in REPLAYED]
    fmt = format_of(cases[0], has_fp8=has_fp8)
    recorded = Recorded(backend, latent([0], rank=512, rope_dim=64, fmt=fmt), page_size=16)
    view = recorded.pool.latent(0)
    first = latents.Sequences(cases[0], SIZES)
    projection = LatentProjection(first.key.to(DEVICE), first.value.to(DEVICE))
    q = torch.zeros(8, SIZES.heads, 192, dtype=torch.bfloat16, device=DEVICE)
    c, r = (torch.zeros(8, size, dtype=torch.bfloat16, device=DEVICE) for size in (512, 64))

    def run(step: StaticStep) -> Tensor:
        return step.attend_latent(view, q, c, r, projection, scale=latents.SCALE, selection=None)

    with torch.inference_mode():
        replay = recorded.record(run)
        for case in cases:
            sequences = latents.Sequences(case, SIZES)
            sequences.key, sequences.value = first.key, first.value
            batch = Batch(case)
            Seat(batch, recorded.ctx, []).fill(view.write, sequences.latent, sequences.rope, space=FULL)
            for static, rows in ((q, sequences.q), (c, sequences.latent), (r, sequences.rope)):
                static[: len(case.rows)] = torch.cat([row[-1:] for row in rows]).to(DEVICE)
            recorded.fill(batch)
            out = replay()[: len(case.rows)].cpu()
            if has_fp8:
                round_cached(sequences)
            near(out.split(1), right_latents(sequences), LATENT_ERROR)


@BOTH_FORMATS
def test_a_recorded_step_over_chosen_latents_is_replayed_with_other_choices(
    backend: AttentionBackend, has_fp8: bool
) -> None:
    sequences = [Chosen(case_of(rows, page_size=16), SIZES, top_k=30) for rows in REPLAYED]
    fmt = format_of(sequences[0].case, has_fp8=has_fp8)
    recorded = Recorded(backend, latent([0], rank=512, rope_dim=64, fmt=fmt), page_size=16)
    view = recorded.pool.latent(0)
    projection = LatentProjection(sequences[0].key.to(DEVICE), sequences[0].value.to(DEVICE))
    q = torch.zeros(8, SIZES.heads, 192, dtype=torch.bfloat16, device=DEVICE)
    c, r = (torch.zeros(8, size, dtype=torch.bfloat16, device=DEVICE) for size in (512, 64))
    # The scratch page is the last one.
    slots = torch.full((8, 33), 64 * 16, dtype=torch.int32, device=DEVICE)
    choice = SlotChoice(slots, torch.ones(8, dtype=torch.int32, device=DEVICE), 30)

    def run(step: StaticStep) -> Tensor:
        return step.attend_latent(view, q, c, r, projection, scale=latents.SCALE, selection=choice)

    with torch.inference_mode():
        replay = recorded.record(run)
        for some in sequences:
            some.key, some.value = sequences[0].key, sequences[0].value
            batch, count = Batch(some.case), len(some.case.rows)
            seat = Seat(batch, recorded.ctx, [])
            seat.fill(view.write, some.latent, some.rope, space=FULL)
            for static, rows in ((q, some.q), (c, some.latent), (r, some.rope)):
                static[:count] = torch.cat([row[-1:] for row in rows]).to(DEVICE)
            recorded.fill(batch)
            chosen = some.choice(seat)
            slots[:count], choice.lengths[:count] = chosen.slots, chosen.lengths
            if has_fp8:
                round_cached(some)
            near(replay()[:count].cpu().split(1), some.exact(), LATENT_ERROR)


@pytest.mark.parametrize(
    ("has_fp8", "dim"), [(False, 64), (True, 64), (False, 512)], ids=["bfloat16", "fp8", "bfloat16-wide"]
)
@pytest.mark.parametrize("cp", [2, 4])
def test_a_static_step_of_several_ranks_serves_other_rows(
    backend: AttentionBackend, cp: int, has_fp8: bool, dim: int
) -> None:
    """Not recorded: threads cannot meet in a graph."""
    heads = full.Heads(kv=2, group=4, dim=dim)
    every = [
        (full.Sequences(case, heads), latents.Sequences(case, SIZES))
        for case in (case_of(rows, cp=cp, page_size=16) for rows in REPLAYED)
    ]
    fmt = case_of(DECODES).fmt
    found: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in every]

    def work(ctx: ParallelContext) -> None:
        one = Recorded(backend, kv("kv", (0,), heads=2, dim=dim, fmt=fmt), page_size=16, ctx=ctx)
        small_fmt = dataclasses.replace(fmt, has_fp8_latent=has_fp8)
        other = Recorded(backend, latent([0], rank=512, rope_dim=64, fmt=small_fmt), page_size=16, ctx=ctx)
        keys, view = one.pool.kv(0), other.pool.latent(0)
        projection = LatentProjection(every[0][1].key.to(DEVICE), every[0][1].value.to(DEVICE))
        for i, (plain, small) in enumerate(every):
            seat = Seat(Batch(plain.case), ctx, [])
            seat.fill(keys.write, plain.k, plain.v, space=FULL)
            seat.fill(view.write, small.latent, small.rope, space=FULL)
            one.fill(seat.batch)
            other.fill(seat.batch)
            mine = [row for row in range(ctx.cp.rank, 8, cp) if row < len(plain.case.rows)]

            def new(rows: list[Tensor], mine: list[int] = mine) -> Tensor:
                padded = torch.zeros(8 // cp, *rows[0].shape[1:], dtype=torch.bfloat16, device=DEVICE)
                for place, row in enumerate(mine):
                    padded[place] = rows[row][-1]
                return padded

            q, k, v = (new(rows) for rows in (plain.q, plain.k, plain.v))
            out = one.step.attend(keys, q, k, v, scale=plain.scale, sinks=None).cpu()
            q, c, r = (new(rows) for rows in (small.q, small.latent, small.rope))
            more = other.step.attend_latent(view, q, c, r, projection, scale=latents.SCALE, selection=None).cpu()
            found[i].update({row: (out[place : place + 1], more[place : place + 1]) for place, row in enumerate(mine)})

    on_ranks(cp, work, device=DEVICE)
    for outs, (plain, small) in zip(found, every, strict=True):
        small.key, small.value = every[0][1].key, every[0][1].value
        if has_fp8:
            round_cached(small)
        near([outs[row][0] for row in range(len(outs))], right(plain), ERROR)
        near([outs[row][1] for row in range(len(outs))], right_latents(small), LATENT_ERROR)


def test_a_recorded_step_refuses_what_has_no_kernel(backend: AttentionBackend) -> None:
    recorded = Recorded(backend, kv("kv", (0,), heads=1, dim=96, fmt=case_of(DECODES).fmt), page_size=16)
    q = torch.zeros(8, 1, 96, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(NotRecordableError, match="a head size of 96"):
        recorded.step.attend(recorded.pool.kv(0), q, q, q, scale=1.0, sinks=None)
