"""The indexer's kernels against the scores and the choice of the readable one, in float64.

Small whole numbers are exact in every dtype and make equal scores common: there the choice is right or wrong. Of other
numbers the choice is right up to the rounding of scores.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.attention.sparse import best_first_come, index_scores
from raycache.memory.component import FULL, index_keys
from raycache.parallel.context import ParallelContext
from tests.oracle.attention import MIXED, Batch, Case, LargestTensor, Seat, on_ranks

if TYPE_CHECKING:
    from raycache.attention.sparse_kernels import KernelIndexer

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LONG = [(700, 130), (900, 1), (1200, 1), (0, 300), (3, 1), (600, 5)]


class Asked:
    """Random rows of a case.

    Args:
        magnitude: of whole numbers; 0 makes all scores equal, 1 many of them. -1 for normal ones.
    """

    def __init__(self, case: Case, *, heads: int, dim: int, magnitude: int) -> None:
        self.case, self.dim = case, dim
        random = torch.Generator().manual_seed(case.seed)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=random)
            return (x if magnitude < 0 else (x * magnitude).round().clamp(-magnitude, magnitude)).to(case.dtype)

        self.q = [draw(count, heads, dim) for _, count in case.rows]
        self.weights = [draw(count, heads).float() for _, count in case.rows]
        self.k = [draw(start + count, dim) for start, count in case.rows]

    def scores(self, row: int) -> Tensor:
        """float64 [n, L]; -inf for what is not seen."""
        q, k, weights = (x[row].to(DEVICE).double() for x in (self.q, self.k, self.weights))
        return index_scores(q, k, weights).masked_fill(~self.seen(row), float("-inf"))

    def seen(self, row: int) -> Tensor:
        """bool [n, L]."""
        start, count = self.case.rows[row]
        return torch.ones(count, start + count, dtype=torch.bool, device=DEVICE).tril(start)

    def right(self, row: int, top_k: int) -> Tensor:
        """bool [n, L], what each query chooses."""
        scores = self.scores(row)
        index = best_first_come(scores, min(top_k, scores.shape[1]))
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, True) & self.seen(row)

    def local(self, seat: Seat) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, weights of a rank's new tokens."""
        return seat.local(self.q), seat.local(self.case.new(self.k)), seat.local(self.weights)

    def seat(self, batch: Batch, ctx: ParallelContext) -> Seat:
        """With the keys of the prefixes, and nothing that could be read elsewhere."""
        seat = Seat(batch, ctx, [index_keys([0], dim=self.dim, fmt=self.case.fmt)])
        seat.pool.index(0).key.fill_(float("nan"))
        seat.fill(seat.pool.index(0).write, self.k, space=FULL)
        return seat

    def found(self, top_k: int) -> list[Tensor]:
        """Per row int [n, L]: how many ranks chose a token."""
        batch, lock = Batch(self.case), threading.Lock()
        found = [torch.zeros_like(self.seen(row), dtype=torch.int32) for row in range(len(self.case.rows))]

        def work(ctx: ParallelContext) -> None:
            seat = self.seat(batch, ctx)
            selection = indexer_of(seat).select(seat.pool.index(0), *self.local(seat), top_k=top_k)
            rows = seat.pool.index(0).key.flatten(0, 1)
            assert seat.holds_new(lambda slots: (rows[slots],), self.k, space=FULL)
            mine = chosen(seat, selection.slots, selection.lengths)
            with lock:
                for total, part in zip(found, mine, strict=True):
                    total += part

        on_ranks(self.case.cp, work, device=DEVICE)
        return found


def indexer_of(seat: Seat, *, max_len: int = 0) -> KernelIndexer:
    # Where there is no GPU there may be no Triton.
    from raycache.attention.sparse_kernels import KernelIndexer

    return KernelIndexer(StepLayout(seat.inputs), seat.inputs.places[FULL], max_len=max_len)


def chosen(seat: Seat, slots: Tensor, lengths: Tensor) -> list[Tensor]:
    """Slots [T, K] of a rank as int [n, L] per row, 1 for a token that is chosen."""
    place = torch.arange(slots.shape[1], device=DEVICE)
    assert torch.equal(slots >= 0, place < lengths[:, None]), "slots first, then -1"
    found = []
    for row, (start, count) in enumerate(seat.batch.case.rows):
        index, held = seat.slots(row, range(start + count), FULL)
        position = torch.full((seat.pool.index(0).key.flatten(0, 1).shape[0],), -1, device=DEVICE)
        position[held] = torch.tensor(index, dtype=torch.int64, device=DEVICE)
        mine = slots[slice(seat.inputs.rows[row].tokens.start, seat.inputs.rows[row].tokens.stop)]
        query, which = (mine >= 0).nonzero(as_tuple=True)
        positions = position[mine[query, which].long()]
        assert (positions >= 0).all(), "slots of the row that this rank holds"
        is_next = query.diff() == 0
        assert (positions.diff()[is_next] > 0).all(), "the oldest first"
        out = torch.zeros(count, start + count, dtype=torch.int32, device=DEVICE)
        out[query, positions] = 1
        found.append(out)
    return found


