"""Batches on scattered pages and cp ranks as threads, for tests of attention; and dense twins in float64.

A `Case` says which rows there are, `Batch` lays them on pages, `Batch.run` gives every rank its part and puts the parts
of the results together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycache.attention.base import AttentionBackend, AttentionStep, StaticStep
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, CacheFormat, Component, Reuse
from raycache.memory.device import DevicePool
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.step.inputs import StepInputs, build_inputs
from raycache.wire.plan import Row, StepPlan, local_positions

BACKENDS: list[AttentionBackend] = [TorchBackend()]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.capabilities.name)
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MIXED = [(17, 1), (0, 9), (30, 8), (5, 1), (0, 1), (3, 2)]
"""Decodes and chunks in one batch, with and without a prefix."""

Rows = Sequence[Tensor]
"""Something about every token, per row."""

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
        assert len({(theirs.shape, theirs.dtype) for theirs in every}) == 1, "members of a collective give the same"
        return every


def on_ranks(cp: int, work: Callable[[ParallelContext], None], *, device: str = "cpu") -> None:
    """Run on `cp` ranks at once."""
    if device == "cuda":
        # Torch loads its linear algebra for CUDA at the first use, which two threads must not make at once.
        torch.linalg.solve_triangular(*torch.eye(1, device=device).expand(2, 1, 1), upper=True)
    board, barrier = [torch.empty(0)] * cp, threading.Barrier(cp)

    def run(rank: int) -> None:
        group = ThreadGroup(rank=rank, board=board, barrier=barrier) if cp > 1 else Group()
        try:
            with torch.inference_mode():
                work(ParallelContext(split=Split(cp=cp), rank=rank, device=torch.device(device), cp=group))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(cp) as pool:
        failures = [done.exception() for done in [pool.submit(run, rank) for rank in range(cp)]]
    # The ranks that others left alone say nothing about the cause.
    failed = [failure for failure in failures if failure is not None]
    for failure in sorted(failed, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure


class OnePerRank:
    """A backend that holds buffers serves one rank; this makes one for each, when it is first asked."""

    def __init__(self, make: Callable[[], AttentionBackend]) -> None:
        self._make = make
        self._of: dict[int, AttentionBackend] = {}
        self.capabilities = self._backend(0).capabilities

    def plan(self, inputs: StepInputs) -> AttentionStep:
        return self._backend(inputs.ctx.cp.rank).plan(inputs)

    def plan_static(self, inputs: StepInputs, *, has_chunks: bool = False) -> StaticStep:
        return self._backend(inputs.ctx.cp.rank).plan_static(inputs, has_chunks=has_chunks)

    def _backend(self, rank: int) -> AttentionBackend:
        if rank not in self._of:
            self._of[rank] = self._make()
        return self._of[rank]


# --- a batch on pages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch of rows.

    Attributes:
        rows: (start, new tokens) each.
        share: tokens of a page on one cp rank.
        window: of the KV, 0 for none.
        dtype: of activations and cache.
    """

    rows: Sequence[tuple[int, int]]
    cp: int = 1
    share: int = 4
    window: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"

    @property
    def page_size(self) -> int:
        return self.share * self.cp

    @property
    def fmt(self) -> CacheFormat:
        return CacheFormat(str(self.dtype).removeprefix("torch."))

    def draw(self, *shape: int, salt: int = 0) -> list[Tensor]:
        """Standard normal [start + new, *shape] per row."""
        random = torch.Generator().manual_seed(1000 * self.seed + salt)
        sizes = [start + count for start, count in self.rows]
        return [torch.randn(size, *shape, generator=random, dtype=torch.float64).to(self.dtype) for size in sizes]

    def draw_one(self, *shape: int, salt: int = 99) -> Tensor:
        random = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(self.dtype)

    def new(self, rows: Rows) -> list[Tensor]:
        """Of the new tokens only."""
        return [row[start:] for row, (start, _) in zip(rows, self.rows, strict=True)]


def skip_unless_declared(backend: AttentionBackend, dtype: str, device: str) -> None:
    """Whether a backend can do what it does not declare is not asked."""
    can = backend.capabilities
    if dtype not in can.dtypes or device not in can.device_types:
        pytest.skip(f"{can.name} does not declare {dtype} on {device}")


