"""Teacher-forced logits of a gang of tp x cp ranks, as threads of this process, without a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.torch_ref import TorchBackend
from raycache.deployment.decode_split import model_obstacle
from raycache.layers.cp_split import CpSplit
from raycache.memory.component import FULL, CacheFormat
from raycache.memory.device import DevicePool
from raycache.models.base import components, load_model, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.rank import Rank
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan
from raycache.wire.results import emissions
from tests.oracle.weights import open_weights

PAGE_SIZE = 8

_AXES = ("tp", "cp", "tp_cp")

T = TypeVar("T")

Piece = tuple[int, int, int]
"""Of a step: sequence, first and end position."""


class ThreadGroup(Group):
    """A member of a group of threads that hand tensors to each other.

    Args:
        rank: of the member.
        board: one place per member.
        barrier: of all members.
    """

    def __init__(self, *, rank: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank=rank, size=len(board))
        self._board, self._barrier = board, barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor))

    def all_to_all(self, tensor: Tensor) -> Tensor:
        assert tensor.shape[0] == self.size, "one part per member"
        return torch.stack([theirs[self.rank] for theirs in self._exchange(tensor)])

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(60)
        every = [theirs.clone() for theirs in self._board]
        self._barrier.wait(60)
        assert len({(theirs.shape, theirs.dtype) for theirs in every}) == 1, "members of a collective give the same"
        return every


def on_gang(split: Split, work: Callable[[ParallelContext], T]) -> list[T]:
    """Run `work` on every rank at once, each with its groups of tp and cp.

    Returns:
        What each rank gave, by world rank.
    """

    def members_of(axis: str, rank: int) -> tuple[int, ...]:
        return split.stage_members(rank) if axis == "tp_cp" else split.axis_members(axis, rank)

    rows = {(axis, members_of(axis, rank)) for axis in _AXES for rank in range(split.world_size)}
    boards = {row: ([torch.empty(0)] * len(row[1]), threading.Barrier(len(row[1]))) for row in rows}

    def member(axis: str, rank: int) -> Group:
        members = members_of(axis, rank)
        board, barrier = boards[axis, members]
        return Group() if len(members) == 1 else ThreadGroup(rank=members.index(rank), board=board, barrier=barrier)

    def run(rank: int) -> T:
        groups = {axis: member(axis, rank) for axis in _AXES}
        try:
            with torch.inference_mode():
                return work(ParallelContext(split=split, rank=rank, device=torch.device("cpu"), **groups))
        except BaseException:
            for _, barrier in boards.values():
                barrier.abort()
            raise

    with ThreadPoolExecutor(split.world_size) as pool:
        done = [pool.submit(run, rank) for rank in range(split.world_size)]
    # The ranks that others left alone say nothing about the cause.
    failures = [failure for failure in (future.exception() for future in done) if failure is not None]
    for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
        raise failure
    return [future.result() for future in done]


def gang_logits(
    model_dir: Path,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Piece]],
    *,
    split: Split,
    dtype: torch.dtype = torch.float32,
    splits_decode: bool = False,
    is_scored: bool = True,
) -> list[NDArray[np.float64]]:
    """Logits after every token of each sequence, [T, V].

    Args:
        model_dir: of the model.
        sequences: token ids.
        steps: which pieces of them are computed together; each sequence's follow one another to its end.
        split: tp and cp of the gang.
        dtype: of weights, activations and cache.
        splits_decode: whether the weights of decode steps are split over cp.
        is_scored: whether all logits are computed; else only those at the ends of pieces, the others are NaN.
    """
    config = read_config(model_dir)
    parts = components(config, CacheFormat(str(dtype).removeprefix("torch.")))
    pages = [-(-len(ids) // PAGE_SIZE) for ids in sequences]
    first_pages = np.cumsum([0, *pages]).tolist()
    sizes = {FULL: sum(pages), **{part.space: sum(pages) for part in parts if part.window}}
    plans = _plans(sequences, steps, first_pages, spaces=list(sizes), is_scored=is_scored)
    is_split = splits_decode and split.cp > 1
    if is_split:
        assert not model_obstacle(config, tp=split.tp, cp=split.cp), "the weights can be split"

    def work(ctx: ParallelContext) -> list[Tensor | None]:
        source = open_weights(model_dir, dtype=dtype, device=ctx.device)
        model = load_model(config, source, ctx, dtype, on_progress=lambda done, total: None)
        rooms = {**sizes, "state": 2 * len(sequences)}
        pool = DevicePool(parts, num_layers=config.num_layers, sizes=rooms, page_size=PAGE_SIZE, ctx=ctx)
        decode_model = model.over_cp(CpSplit.of(ctx)) if is_split else None
        rank = Rank(
            ctx=ctx,
            config=config,
            model=model,
            pool=pool,
            backend=TorchBackend(),
            dtype=dtype,
            decode_model=decode_model,
        )
        return [rank.forward(plan) for plan in plans]

    found = [np.full((len(ids), config.vocab_size), np.nan) for ids in sequences]
    for rank, answers in enumerate(on_gang(split, work)):
        for pieces, plan, logits in zip(steps, plans, answers, strict=True):
            assert logits is not None
            _put(found, pieces, plan, logits.double().numpy(), split=split, rank=rank)
    return found


def _put(
    found: Sequence[NDArray[np.float64]],
    pieces: Sequence[Piece],
    plan: StepPlan,
    logits: NDArray[np.float64],
    *,
    split: Split,
    rank: int,
) -> None:
    """Put what a rank gave of a step where it belongs; tp ranks must give the same."""
    at, lines = split.coords(rank), iter(logits)
    for row, positions in emissions(plan, cp_size=split.cp)[at.cp]:
        sequence, start, _ = pieces[row]
        for position in positions:
            line, place = next(lines), found[sequence][start + position]
            assert at.tp == 0 or np.array_equal(line, place), "tp ranks have the same logits"
            place[:] = line
    assert next(lines, None) is None, "no logits of anything else"


def _plans(
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Piece]],
    first_pages: Sequence[int],
    *,
    spaces: list[str],
    is_scored: bool,
) -> list[StepPlan]:
    plans, known = [], [0] * len(sequences)
    for number, pieces in enumerate(steps, start=1):
        rows = []
        for sequence, start, stop in pieces:
            ids, count = sequences[sequence], -(-stop // PAGE_SIZE)
            pages = [first_pages[sequence] + page for page in range(known[sequence], count)]
            known[sequence] = count
            rows.append(
                Row(
                    slot=sequence,
                    start=start,
                    tokens=np.asarray(ids[start:stop], np.int32).tobytes(),
                    new_pages={space: pages for space in spaces},
                    output_position=0,
                    targets=np.asarray(ids[start + 1 : stop], np.int32).tobytes() if is_scored else b"",
                    # Read and written in turn, as after a restore point.
                    read_state=-1 if start == 0 else 2 * sequence + number % 2,
                    write_state=2 * sequence + (number + 1) % 2,
                )
            )
        admits = [Admit(i, {}, SamplingParams(temperature=0), seed=0) for i, start, _ in pieces if start == 0]
        plans.append(StepPlan(number, rows, admits, num_top=0))
    return plans