def check_exact(asked: Asked, top_k: int) -> None:
    for row, found in enumerate(asked.found(top_k)):
        assert torch.equal(found, asked.right(row, top_k).int()), f"row {row}"


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("magnitude", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_batches_choose_as_sorting_does(cp: int, magnitude: int, dtype: torch.dtype) -> None:
    for seed, top_k in enumerate([1, 6, 40]):
        case = Case(MIXED, cp=cp, dtype=dtype, seed=seed, device=DEVICE)
        check_exact(Asked(case, heads=2, dim=3, magnitude=magnitude), top_k)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(("heads", "magnitude"), [(64, 1), (32, 0)])
def test_equal_scores_are_won_by_the_earlier_token_under_any_split(cp: int, heads: int, magnitude: int) -> None:
    case = Case(LONG, cp=cp, share=64 // cp, dtype=torch.bfloat16, device=DEVICE)
    check_exact(Asked(case, heads=heads, dim=128, magnitude=magnitude), 256)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_largest_scores_are_chosen_up_to_rounding(cp: int) -> None:
    top_k = 2048
    case = Case([(4000, 90), (20000, 1), (1990, 120)], cp=cp, share=64 // cp, dtype=torch.bfloat16, device=DEVICE)
    asked = Asked(case, heads=64, dim=128, magnitude=-1)
    for row, found in enumerate(asked.found(top_k)):
        scores, right = asked.scores(row), asked.right(row, top_k)
        assert torch.equal(found.sum(1), right.sum(1)) and found.max() == 1
        last = scores.masked_fill(~right, float("inf")).amin(1, keepdim=True)
        # Float32 sums of 64 products of about 10 and weights of about 1.
        error = 1e-5 * scores[asked.seen(row)].abs().max()
        assert (found.bool() | (scores <= last + error)).all()
        assert (~found.bool() | (scores >= last - error)).all()


def test_the_choice_is_the_same_under_any_split_and_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(cp: int) -> list[Tensor]:
        case = Case(LONG, cp=cp, share=64 // cp, dtype=torch.bfloat16, device=DEVICE)
        return Asked(case, heads=64, dim=128, magnitude=-1).found(256)

    right = found(1)
    assert all(map(torch.equal, found(2), right))
    assert all(map(torch.equal, found(4), right))
    monkeypatch.setattr("raycache.attention.sparse_kernels.SCORE_BYTES", 4 * 1024 * 37)
    assert all(map(torch.equal, found(1), right))
    monkeypatch.setattr("raycache.attention.sparse_kernels._CHOSEN_FROM", 512)
    assert all(map(torch.equal, found(1), right))
    assert all(map(torch.equal, found(2), right))


def test_scores_are_held_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycache.attention.sparse_kernels.SCORE_BYTES", 1 << 16)
    case = Case([(0, 1000)], share=64, dtype=torch.bfloat16, device=DEVICE)
    asked = Asked(case, heads=2, dim=16, magnitude=1)
    with torch.inference_mode():
        seat = asked.seat(Batch(case), ParallelContext.single(torch.device(DEVICE)))
        given = asked.local(seat)
        with LargestTensor() as largest:
            indexer_of(seat).select(seat.pool.index(0), *given, top_k=16)
    assert largest.num_bytes <= 1 << 16


@pytest.mark.parametrize("cp", [1, 2])
def test_a_score_that_is_no_number_is_chosen_last(cp: int) -> None:
    case = Case([(60, 4), (40, 1)], cp=cp, share=8, dtype=torch.bfloat16, device=DEVICE)
    asked = Asked(case, heads=2, dim=16, magnitude=1)
    for k in asked.k:
        k[5] = float("nan")
    check_exact(asked, 30)
    check_exact(asked, 1000)


def test_a_recorded_step_is_replayed_with_other_rows() -> None:
    top_k, ctx = 64, ParallelContext.single(torch.device(DEVICE))
    # The first is the largest: its pool holds the pages of all.
    cases = [
        Case([(length, 1) for length in lengths], share=16, dtype=torch.bfloat16, seed=seed, device=DEVICE)
        for seed, lengths in enumerate([(300, 299, 310, 290), (0, 250, 63, 64), (15, 16, 255, 1)])
    ]
    asked = [Asked(case, heads=32, dim=64, magnitude=1) for case in cases]
    with torch.inference_mode():
        seats = [some.seat(Batch(case), ctx) for some, case in zip(asked, cases, strict=True)]
        first = seats[0]
        view, places = first.pool.index(0), first.inputs.places[FULL]
        indexer = indexer_of(first, max_len=320)
        given = asked[0].local(first)
        indexer.select(view, *given, top_k=top_k)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            selection = indexer.select(view, *given, top_k=top_k)
        for some, seat in zip(asked, seats, strict=True):
            new = seat.inputs.places[FULL]
            seat.fill(view.write, some.k, space=FULL)
            for tensor, value in zip(given, some.local(seat), strict=True):
                tensor.copy_(value)
            places.slots.copy_(new.slots)
            indexer.replan(seat.inputs, new)
            graph.replay()
            for row, found in enumerate(chosen(seat, selection.slots, selection.lengths)):
                assert torch.equal(found, some.right(row, top_k).int())


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "top_k", "reason"),
    [
        (torch.bfloat16, 64, 128, 2048, ""),
        (torch.float32, 64, 128, 2048, "bfloat16 or float16"),
        (torch.bfloat16, 64, 128, 2049, "top_k=2049"),
        (torch.bfloat16, 256, 128, 2048, "256 index heads"),
    ],
)
def test_what_has_no_kernel_is_named(dtype: torch.dtype, heads: int, dim: int, top_k: int, reason: str) -> None:
    from raycache.attention.sparse_kernels import missing_kernel

    case = Case([(3, 1)], dtype=dtype, device=DEVICE)
    seat = Asked(case, heads=heads, dim=dim, magnitude=1).seat(
        Batch(case), ParallelContext.single(torch.device(DEVICE))
    )
    found = missing_kernel(seat.pool.index(0), torch.empty(1, heads, dim, dtype=dtype, device=DEVICE), top_k=top_k)
    assert reason in found and bool(reason) == bool(found)
