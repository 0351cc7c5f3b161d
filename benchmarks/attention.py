"""Attention of one layer on a GPU, through the backend, against FlashInfer called bare and the device's ceilings.

    python -m benchmarks.attention
    python -m benchmarks.attention --only "heads of 512" --json out.json

Decode steps are recorded in CUDA graphs, as they are in service. "bare" is the same work without the backend: the write
of new keys and values, or of latents with both absorbing products, and FlashInfer's kernel, recorded in the same way;
"kernel" is the kernel alone. Bytes are those of the cache that is read once, operations those of the scores and values
that causal queries see. "slots" is attention to selected latents as under cp and for FP8, which reads on the device how
many there are. All are measured in turns in one run; the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.ceilings import Ceilings
from benchmarks.figures import write_json
from raycache.attention.base import LatentProjection
from raycache.attention.flashinfer import FlashInferBackend, FlashInferStaticStep
from raycache.attention.flashinfer_kernels import Heads, KernelCache
from raycache.attention.flashinfer_latent import LatentLayers
from raycache.attention.flashinfer_selected import SlotChoice
from raycache.attention.layout import StepLayout
from raycache.attention.selected_latent import SlotAttention, programs_for
from raycache.memory.component import FULL, CacheFormat, Component, kv, latent
from raycache.memory.device import DevicePool
from raycache.parallel.context import ParallelContext
from raycache.rank.decode_batch import DecodeBatch
from raycache.step.inputs import StepInputs, build_inputs
from raycache.step.page_tables import PageTables
from raycache.wire.plan import Row, StepPlan

FMT = CacheFormat("bfloat16")
PAGE = 64
SCALE = 0.07
DEVICE = torch.device("cuda")
RANK, ROPE, PLAIN, VALUE = 512, 64, 128, 128
CHOSEN = 2048

Run = Callable[[], object]

Figures = dict[str, dict[str, float]]
"""What is measured -> figure -> value."""


@dataclass(frozen=True)
class Batch:
    """Rows of a step on scattered pages.

    Attributes:
        rows: (start, new tokens) each.
        component: of the one layer.
    """

    rows: list[tuple[int, int]]
    component: Component

    def pool(self) -> DevicePool:
        """With room for the rows and for padding, full of small numbers."""
        pages = sum(-(-(start + count) // PAGE) for start, count in self.rows)
        ctx = ParallelContext.single(DEVICE)
        sizes = {FULL: pages}
        pool = DevicePool([self.component], num_layers=1, sizes=sizes, page_size=PAGE, ctx=ctx, has_scratch=True)
        for field in pool.rows(self.component.name).values():
            if field.dtype == torch.float8_e4m3fn:
                field.copy_(torch.randn(field.shape, dtype=torch.bfloat16, device=DEVICE))
            else:
                field.normal_()
        return pool

    def plan(self) -> tuple[StepPlan, PageTables]:
        """The step and its pages."""
        counts = [-(-(start + count) // PAGE) for start, count in self.rows]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        tables = PageTables()
        for slot, ids in enumerate(np.split(order, np.cumsum(counts)[:-1])):
            tables.begin(slot, ids.tolist())
        return StepPlan(1, [Row(i, start, bytes(4 * count)) for i, (start, count) in enumerate(self.rows)]), tables


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def recorded(call: Run) -> Run:
    """As a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(held: Run = call) -> None:  # whose tensors the graph uses
        graph.replay()

    return replay