class Seat:
    """A rank's part of a case, with the step that a backend planned for it."""

    def __init__(self, batch: Batch, ctx: ParallelContext, components: Sequence[Component]) -> None:
        self.batch, self.ctx = batch, ctx
        case = batch.case
        sizes = {component.space: batch.num_pages for component in components}
        sizes |= {c.space: batch.num_states for c in components if c.reuse is Reuse.STATE_HERE}
        self.pool = DevicePool(components, num_layers=2, sizes=sizes, page_size=case.page_size, ctx=ctx)
        self.mine = local_positions(batch.plan, cp_rank=ctx.cp.rank, cp_size=case.cp)
        self.inputs = build_inputs(
            batch.plan, batch.tables, page_size=case.page_size, windows={FULL: 0, "window": case.window}, ctx=ctx
        )

    def slots(self, row: int, positions: Sequence[int], space: str) -> tuple[list[int], Tensor]:
        """(index into positions, slot) of those that this rank keeps."""
        case, table = self.batch.case, self.batch.tables[row][space]
        index, slots = [], []
        for i, position in enumerate(positions):
            page, offset = table[position // case.page_size], position % case.page_size
            if offset // case.share == self.ctx.cp.rank and page >= 0:
                index.append(i)
                slots.append(int(page) * case.share + offset % case.share)
        return index, torch.tensor(slots, dtype=torch.int64, device=case.device)

    def fill(self, write: Callable[..., None], *fields: Rows, space: str) -> None:
        """Put the prefixes where the placement rule says."""
        for i, (start, _) in enumerate(self.batch.case.rows):
            index, slots = self.slots(i, range(start), space)
            if index:
                write(slots, *(field[i][index].to(self.batch.case.device) for field in fields))

    def holds_new(self, read: Callable[[Tensor], tuple[Tensor, ...]], *fields: Rows, space: str) -> bool:
        """Whether the new tokens are where the placement rule says."""
        for i, (start, count) in enumerate(self.batch.case.rows):
            index, slots = self.slots(i, range(start, start + count), space)
            for found, field in zip(read(slots), fields, strict=True):
                if not torch.equal(found.cpu(), field[i][start:][index]):
                    return False
        return True

    def local(self, new: Rows) -> Tensor:
        """This rank's [T_local, ...] of the new tokens."""
        return torch.cat([row[mine] for row, mine in zip(new, self.mine, strict=True)]).to(self.batch.case.device)


class Batch:
    """A case on scattered pages.

    Attributes:
        plan, tables: for `build_inputs`. Pages of a window that no query sees any more are not kept.
        states: (read slot, write slot) per row; rows that start at 0 read none.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        random = np.random.default_rng(case.seed)
        numbers = [-(-(start + count) // case.page_size) for start, count in case.rows]
        self.num_pages = sum(numbers) + 3
        spaces = {space: self._scatter(numbers, random) for space in (FULL, "window")}
        for table, (start, count) in zip(spaces["window"], case.rows, strict=True):
            self._forget(table, start, start + count)
        self.tables = {i: {space: tables[i] for space, tables in spaces.items()} for i in range(len(case.rows))}
        self.num_states = 2 * len(case.rows) + 2
        slots = random.permutation(self.num_states)[: 2 * len(case.rows)].reshape(-1, 2).tolist()
        # Some go on in place, the others leave the state that they read to others.
        self.states = [
            (-1 if start == 0 else read, read if start and i % 3 == 2 else write)
            for i, ((start, _), (read, write)) in enumerate(zip(case.rows, slots, strict=True))
        ]
        self.plan = StepPlan(
            1,
            [
                Row(i, start, bytes(4 * count), read_state=read, write_state=write)
                for i, ((start, count), (read, write)) in enumerate(zip(case.rows, self.states, strict=True))
            ],
        )

    def run(
        self, backend: AttentionBackend, components: Sequence[Component], work: Callable[[Seat, AttentionStep], Tensor]
    ) -> list[Tensor]:
        """What `work` gives about the new tokens of each row, put together from all ranks."""
        outs: list[dict[int, Tensor]] = [{} for _ in self.case.rows]

        def on_rank(ctx: ParallelContext) -> None:
            seat = Seat(self, ctx, components)
            out = work(seat, backend.plan(seat.inputs)).cpu()
            for i, part in enumerate(out.split([len(mine) for mine in seat.mine])):
                outs[i].update(zip(seat.mine[i].tolist(), part, strict=True))

        on_ranks(self.case.cp, on_rank, device=self.case.device)
        return [torch.stack([out[i] for i in range(len(out))]) for out in outs]

    def _scatter(self, numbers: list[int], random: np.random.Generator) -> list[NDArray[np.int32]]:
        pages = random.permutation(self.num_pages).astype(np.int32)[: sum(numbers)]
        return [table.copy() for table in np.split(pages, np.cumsum(numbers)[:-1])]

    def _forget(self, table: NDArray[np.int32], start: int, stop: int) -> None:
        size, window = self.case.page_size, max(self.case.window, 2)
        for page in range(len(table)):
            spans = ((start - window + 1, start), (stop - window + 1, stop))
            if self.case.window and not any(page * size < last and (page + 1) * size > first for first, last in spans):
                table[page] = -1


# --- what is right ----------------------------------------------------------------------------------------------------


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    allowed: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Query i of n stands at key L - n + i of L. [n, Hq, D] -> [n, Hq, Dv] in float64.

    Args:
        allowed: per query the keys that it sees; all up to itself (and in the window) otherwise.
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=torch.float64)
    for i in range(len(q)):
        place = len(k) - len(q) + i
        seen = list(range(max(0, place - window + 1) if window else 0, place + 1)) if allowed is None else allowed[i]
        for head in range(q.shape[1]):
            keys, values = k[seen, head // group].double(), v[seen, head // group].double()
            scores = keys @ q[i, head].double() * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            out[i, head] = torch.softmax(scores, 0)[: len(seen)] @ values
    return out


def close(found: Tensor, right: Tensor, error: float, **more: Any) -> None:
    torch.testing.assert_close(found.double(), right.double(), atol=error, rtol=error, **more)


class LargestTensor(TorchDispatchMode):
    """Watches what torch returns.

    Attributes:
        num_bytes: of the largest tensor that an operation made.
    """

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views and tensors that are written in place are no new memory.
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, made.numel() * made.element_size())
        return out
