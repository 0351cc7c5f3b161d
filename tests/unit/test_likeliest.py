"""Under tp a greedy step exchanges the best token of each rank's part of the vocabulary, and gives the tokens that all
logits would have given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.torch_ref import TorchStep
from raycache.layers.cp_split import CpSplit
from raycache.layers.embedding import BEST_PARTS, VocabHead
from raycache.layers.forward_pass import ForwardPass
from raycache.memory.component import FULL
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.graphs import stage_layers
from raycache.rank.last_tokens import LastTokens
from raycache.rank.rank import Rank
from raycache.step.page_tables import PageTables
from raycache.types import SamplingParams
from raycache.wire.plan import UNKNOWN, Admit, Row, StepPlan
from raycache.wire.results import read_results
from tests.oracle.gang import ThreadGroup, on_gang
from tests.oracle.recorded import new_rank
from tests.unit.test_pieces import tiny

__all__ = ["tiny"]  # a fixture

GREEDY, SAMPLED = SamplingParams(temperature=0), SamplingParams(temperature=2.0)
IDS = np.random.default_rng(11).integers(3, 515, (3, 40))


# --- the head ---------------------------------------------------------------------------------------------------------


def likeliest(
    logits: Tensor, *, tp: int, cp: int = 1, beyond: float = 0.0, cap: float | None = None, factor: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank finds in logits [N, V], and the argmax of what each gathers.

    Args:
        beyond: what ranks have behind the vocabulary.
    """
    vocab_size = logits.shape[1]
    rows = -(-vocab_size // (tp * cp)) * cp
    padded = torch.nn.functional.pad(logits, (0, rows * tp - vocab_size), value=beyond)

    def work(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
        head = VocabHead(torch.zeros(rows, 1), vocab_size, ctx.tp, cap=cap, factor=factor)
        part = padded.unflatten(1, (tp, rows))[:, ctx.tp.rank]
        if cp > 1:
            head, part = head.over_cp(CpSplit.of(ctx)), part.unflatten(1, (cp, -1))[:, ctx.cp.rank]
        return head.likeliest(part), head.gathered(part).argmax(-1)

    found, wanted = zip(*on_gang(Split(tp=tp, cp=cp), work), strict=True)
    return list(found), list(wanted)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3)])
def test_of_equal_logits_the_first_token_wins_wherever_parts_end(tp: int, cp: int) -> None:
    logits = torch.full((24 * 24, 24), -3.0)
    pairs = torch.cartesian_prod(torch.arange(24), torch.arange(24))
    for token in pairs.T:
        logits[torch.arange(len(pairs)), token] = -1.0  # below the zeros of rows that are no tokens
    for found in likeliest(logits, tp=tp, cp=cp)[0]:
        assert torch.equal(found, pairs.amin(1))


@given(
    tp=st.integers(1, 5),
    cp=st.integers(1, 2),
    vocab_size=st.integers(1, 23),
    num_rows=st.integers(0, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    adjusted=st.sampled_from([{}, {"cap": 3.0}, {"factor": 0.3}, {"cap": 0.01, "factor": 7.0}]),
    beyond=st.sampled_from([0.0, 1e4, torch.inf, torch.nan]),
    seed=st.integers(0, 999),
)
def test_tokens_are_those_of_all_logits(
    tp: int,
    cp: int,
    vocab_size: int,
    num_rows: int,
    dtype: torch.dtype,
    adjusted: Mapping[str, float],
    beyond: float,
    seed: int,
) -> None:
    """Many logits are equal, and a small cap makes more of them so. Ranks may have no tokens at all."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (num_rows, vocab_size), generator=generator).to(dtype) * 0.37
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
    found, wanted = likeliest(logits, tp=tp, cp=cp, beyond=beyond, **adjusted)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == torch.int64 and torch.equal(mine, right)


def test_all_ranks_take_the_same_token_of_the_vocabulary_when_there_are_no_numbers() -> None:
    found, _ = likeliest(torch.full((3, 5), torch.nan), tp=4, beyond=torch.nan)
    assert all(torch.equal(tokens, found[0]) and bool((tokens < 5).all()) for tokens in found)


# --- steps ------------------------------------------------------------------------------------------------------------


class Unrecorded:
    """Graphs of decode steps whose function is run instead, with rows behind those of the step."""

    def __init__(self, rank: Rank) -> None:
        self.has_all_tokens = rank.decode_model is not None
        self._rank, self._forward = rank, stage_layers(rank.decode_model or rank.model, widths=(), is_last=True)
        self._batch = DecodeBatch(8, rank.pool, rank.ctx, has_all_tokens=self.has_all_tokens)

    @property
    def slots(self) -> Tensor:
        return self._batch.slots[: self._batch.num_local]

    def can_run(self, plan: StepPlan) -> bool:
        return all(row.num_tokens == 1 and row.output_position >= 0 and not row.targets for row in plan.rows)

    def prepare(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        self._batch.fill(plan, tables)

    @property
    def num_rows(self) -> int:
        return self._batch.num_local

    def replay(self, *, hidden: Tensor | None) -> tuple[Tensor, ...]:
        inputs = self._batch.inputs
        if self._rank.last is not None:
            inputs.ids.copy_(self._rank.last.filled(inputs.ids, self._batch.slots))
        run = ForwardPass(TorchStep(inputs, expanded_bytes=0), self._rank.pool, inputs.positions)
        return tuple(part[: self._batch.num_local] for part in self._forward(inputs.ids, None, run))


def packed(ids: Sequence[int] | NDArray[np.int64]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def row(slot: int, start: int, count: int, **more: Any) -> Row:
    return Row(slot, start, packed(IDS[slot, start : start + count]), **{"output_position": start, **more})


def plans(*sampling: SamplingParams) -> list[StepPlan]:
    """Prompts, one of them unfinished; then decode steps, the last ones from tokens on the device."""
    admits = [Admit(slot, {FULL: [3 * slot + page for page in range(3)]}, one, 7) for slot, one in enumerate(sampling)]
    firsts = [row(0, 0, 20), row(1, 0, 23, output_position=-1), row(2, 0, 26)]
    fed = [Row(slot, start, UNKNOWN, output_position=start, is_fed=True) for slot, start in ((0, 22), (1, 28))]
    return [
        StepPlan(1, firsts, admits),
        StepPlan(2, [row(1, 23, 4), row(0, 20, 1)]),
        StepPlan(3, [row(0, 21, 1), row(1, 27, 1), row(2, 26, 1)]),
        StepPlan(4, fed),
        StepPlan(5, [row(2, 27, 1), row(1, 29, 3, num_drafts=2)]),
    ]


@contextmanager
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes that members of groups give to be gathered."""
    shapes, lock, gather = list[tuple[int, ...]](), threading.Lock(), ThreadGroup.all_gather

    def noted(group: ThreadGroup, tensor: Tensor) -> Tensor:
        with lock:
            shapes.append(tuple(tensor.shape))
        return gather(group, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(ThreadGroup, "all_gather", noted)
        yield shapes


def ran(
    model_dir: Path,
    steps: Sequence[StepPlan],
    *,
    split: Split,
    needs_logits: bool = False,
    is_recorded: bool = False,
    splits_decode: bool = False,
) -> list[list[list[int]]]:
    """Tokens of every row of each step; tp ranks must agree."""

    def work(ctx: ParallelContext) -> list[NDArray[np.int64]]:
        rank = new_rank(model_dir, ctx)
        rank.last = LastTokens(len(IDS), ctx)
        if splits_decode:
            rank.decode_model = rank.model.over_cp(CpSplit.of(ctx))
        if is_recorded:
            rank.graphs = Unrecorded(rank)  # type: ignore[assignment]
        return [rank.finish(rank.launch(plan, needs_logits=needs_logits)).wait().copy() for plan in steps]

    by_rank = on_gang(split, work)
    for number, found in enumerate(by_rank):
        first = by_rank[split.rank(replace(split.coords(number), tp=0))]
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, first, strict=True))
    of_cp = [by_rank[split.rank(replace(split.coords(0), cp=cp))] for cp in range(split.cp)]
    return [
        [result.tokens for result in read_results(plan, [found[i] for found in of_cp])] for i, plan in enumerate(steps)
    ]