def times_us(calls: Mapping[str, Run], *, repeats: int) -> dict[str, float]:
    """Device time of each, in turns; each is called a few times in a row, so that the host keeps ahead."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            begin.record()
            for _ in range(5):
                call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 200)
    return {name: statistics.median(some[1:]) for name, some in found.items()}


def latent_decode_fp8(heads: int, *, rows: int, length: int, repeats: int) -> float:
    """Us of the backend's step over latents in FP8, recorded."""
    fmt = CacheFormat("bfloat16", has_fp8_latent=True)
    batch = Batch([(length - 1, 1)] * rows, latent([0], rank=RANK, rope_dim=ROPE, fmt=fmt))
    pool = batch.pool()
    view, q, c, r = pool.latent(0), drawn(rows, heads, PLAIN + ROPE), drawn(rows, RANK), drawn(rows, ROPE)
    projection = LatentProjection(drawn(heads, PLAIN, RANK), drawn(heads, VALUE, RANK))
    step, _ = static_step(batch, pool)
    run = recorded(lambda: step.attend_latent(view, q, c, r, projection, scale=SCALE, selection=None))
    return times_us({"backend": run}, repeats=repeats)["backend"]


def latent_decode(heads: int, *, rows: int, length: int, repeats: int) -> dict[str, float]:
    """Us of `rows` rows with `length` tokens: backend, bare, kernel."""
    batch = Batch([(length - 1, 1)] * rows, latent([0], rank=RANK, rope_dim=ROPE, fmt=FMT))
    pool = batch.pool()
    view = pool.latent(0)
    q, c, r = drawn(rows, heads, PLAIN + ROPE), drawn(rows, RANK), drawn(rows, ROPE)
    projection = LatentProjection(drawn(heads, PLAIN, RANK) * RANK**-0.5, drawn(heads, VALUE, RANK) * RANK**-0.5)
    step, inputs = static_step(batch, pool)
    calls = {"backend": recorded(lambda: step.attend_latent(view, q, c, r, projection, scale=SCALE, selection=None))}

    import flashinfer

    pages = inputs.places[FULL].pages
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), backend="fa3"
    )
    ints = [torch.from_numpy(x) for x in (np.arange(rows + 1, dtype=np.int32), pages.indptr, pages.ids, pages.total)]
    wrapper.plan(
        metadata=flashinfer.mla.MLAPlanMetadata.csr(*ints),
        num_heads=heads,
        head_dim_ckv=RANK,
        head_dim_kpe=ROPE,
        page_size=PAGE,
        causal=False,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        query_layout="split",
        kv_cache_layout="split",
    )
    queries, out = drawn(rows, heads, RANK), drawn(rows, heads, RANK)
    slots = inputs.places[FULL].slots

    def kernel(absorbed: Tensor = queries) -> None:
        wrapper.run(query=(absorbed, q[..., PLAIN:]), kv_cache=view.pages, out=out)

    def bare() -> Tensor:
        view.write(slots, c, r)
        kernel(torch.bmm(q[..., :PLAIN].transpose(0, 1), projection.key).transpose(0, 1))
        return torch.bmm(out.transpose(0, 1), projection.value.mT)

    calls |= {"bare": recorded(bare), "kernel": recorded(kernel)}
    return times_us(calls, repeats=repeats) | {"replan on the host": replan_us(step, inputs, repeats=repeats)}


def selected_decode(heads: int, *, rows: int, length: int, chosen: int, repeats: int) -> dict[str, float]:
    """Us of `rows` rows with `length` tokens, of which each attends to `chosen`, recorded."""
    from raycache.attention.latent_kernels import attend_selected

    choice = SlotChoice(
        torch.randint(rows * length, (rows, CHOSEN), dtype=torch.int32, device=DEVICE),
        torch.full((rows,), chosen, dtype=torch.int32, device=DEVICE),
        chosen,
    )
    q, c, r = drawn(rows, heads, PLAIN + ROPE), drawn(rows, RANK), drawn(rows, ROPE)
    projection = LatentProjection(drawn(heads, PLAIN, RANK) * RANK**-0.5, drawn(heads, VALUE, RANK) * RANK**-0.5)
    kernels, queries = KernelCache(DEVICE), drawn(rows, heads, RANK)
    calls: dict[str, Run] = {}
    for name, has_fp8 in (("", False), (", FP8", True)):
        fmt = CacheFormat("bfloat16", has_fp8_latent=has_fp8)
        batch = Batch([(length - 1, 1)] * rows, latent([0], rank=RANK, rope_dim=ROPE, fmt=fmt))
        pool = batch.pool()
        step, inputs = static_step(batch, pool)
        given = pool.latent(0), q, c, r, projection
        if not has_fp8:
            calls["backend"] = recorded(partial(step.attend_latent, *given, scale=SCALE, selection=choice))
        calls["slots" + name] = recorded(partial(by_slots(kernels, inputs, heads, is_fp8=has_fp8), *given, choice))
        kernel = partial(attend_selected, programs=programs_for(kernels, heads, is_fp8=has_fp8), scale=SCALE)
        pages = pool.latent(0).pages
        calls["kernel" + name] = recorded(partial(kernel, queries, q[..., PLAIN:], pages, choice.slots, choice.lengths))
    return times_us(calls, repeats=repeats)


