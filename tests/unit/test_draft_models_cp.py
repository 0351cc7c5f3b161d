"""Models that draft under cp with weights split over it: steps of one rank, run again by ranks as threads.

Steps are those of a service with cp=1, among them rows that take their token from the device, rows of which only some
draft, and prompts beside them. What CUDA graphs record is run at each replay, with the batches that they read.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention.torch_ref import TorchBackend
from raycache.config import Config
from raycache.decider.drafts import AcceptanceRate, DraftStep
from raycache.deployment.deployment import deploy
from raycache.gang.executors import LocalExecutor
from raycache.parallel.board import AckBoard
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank import build
from raycache.rank.decode_batch import DecodeBatch
from raycache.rank.graphs import DecodeGraphs, _Recorded
from raycache.rank.last_tokens import LastTokens
from raycache.rank.member import Member, RankSpec
from raycache.rank.pending_result import Pending
from raycache.rank.rank import LaunchedLayers, Rank
from raycache.step.inputs import StepInputs
from raycache.wire.plan import StepPlan
from raycache.wire.results import RowResult, read_results
from tests.oracle.gang import on_gang
from tests.oracle.recorded import OperationRecorder
from tests.selection import mostly_long
from tests.unit.test_cp_split import StaticStep
from tests.unit.test_draft_models import GREEDY, NUM_DRAFTS, PAGE_SIZE, PAIRS, PROMPTS, SAMPLED, SOME, open_llm

SETTINGS: dict[str, Any] = {"max_step_tokens": 40, "max_running": 4, "num_pages": 48, "overlap": "on"}
SAMPLINGS = [GREEDY, SAMPLED, replace(GREEDY, max_tokens=25)]


def with_tokens(plan: StepPlan, last: LastTokens) -> StepPlan:
    """A plan whose rows begin where they should, with the tokens that the device has for them."""
    rows = []
    for row in plan.rows:
        tokens = [int(last.tokens[row.slot, -1 - i]) if i < 0 else i for i in np.frombuffer(row.tokens, np.int32)]
        rows.append(replace(row, tokens=np.array(tokens, np.int32).tobytes(), is_fed=False))
    return replace(plan, rows=rows)


@dataclass
class Service:
    """What a service with cp=1 has done on a CPU.

    Attributes:
        target: directory.
        draft: setting.
        steps: plans in order, and their results.
        known: the same plans as if they had been made one by one: no row is fed, and their tokens are known.
    """

    target: Path
    draft: str
    steps: list[tuple[StepPlan, list[RowResult]]] = field(default_factory=list)
    known: list[StepPlan] = field(default_factory=list)

    @classmethod
    def of(cls, target: Path, draft: str, monkeypatch: pytest.MonkeyPatch) -> Service:
        """Serve some prompts twice, greedy and sampled ones, of which now one wants drafts and now another."""
        service, drawn, finish = cls(target, draft), random.Random(5), Rank.finish
        submit, collect = LocalExecutor.submit, LocalExecutor.collect

        def submitted(executor: LocalExecutor, plan: StepPlan) -> None:
            submit(executor, plan)
            service.steps.append((plan, []))

        def collected(executor: LocalExecutor, plan: StepPlan) -> list[RowResult]:
            results = collect(executor, plan)
            next(found for other, found in service.steps if other is plan).extend(results)
            return results

        def finished(rank: Rank, layers: LaunchedLayers, *rest: Any) -> Pending:
            assert rank.last is not None
            service.known.append(with_tokens(layers.plan, rank.last))
            return finish(rank, layers, *rest)

        def wanted(step: DraftStep, rate: AcceptanceRate) -> int:
            return NUM_DRAFTS if drawn.random() < 0.6 else 0

        with monkeypatch.context() as patched:
            patched.setattr(DraftStep, "wanted", wanted)
            patched.setattr(Rank, "finish", finished)
            patched.setattr(LocalExecutor, "submit", submitted)
            patched.setattr(LocalExecutor, "collect", collected)
            with open_llm(target, draft=draft, device="cpu", **SETTINGS) as llm:
                for _ in range(2):
                    llm.generate(PROMPTS, SAMPLINGS)
                assert llm.stats().cached_tokens > 0
        return service

    @property
    def kinds(self) -> Counter[str]:
        """How many steps have rows of some kinds."""
        found = Counter[str]()
        for plan, results in self.steps:
            rows = plan.rows
            found["fed"] += any(row.is_fed for row in rows)
            found["fed with drafts"] += any(row.is_fed and row.num_drafts for row in rows)
            found["checked"] += any(row.num_drafts for row in rows)
            found["some draft"] += 0 < sum(row.num_next_drafts > 0 for row in rows) < len(rows)
            found["beside prompts"] += len({row.num_tokens - row.num_drafts > 1 for row in rows}) == 2
            found["drafts"] += any(result.next_drafts for result in results)
        return found


class Recordable(TorchBackend):
    """Says that it can be recorded."""

    capabilities = replace(TorchBackend.capabilities, can_capture=True)


class Unplanned:
    """A step whose attention is planned when it runs."""

    def replan(self, inputs: StepInputs) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class Rerun:
    """Runs a function at each replay, and puts what it gives where it was at first."""

    run: Callable[[], tuple[Tensor, ...]]
    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        for kept, found in zip(self.outputs, self.run(), strict=True):
            kept.copy_(found)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Graphs are run instead of recorded; how often each kind was."""
    counted, lock = Counter[str](), threading.Lock()

    def record(self: Any, size: int, recorder: object, target: Any) -> _Recorded:
        layers = self._layers
        if target is None:
            batch = DecodeBatch(size, self._pool, self.ctx, longest=layers.longest, has_all_tokens=self.has_all_tokens)
        else:
            batch = target._recorded[size].batch
        hidden = layers.hidden
        if hidden is not None:
            hidden = hidden.new_full((len(batch.inputs.ids), hidden.shape[1]), torch.nan)

        def run() -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = self._run(
                self._layers.forward, batch, StaticStep(batch.inputs, expanded_bytes=0), hidden
            )
            return found

        outputs = run()
        step: Any = Unplanned()
        return _Recorded(batch, step, hidden, Rerun(run, outputs).replay, outputs)

    def replay(self: DecodeGraphs, **given: Any) -> tuple[Tensor, ...]:
        with lock:
            kind = "target" if len(self._layers.records) or self._last is not None else "draft"
            counted[kind] += 1
        return plain(self, **given)

    plain = DecodeGraphs.replay
    monkeypatch.setattr(build, "CudaRecorder", lambda device: OperationRecorder())
    monkeypatch.setattr(DecodeGraphs, "_record", record)
    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    monkeypatch.setattr(build.LoadedRank, "_record_pieces", lambda self, pool, **sizes: None)
    yield counted