WAYS: list[Any] = [
    (Split(), False, False),
    (Split(tp=2), False, False),
    (Split(tp=2), True, False),
    (Split(tp=4), True, False),
    (Split(tp=2, cp=2), False, False),
    (Split(tp=2, cp=2), True, False),
    (Split(tp=2, cp=2), False, True),
    (Split(tp=2, cp=2), True, True),
]


@pytest.mark.parametrize(("split", "is_recorded", "splits_decode"), WAYS, ids=str)
@pytest.mark.parametrize("sampling", [(GREEDY, GREEDY, GREEDY), (GREEDY, SAMPLED, GREEDY)], ids=["greedy", "mixed"])
def test_steps_give_the_tokens_that_all_logits_give(
    tiny: Callable[[str], Path],
    sampling: tuple[SamplingParams, ...],
    split: Split,
    is_recorded: bool,
    splits_decode: bool,
) -> None:
    steps, model_dir = plans(*sampling), tiny("llama")
    wanted = ran(model_dir, steps, split=Split(), needs_logits=True)
    found = ran(model_dir, steps, split=split, is_recorded=is_recorded, splits_decode=splits_decode)
    assert found == wanted
    assert [list(map(len, tokens)) for tokens in found] == [[1, 0, 1], [1, 1], [1, 1, 1], [1, 1], [1, 3]]
    greedy = ran(model_dir, plans(GREEDY, GREEDY, GREEDY), split=Split(), needs_logits=True)
    assert (found == greedy) == (SAMPLED not in sampling)


@pytest.mark.parametrize(("split", "is_recorded", "splits_decode"), WAYS[1:], ids=str)
def test_only_steps_that_sample_gather_logits(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, split: Split, is_recorded: bool, splits_decode: bool
) -> None:
    share = -(-515 // split.tp)
    model_dir, wide = tiny("llama"), {share, share // split.cp}
    greedy, biased = plans(GREEDY, GREEDY, GREEDY), replace(GREEDY, logit_bias={3: 1.0})
    for steps, num_wide in (
        (greedy, 0),
        (plans(GREEDY, SAMPLED, GREEDY), 5),  # the sampled request is in each of them
        ([*greedy[:2], replace(greedy[2], num_top=0)], 1),
        (plans(biased, GREEDY, GREEDY)[:3], 3),
    ):
        with gathered(monkeypatch) as shapes:
            ran(model_dir, steps, split=split, is_recorded=is_recorded, splits_decode=splits_decode)
        pairs = [shape[1:] == (BEST_PARTS, 2) for shape in shapes]
        assert sum(shape[-1] in wide for shape in shapes) == num_wide * split.world_size
        assert sum(pairs) == (len(steps) - num_wide) * split.world_size


def test_logits_are_there_for_those_who_ask(tiny: Callable[[str], Path]) -> None:
    rank = new_rank(tiny("llama"), ParallelContext.single(torch.device("cpu")))
    first, second = plans(GREEDY, GREEDY, GREEDY)[:2]
    logits = rank.forward(first)
    assert logits is not None and logits.shape == (2, 515)
    layers = rank.launch(second)
    assert layers.logits is None and layers.likeliest is not None and len(layers.likeliest) == 2