def by_slots(kernels: KernelCache, inputs: StepInputs, heads: int, *, is_fp8: bool = False) -> Callable[..., Tensor]:
    """What the backend uses under cp."""
    shape = Heads(heads, heads, PLAIN + ROPE, VALUE, torch.bfloat16, SCALE)
    layers = LatentLayers(FULL, shape, RANK, ROPE, is_fp8=is_fp8)
    return SlotAttention(kernels, layers, StepLayout(inputs)).attend


def kv_decode(*, heads: tuple[int, int], dim: int, lengths: list[int], repeats: int) -> dict[str, float]:
    """Us of rows with so many tokens: backend, bare, and host time of planning another step."""
    batch = Batch([(length - 1, 1) for length in lengths], kv("kv", [0], heads=heads[1], dim=dim, fmt=FMT))
    pool, rows = batch.pool(), len(lengths)
    view = pool.kv(0)
    q, k, v = drawn(rows, heads[0], dim), drawn(rows, heads[1], dim), drawn(rows, heads[1], dim)
    step, inputs = static_step(batch, pool)

    import flashinfer

    places = inputs.places[FULL]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "NHD", backend="fa2"
    )
    last = (places.pages.total - 1) % PAGE + 1
    columns = np.arange(rows + 1, dtype=np.int32), places.pages.indptr, places.pages.ids, last
    wrapper.plan(
        *(torch.from_numpy(column).to(DEVICE) for column in columns),
        *heads,
        dim,
        PAGE,
        causal=True,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
    )

    def bare() -> None:
        view.write(places.slots, k, v)
        wrapper.run(q, (view.k, view.v))

    calls = {"backend": recorded(lambda: step.attend(view, q, k, v, scale=SCALE, sinks=None)), "bare": recorded(bare)}
    return times_us(calls, repeats=repeats) | {"replan on the host": replan_us(step, inputs, repeats=repeats)}