def results_of(service: Service, split: Split, *, is_recorded: bool) -> list[list[RowResult]]:
    """What a gang gives for the same steps; its tp ranks must give the same."""
    config = Config(
        model=str(service.target),
        draft=service.draft,
        draft_tokens=NUM_DRAFTS,
        page_size=PAGE_SIZE,
        device="cpu",
        decode_split="on",
        tp=split.tp,
        cp=split.cp,
        **SETTINGS,
    )
    deployment = deploy(config, device_type="cpu")
    board = AckBoard.create(split.world_size)
    board.unlink()

    def work(ctx: ParallelContext) -> list[np.ndarray[Any, Any]]:
        spec = RankSpec(rank=ctx.rank, host="127.0.0.1", device="cpu", ranks_on_node=split.world_size)
        loaded = build.load(deployment, Member(spec, ctx, board))
        if is_recorded:
            loaded = replace(loaded, backend=Recordable())
        rank = loaded.build(config.num_pages, warms_up=False)  # type: ignore[arg-type]
        assert (rank.graphs is not None) == is_recorded and rank.decode_model is not None
        return [rank.execute(plan).copy() for plan, _ in service.steps]

    by_rank = on_gang(split, work)
    for number, found in enumerate(by_rank):
        first = by_rank[split.rank(replace(split.coords(number), tp=0))]
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found, first, strict=True))
    of_cp = [by_rank[split.rank(replace(split.coords(0), cp=cp))] for cp in range(split.cp)]
    return [read_results(plan, [found[i] for found in of_cp]) for i, (plan, _) in enumerate(service.steps)]


def check_results(service: Service, found: list[list[RowResult]]) -> None:
    for (plan, wanted), results in zip(service.steps, found, strict=True):
        assert [(one.tokens, one.next_drafts) for one in results] == [
            (one.tokens, one.next_drafts) for one in wanted
        ], plan


def check(service: Service, found: list[list[RowResult]]) -> None:
    check_results(service, found)
    assert (
        min(
            service.kinds[kind]
            for kind in ("fed", "fed with drafts", "checked", "some draft", "beside prompts", "drafts")
        )
        > 0
    )


OFTEN = ["llama by nemotron_h", "eagle3 of llama"]
RECORDED = [*OFTEN, "small", "nemotron_h by llama", "eagle of qwen3_next", "mtp of deepseek_v3"]
"""Without windows and indexers, for which the torch backend reads positions that a recorded batch does not have."""


@pytest.mark.parametrize("name", mostly_long(SOME, but=OFTEN))
@pytest.mark.parametrize("split", [Split(cp=2), pytest.param(Split(tp=2, cp=2), marks=pytest.mark.long)], ids=str)
def test_tokens_and_drafts_are_those_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, split: Split
) -> None:
    pair = PAIRS[name](tmp_path)
    service = Service.of(pair.target, pair.draft, monkeypatch)
    check(service, results_of(service, split, is_recorded=False))


@pytest.mark.parametrize("name", mostly_long(RECORDED, but=OFTEN))
@pytest.mark.parametrize("split", [Split(cp=2), pytest.param(Split(tp=2, cp=2), marks=pytest.mark.long)], ids=str)
def test_recorded_steps_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: Counter[str], name: str, split: Split
) -> None:
    pair = PAIRS[name](tmp_path)
    service = Service.of(pair.target, pair.draft, monkeypatch)
    check(service, results_of(service, split, is_recorded=True))
    assert replays["target"] > 20 and replays["draft"] > replays["target"]


def test_a_row_that_emits_nothing_makes_no_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one token of a prompt, beside rows that generate: there is room for no more in the step."""
    monkeypatch.setitem(SETTINGS, "max_step_tokens", 3)
    monkeypatch.setitem(SETTINGS, "max_running", 3)
    pair = PAIRS["eagle3 of llama"](tmp_path)
    service = Service.of(pair.target, pair.draft, monkeypatch)
    rows = [plan.rows for plan, _ in service.steps if all(row.num_tokens == 1 for row in plan.rows)]
    assert any(len({row.output_position < 0 for row in some}) == 2 for some in rows)
    found = results_of(service, Split(cp=2), is_recorded=False)
    check_results(service, found)
