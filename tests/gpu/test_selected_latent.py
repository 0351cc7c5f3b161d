"""Attention to selected latents whose number only the device knows: the kernel, and static steps under cp.

Selections are made of small whole numbers, exact in every dtype, so that they are right or wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from raycache.attention.base import LatentProjection, StaticStep
from raycache.attention.fp8_latent import SHAPES, Programs, tile_shape
from raycache.memory.component import FULL, CacheFormat, index_keys, latent
from raycache.memory.device import DevicePool
from raycache.memory.views import LatentView
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.decode_batch import DecodeBatch
from raycache.step.page_tables import PageTables
from tests.oracle.attention import Batch, Case, Seat, on_ranks
from tests.unit import test_attention_latent as latents

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ERROR = 0.015
SIZES = latents.Sizes(heads=16, dim=128, rope=64, value=128, rank=512)
INDEX_HEADS, INDEX_DIM, TOP_K = 4, 16, 40
NUM_ROWS, NUM_PAGES, PAGE_SIZE = 8, 96, 16
REPLAYED = [[(17, 1), (0, 1), (300, 1), (63, 1), (64, 1)], [(5, 1)], [(290, 1), (1, 1), (16, 1), (130, 1)] * 2]
"""Rows with fewer tokens than are selected, some of them all on one rank, and padding."""
BOTH_FORMATS = pytest.mark.parametrize("has_fp8", [False, True], ids=["bfloat16", "fp8"])
BOTH_EXCHANGES = pytest.mark.parametrize("has_all_tokens", [False, True], ids=["tokens", "heads"])


# --- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """Queries and the slots of each; what is in no slot is not a number.

    Attributes:
        lengths: slots of each query.
        width: of the table of slots.
    """

    lengths: Sequence[int]
    width: int
    heads: int
    has_fp8: bool
    dtype: torch.dtype = torch.bfloat16
    num_pages: int = 400

    def view(self) -> LatentView:
        name = str(self.dtype).removeprefix("torch.")
        fmt = CacheFormat(name, has_fp8_latent=self.has_fp8)
        ctx = ParallelContext.single(torch.device(DEVICE))
        pool = DevicePool(
            [latent([0], rank=512, rope_dim=64, fmt=fmt)],
            num_layers=1,
            sizes={FULL: self.num_pages},
            page_size=PAGE_SIZE,
            ctx=ctx,
        )
        for field in pool.rows("latent").values():
            field.view(torch.uint8).fill_(0xFF)
        return pool.latent(0)

    def slots(self, *, seed: int = 0) -> Tensor:
        """int32 [T, width]; the number of a slot behind the length is no slot."""
        random = torch.Generator().manual_seed(seed)
        slots = torch.full((len(self.lengths), self.width), 1 << 30, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            slots[row, :length] = torch.randperm(self.num_pages * PAGE_SIZE // 2, generator=random)[:length].int()
        return slots.to(DEVICE)

    def queries(self) -> tuple[Tensor, Tensor]:
        """Absorbed and rotary parts, with the strides that the backend gives."""
        q = torch.randn(self.heads, len(self.lengths), 512, dtype=self.dtype, device=DEVICE).transpose(0, 1)
        return q, torch.randn(len(self.lengths), self.heads, 192, dtype=self.dtype, device=DEVICE)[..., 128:]

    def fill(self, view: LatentView, slots: Tensor) -> None:
        used = torch.cat([row[:length] for row, length in zip(slots, self.lengths, strict=True)]).unique().long()
        rows, rope = (torch.randn(len(used), size, dtype=self.dtype, device=DEVICE) for size in (512, 64))
        view.write(used, rows * torch.rand(len(used), 1, dtype=self.dtype, device=DEVICE) * 3, rope)

    def check(self, view: LatentView, q: Tensor, rope: Tensor, slots: Tensor, found: tuple[Tensor, Tensor]) -> None:
        out, lse = found
        for row, length in enumerate(self.lengths):
            if not length:
                assert not out[row].any() and (lse[row] == float("-inf")).all()
                continue
            keys, turned = view.take(slots[row, :length].long(), dtype=torch.float64)
            scores = (q[row].double() @ keys.T + rope[row].double() @ turned.T) * 0.03
            right = scores.softmax(-1) @ keys
            assert (out[row] - right).norm() < ERROR * right.norm(), row
            assert (lse[row] - scores.logsumexp(-1)).abs().max() < 1e-3, row


def programs(heads: int, at_once: int) -> Programs:
    # Numbers that are left from others are no results.
    partial = torch.full((64 << 20,), float("nan"), device=DEVICE)
    return Programs(tile_shape(heads, SHAPES), at_once, partial)


@BOTH_FORMATS
@pytest.mark.parametrize(
    ("heads", "lengths", "width", "at_once"),
    [
        (16, [0, 1, 31, 32, 33, 128, 129, 1000, 2048], 2048, 264),
        (6, [2048, 0], 2048, 264),
        (16, [700] * 300, 1003, 264),
        (32, [100, 90, 0], 129, 1),
        (128, [2048, 300, 0, 5], 2048, 132),
        (16, [3, 0, 20], 23, 264),
    ],
)
def test_each_query_sees_its_slots_and_nothing_else(
    heads: int, lengths: list[int], width: int, at_once: int, has_fp8: bool
) -> None:
    from raycache.attention.latent_kernels import attend_selected

    for dtype in (torch.bfloat16, torch.float16):
        asked = Asked(lengths, width, heads, has_fp8, dtype)
        view, slots, (q, rope) = asked.view(), asked.slots(), asked.queries()
        asked.fill(view, slots)
        counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        run = programs(heads, at_once)
        found = attend_selected(q, rope, view.pages, slots, counts, programs=run, scale=0.03)
        asked.check(view, q, rope, slots, found)


@BOTH_FORMATS
def test_the_kernel_is_replayed_with_other_lengths(has_fp8: bool) -> None:
    from raycache.attention.latent_kernels import attend_selected

    several = [Asked(lengths, 2048, 16, has_fp8) for lengths in ([2048, 0, 700], [1, 129, 0], [0, 0, 2000])]
    view, run = several[0].view(), programs(16, 264)
    q, rope = several[0].queries()
    slots = torch.zeros(3, 2048, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    attend_selected(q, rope, view.pages, slots, counts, programs=run, scale=0.03)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_selected(q, rope, view.pages, slots, counts, programs=run, scale=0.03)
    for seed, asked in enumerate(several):
        slots.copy_(asked.slots(seed=seed))
        counts.copy_(torch.tensor(asked.lengths, dtype=torch.int32))
        asked.fill(view, slots)
        graph.replay()
        asked.check(view, q, rope, slots, found)


# --- static steps under cp --------------------------------------------------------------------------------------------


class Sequences(latents.Sequences):
    """Random sequences of a case, with an indexer whose scores are whole numbers."""

    def __init__(self, case: Case, *, has_fp8: bool) -> None:
        super().__init__(case, SIZES)

        def whole(*shape: int, salt: int) -> list[Tensor]:
            return [x.round().clamp(-1, 1) for x in case.draw(*shape, salt=salt)]

        self.has_fp8 = has_fp8
        self.index_q, self.index_k = whole(INDEX_HEADS, INDEX_DIM, salt=11), whole(INDEX_DIM, salt=12)
        self.weights = [x.float() for x in whole(INDEX_HEADS, salt=13)]

    def new(self, rows: list[Tensor]) -> Tensor:
        """Of the last token of each row, [NUM_ROWS, ...] with zeros for padding."""
        padded = rows[0].new_zeros((NUM_ROWS, *rows[0].shape[1:]))
        padded[: len(rows)] = torch.stack([row[-1] for row in rows])
        return padded.to(DEVICE)

    def exact(self) -> list[Tensor]:
        """[1, Hq, Dv] of each row."""
        if self.has_fp8:
            self.latent = [_rounded(rows) for rows in self.latent]
        return [self.right(row, [self._chosen(row)]) for row in range(len(self.case.rows))]

    def _chosen(self, row: int) -> list[int]:
        products = self.index_k[row].double() @ self.index_q[row][-1].double().T
        scores = (products.clamp(min=0) * self.weights[row][-1].double()).sum(1).tolist()
        return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:TOP_K])


def _rounded(rows: Tensor) -> Tensor:
    blocks = rows.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


class StaticBatch:
    """A layer with an indexer on one rank, and a decode batch whose rows change."""

    def __init__(self, ctx: ParallelContext, projection: LatentProjection, *, has_fp8: bool, has_all: bool) -> None:
        from raycache.attention.flashinfer import FlashInferBackend

        self.ctx, self.projection = ctx, projection
        fmt = CacheFormat("bfloat16")
        small = dataclasses.replace(fmt, has_fp8_latent=has_fp8)
        components = [latent([0], rank=512, rope_dim=64, fmt=small), index_keys([0], dim=INDEX_DIM, fmt=fmt)]
        self.pool = DevicePool(
            components, num_layers=1, sizes={FULL: NUM_PAGES}, page_size=PAGE_SIZE, ctx=ctx, has_scratch=True
        )
        for component in components:
            for field in self.pool.rows(component.name).values():
                field.view(torch.uint8).zero_()
        self.batch = DecodeBatch(NUM_ROWS, self.pool, ctx, has_all_tokens=has_all)
        self.mine = slice(None) if has_all else slice(ctx.cp.rank, None, ctx.cp.size)
        backend = FlashInferBackend(torch.device(DEVICE), max_pages=NUM_PAGES)
        self.step: StaticStep = backend.plan_static(self.batch.inputs)
        self.step.replan(self.batch.inputs)
        rows = len(self.batch.inputs.ids)
        shapes = (INDEX_HEADS, INDEX_DIM), (INDEX_DIM,), (SIZES.heads, 192), (512,), (64,)
        self.given = [torch.zeros(rows, *shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
        self.weights = torch.zeros(rows, INDEX_HEADS, device=DEVICE)

    def fill(self, some: Sequences) -> None:
        seat = Seat(Batch(some.case), self.ctx, [])
        seat.fill(self.pool.latent(0).write, some.latent, some.rope, space=FULL)
        seat.fill(self.pool.index(0).write, some.index_k, space=FULL)
        for tensor, rows in zip(self.given, (some.index_q, some.index_k, some.q, some.latent, some.rope), strict=True):
            tensor.copy_(some.new(rows)[self.mine])
        self.weights.copy_(some.new(some.weights)[self.mine])
        tables = PageTables()
        for slot, spaces in seat.batch.tables.items():
            tables.begin(slot, spaces[FULL].tolist())
        self.batch.fill(seat.batch.plan, {FULL: tables})
        self.step.replan(self.batch.inputs)

    def run(self) -> Tensor:
        """[T_own, H_own, Dv]"""
        index_q, index_k, q, rows, rope = self.given
        selection = self.step.select(self.pool.index(0), index_q, index_k, self.weights, top_k=TOP_K)
        return self.step.attend_latent(
            self.pool.latent(0), q, rows, rope, self.projection, scale=latents.SCALE, selection=selection
        )


def cases_of(cp: int, *, has_fp8: bool) -> tuple[list[Sequences], LatentProjection]:
    cases = [
        Case(rows, cp=cp, share=PAGE_SIZE // cp, dtype=torch.bfloat16, device=DEVICE, seed=seed)
        for seed, rows in enumerate(REPLAYED)
    ]
    every = [Sequences(case, has_fp8=has_fp8) for case in cases]
    for some in every:
        some.key, some.value = every[0].key, every[0].value
    return every, LatentProjection(every[0].key.to(DEVICE), every[0].value.to(DEVICE))


@BOTH_FORMATS
@BOTH_EXCHANGES
@pytest.mark.parametrize("cp", [2, 4])
def test_a_static_step_of_several_ranks_selects_for_other_rows(cp: int, has_all_tokens: bool, has_fp8: bool) -> None:
    """Not recorded: threads cannot meet in a graph."""
    every, projection = cases_of(cp, has_fp8=has_fp8)
    found: list[dict[int, Tensor]] = [{} for _ in every]

    def work(ctx: ParallelContext) -> None:
        batch = StaticBatch(ctx, projection, has_fp8=has_fp8, has_all=has_all_tokens)
        for outs, some in zip(found, every, strict=True):
            batch.fill(some)
            outs[ctx.cp.rank] = batch.run().cpu()

    on_ranks(cp, work, device=DEVICE)
    for outs, some in zip(found, every, strict=True):
        parts = [outs[rank] for rank in range(cp)]
        out = torch.cat(parts, 1) if has_all_tokens else torch.stack(parts, 1).flatten(0, 1)
        for row, right in enumerate(some.exact()):
            assert (out[row : row + 1].double() - right).norm() < ERROR * right.norm(), row


class MirrorGroup(Group):
    """The first of two members of which both do and have the same; can be recorded on one GPU."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor])

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor[0], tensor[0]])


def recorded(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@BOTH_FORMATS
@BOTH_EXCHANGES
def test_selecting_under_cp_is_recorded(has_all_tokens: bool, has_fp8: bool) -> None:
    """Whatever waits for the device cannot be."""
    every, projection = cases_of(2, has_fp8=has_fp8)
    ctx = ParallelContext(split=Split(cp=2), rank=0, device=torch.device(DEVICE), cp=MirrorGroup())
    with torch.inference_mode():
        batch = StaticBatch(ctx, projection, has_fp8=has_fp8, has_all=has_all_tokens)
        replay = recorded(batch.run)
        for some in every:
            batch.fill(some)
            count = len(some.case.rows) if has_all_tokens else -(-len(some.case.rows) // 2)
            found = replay()[:count].clone()
            right = batch.run()[:count]
            assert right.isfinite().all() and right.any()
            assert torch.equal(found, right)