def replan_us(step: FlashInferStaticStep, inputs: StepInputs, *, repeats: int) -> float:
    """Time of the host to prepare another step."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        step.replan(inputs)
        found.append(1e6 * (time.perf_counter() - start_s))
    return statistics.median(found)


def static_step(batch: Batch, pool: DevicePool) -> tuple[FlashInferStaticStep, StepInputs]:
    ctx = ParallelContext.single(DEVICE)
    longest = max(start + count for start, count in batch.rows)
    decode = DecodeBatch(len(batch.rows), pool, ctx)
    step = FlashInferBackend(DEVICE, max_pages=-(-longest // PAGE)).plan_static(decode.inputs)
    plan, tables = batch.plan()
    decode.fill(plan, {FULL: tables})
    step.replan(decode.inputs)
    return step, decode.inputs


def prefill(
    component: Component, rows: list[tuple[int, int]], *, heads: int, dim: int, repeats: int, top_k: int = 0
) -> dict[str, float]:
    """Us of a step of chunks through the backend: keys and values, or latents of `heads` heads, or `top_k` of them, and
    then those with the kernel that is used under cp."""
    batch = Batch(rows, component)
    pool = batch.pool()
    plan, tables = batch.plan()
    ctx = ParallelContext.single(DEVICE)
    inputs = build_inputs(
        plan, {i: {FULL: tables.of(i)} for i in range(len(rows))}, page_size=PAGE, windows={FULL: 0}, ctx=ctx
    )
    step = FlashInferBackend(DEVICE, max_pages=0).plan(inputs)
    tokens = inputs.num_tokens
    q = drawn(tokens, heads, dim)
    if component.name == "latent":
        latents, c, r = pool.latent(0), drawn(tokens, RANK), drawn(tokens, ROPE)
        projection = LatentProjection(drawn(heads, PLAIN, RANK) * RANK**-0.5, drawn(heads, VALUE, RANK) * RANK**-0.5)

        choice = None
        if top_k:
            slots = torch.randint(len(latents.pages[0]) * PAGE, (tokens, top_k), dtype=torch.int32, device=DEVICE)
            choice = SlotChoice(slots, torch.full_like(slots[:, 0], top_k), top_k)
        given = latents, q, c, r, projection
        calls: dict[str, Run] = {"backend": partial(step.attend_latent, *given, scale=SCALE, selection=choice)}
        if choice is not None:
            calls["slots"] = partial(by_slots(KernelCache(DEVICE), inputs, heads), *given, choice)
    else:
        view = pool.kv(0)
        k, v = drawn(tokens, view.k.shape[2], dim), drawn(tokens, view.k.shape[2], dim)
        calls = {"backend": partial(step.attend, view, q, k, v, scale=SCALE, sinks=None)}
    return times_us(calls, repeats=repeats)


def pairs(rows: list[tuple[int, int]]) -> int:
    """Queries times the keys that each sees."""
    return sum(count * start + count * (count + 1) // 2 for start, count in rows)


def latent_figures(_: Ceilings, *, only: str, repeats: int) -> Figures:
    """Decode steps over all latents."""
    figures: Figures = {}
    for heads, rows, length in ((16, 32, 8192), (128, 32, 8192), (16, 1, 8192)):
        if only not in (name := f"latent decode, {rows} x {length}, {heads} heads"):
            continue
        found = latent_decode(heads, rows=rows, length=length, repeats=repeats)
        found["GB/s"] = rows * length * (RANK + ROPE) * 2 / found["kernel"] / 1e3
        found["backend / bare"] = found["backend"] / found["bare"]
        found["backend, FP8"] = latent_decode_fp8(heads, rows=rows, length=length, repeats=repeats)
        figures[name] = found
    return figures


def kv_figures(ceilings: Ceilings, *, only: str, repeats: int) -> Figures:
    """Decode steps over keys and values."""
    figures: Figures = {}
    for (heads, keys), dim, rows, length, longest in (
        ((32, 8), 128, 64, 4096, 0),
        ((32, 8), 128, 64, 1024, 0),
        ((32, 8), 128, 64, 1024, 32768),
        ((32, 8), 128, 1, 8192, 0),
        ((32, 8), 128, 16, 1024, 0),
        ((32, 8), 128, 256, 1024, 0),
        ((64, 8), 64, 64, 1024, 0),
        ((64, 8), 64, 64, 1024, 32768),
        ((16, 2), 256, 64, 1024, 0),
        ((16, 2), 256, 256, 1024, 32768),
        ((16, 2), 512, 32, 8192, 0),
        ((16, 2), 512, 1, 8192, 0),
    ):
        name = f"decode, {rows} x {length}, {heads} / {keys} heads of {dim}"
        lengths = [length] * rows
        if longest:
            name, lengths[0] = f"{name}, one row of {longest}", longest
        if only not in name:
            continue
        found = kv_decode(heads=(heads, keys), dim=dim, lengths=lengths, repeats=repeats)
        found["backend / bare"] = found["backend"] / found["bare"]
        found["GB/s"] = sum(lengths) * keys * dim * 2 * 2 / found["backend"] / 1e3
        found["of the copy"] = found["GB/s"] * 1e9 / ceilings.copy_bytes_s
        figures[name] = found
    return figures


def prefill_figures(ceilings: Ceilings, *, only: str, repeats: int) -> Figures:
    """Chunks of prompts."""
    figures: Figures = {}
    full = kv("kv", [0], heads=8, dim=128, fmt=FMT)
    wide = kv("kv", [0], heads=2, dim=512, fmt=FMT)
    mla = latent([0], rank=RANK, rope_dim=ROPE, fmt=FMT)
    for name, component, heads, dim, value_dim, batch in (
        ("prefill 8192, 32 / 8 heads of 128", full, 32, 128, 128, [(0, 8192)]),
        ("prefill 2048 behind 6144, 32 / 8 heads of 128", full, 32, 128, 128, [(6144, 2048)]),
        ("prefill 8192, 16 / 2 heads of 512", wide, 16, 512, 512, [(0, 8192)]),
        ("prefill 2048 behind 6144, 16 / 2 heads of 512", wide, 16, 512, 512, [(6144, 2048)]),
        ("prefill 8192, latents, 16 heads", mla, 16, 192, 128, [(0, 8192)]),
        ("prefill 2048 behind 30720, latents, 16 heads", mla, 16, 192, 128, [(30720, 2048)]),
    ):
        if only not in name:
            continue
        us = prefill(component, batch, heads=heads, dim=dim, repeats=repeats)["backend"]
        flops = 2 * pairs(batch) * heads * (dim + value_dim) / us * 1e6
        figures[name] = {"backend": us, "TFLOP/s": flops / 1e12, "of the product": flops / ceilings.matmul_flops}
    return figures


def chosen_figures(ceilings: Ceilings, *, only: str, repeats: int) -> Figures:
    """Latents that an indexer has selected, in chunks and in decode steps."""
    figures: Figures = {}
    mla = latent([0], rank=RANK, rope_dim=ROPE, fmt=FMT)
    for heads, batch in ((16, [(30720, 2048)]), (128, [(30720, 2048)]), (16, [(30720, 1)] * 64)):
        count = sum(tokens for _, tokens in batch)
        if only not in (name := f"{count} queries of {CHOSEN} chosen latents, {heads} heads"):
            continue
        found = prefill(mla, batch, heads=heads, dim=PLAIN + ROPE, repeats=repeats, top_k=CHOSEN)
        us = found["backend"]
        figures[name] = found | {
            "GB/s": count * CHOSEN * (RANK + ROPE) * 2 / us / 1e3,
            "TFLOP/s": 2 * count * CHOSEN * heads * (2 * RANK + ROPE) / us / 1e6,
        }
    for heads, rows, chosen in ((16, 64, 2048), (128, 64, 2048), (16, 64, 1024), (128, 64, 1024), (16, 1, 2048)):
        if only not in (name := f"decode, {rows} x {chosen} of 8192 latents, {heads} heads"):
            continue
        found = selected_decode(heads, rows=rows, length=8192, chosen=chosen, repeats=repeats)
        for fmt, token_bytes in (("", 2 * (RANK + ROPE)), (", FP8", RANK + 2 * ROPE + RANK // 32)):
            rate = rows * chosen * token_bytes / found["kernel" + fmt] * 1e6
            found |= {"GB/s" + fmt: rate / 1e9, "of the copy" + fmt: rate / ceilings.copy_bytes_s}
        figures[name] = found
    return figures


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="what names of figures contain, such as 'heads of 512'")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ceilings = Ceilings.measure(DEVICE, torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}: {ceilings.describe()}")
    figures: Figures = {"ceilings": vars(ceilings)}
    for make in (latent_figures, kv_figures, prefill_figures, chosen_figures):
        figures |= make(ceilings, only=args.only, repeats=args.repeats)
    for name, found in list(figures.items())[1:]:
        print(f"{name:64}" + "  ".join(f"{key} {value:,.{1 if value > 10 else 3}f}" for key, value in found.items()))
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
