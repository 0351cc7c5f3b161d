"""Decode steps that are replayed, against the same steps launched, with a recorder that needs no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention.torch_ref import TorchBackend
from raycache.checkpoint.config_file import DraftConfig, DraftKind
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.memory.component import FULL, STATE
from raycache.memory.device import DevicePool
from raycache.models.base import for_warm_up, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.build import LoadedRank, load
from raycache.rank.graphs import DecodeGraphs, GraphLayers, Layers, stage_layers
from raycache.rank.member import alone
from raycache.rank.rank import Rank
from raycache.rank.short_steps import ShortGraphs
from raycache.rank.stage_link import received_widths
from raycache.step.inputs import StepInputs, step_inputs
from raycache.step.page_tables import PageTables
from raycache.step.single_rows import in_single_rows
from raycache.step.single_rows import is_decode as may_take_all_tokens
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan
from tests.oracle.draft_models import make_eagle3
from tests.oracle.families import make_family
from tests.oracle.half import Script, draw_sequences
from tests.oracle.recorded import Link, OperationRecorder, StaticBackend, new_rank, new_stages

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {  # without experts: on a CPU, which of them run depends on tokens
    "llama": {},
    "gemma3": {},  # windows
    "qwen3_5": {},  # gated delta net
    "falcon_h1": {},  # Mamba2 beside attention
    "kimi_linear": {"first_k_dense_replace": 9},  # KDA, latents
}
SIZES = (1, 2, 4, 8)
GREEDY = SamplingParams(temperature=0.0)

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else make_family(root / name, name, **FAMILIES[name])

    return make


def record(rank: Rank, *, sizes: Sequence[int] = SIZES, longest: int = 1) -> None:
    """Let a rank replay its decode steps."""
    widths = received_widths(rank.config, rank.ctx)
    layers = GraphLayers(
        stage_layers(rank.model, widths=widths, is_last=rank.ctx.is_last_stage),
        rank.pool,
        records=() if rank.config.draft is None else rank.config.draft.recorded,
        hidden=torch.empty(0, sum(widths)) if widths else None,
        has_states=STATE in rank.pool.sizes,
        longest=longest,
        trial=stage_layers(for_warm_up(rank.model, rank.ctx), widths=widths, is_last=rank.ctx.is_last_stage),
    )
    backend = StaticBackend()
    rank.graphs = DecodeGraphs(
        layers, sizes=sizes, pool=rank.pool, backend=backend, ctx=rank.ctx, recorder=OperationRecorder()
    )


def script(rank: Rank) -> list[StepPlan]:
    return Script(draw_sequences(rank.config.vocab_size), rank.pool.windows, rank.pool.sizes).plans()


def is_decode(plan: StepPlan) -> bool:
    return all(row.num_tokens == 1 for row in plan.rows)


def assert_close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert wanted is not None
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_launched_steps(tiny: Make, family: str) -> None:
    launched, recorded = (new_rank(tiny(family), ParallelContext.single(CPU)) for _ in range(2))
    record(recorded)
    assert recorded.graphs is not None
    for plan in script(launched)[:24]:
        assert recorded.graphs.can_run(plan) == is_decode(plan)
        assert_close(recorded.forward(plan), launched.forward(plan))


def test_each_size_is_tried_with_other_layers_and_recorded(tiny: Make) -> None:
    rank, ran = new_rank(tiny("llama"), ParallelContext.single(CPU)), list[str]()
    whole = stage_layers(rank.model, widths=(), is_last=True)

    def noting(name: str) -> Layers:
        return lambda ids, hidden, run: (ran.append(f"{name} {len(ids)}"), whole(ids, hidden, run))[1]

    layers = GraphLayers(noting("recorded"), rank.pool, trial=noting("tried"))
    recorder = OperationRecorder()
    DecodeGraphs(layers, sizes=(1, 4), pool=rank.pool, backend=StaticBackend(), ctx=rank.ctx, recorder=recorder)
    assert ran == ["tried 4", "recorded 4", "tried 1", "recorded 1"]


@pytest.mark.parametrize(("has_split", "sizes"), [(False, [2, 4, 6]), (True, [1, 2, 4, 8, 10])])
def test_a_batch_has_any_number_of_rows_where_every_cp_rank_computes_all(has_split: bool, sizes: list[int]) -> None:
    rank = SimpleNamespace(
        deployment=SimpleNamespace(config=SimpleNamespace(max_running=5, most_drafts=1)),
        member=SimpleNamespace(ctx=SimpleNamespace(cp=Group(rank=0, size=2))),
        draft=None,
        _decode_model=object() if has_split else None,
    )
    assert LoadedRank._graph_sizes.fget(rank) == (sizes, [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_replay_their_layers(tiny: Make, family: str) -> None:
    alone = new_rank(tiny(family), ParallelContext.single(CPU))
    first, last = new_stages(tiny(family), (alone.config.num_layers - 2, 2))
    record(first)
    record(last)
    plans = script(alone)[:24]
    for one, other in zip(plans[::2], plans[1::2], strict=True):  # the first stage is a step ahead
        assert first.forward(one) is None and first.forward(other) is None
        for plan in (one, other):
            assert_close(last.forward(plan), alone.forward(plan))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_short_steps_are_replayed_whatever_their_rows(tiny: Make, family: str, num_stages: int) -> None:
    alone = new_rank(tiny(family), ParallelContext.single(CPU))
    layers = alone.config.num_layers
    stages = new_stages(tiny(family), (layers,) if num_stages == 1 else (layers - 2, 2))
    for stage in stages:
        record_short_steps(stage, sizes=(4, 64, 320))
    window = max(alone.pool.windows.values())
    num_replayed = 0
    for plan in script(alone):
        for short in (stage.short_steps for stage in stages):
            assert short is not None
            longest = max(row.num_tokens for row in plan.rows)
            fits = sum(row.num_tokens for row in plan.rows) <= 320 and (not window or longest < window)
            assert short.can_run(plan) == fits
        num_replayed += fits and not is_decode(plan)
        *_, found = [stage.forward(plan) for stage in stages]
        assert_close(found, alone.forward(plan))
    assert num_replayed >= (1 if window else 5)


def record_short_steps(rank: Rank, *, sizes: Sequence[int]) -> None:
    """Let a rank replay its short steps."""
    widths = received_widths(rank.config, rank.ctx)
    layers = GraphLayers(
        stage_layers(rank.model, widths=widths, is_last=rank.ctx.is_last_stage),
        rank.pool,
        hidden=torch.empty(0, sum(widths)) if widths else None,
    )
    recorder, backend = OperationRecorder(), StaticBackend()
    rank.short_steps = ShortGraphs(
        layers, sizes=sizes, pool=rank.pool, backend=backend, ctx=rank.ctx, recorder=recorder
    )


@pytest.mark.parametrize("recorded", [(0, 1, 2), (0,), (1,), (2,), (0, 2)], ids=str)
def test_stages_pass_on_what_a_draft_model_takes(tiny: Make, recorded: tuple[int, ...]) -> None:
    """Whichever of three stages are recorded; rows with drafts are rows of one token each to them."""
    draft = DraftConfig(DraftKind.HEAD, read_config(tiny("llama")), Path(), recorded=(0, 2, 3))
    alone, *stages = (
        replace(rank, config=replace(rank.config, draft=draft))
        for rank in (new_rank(tiny("llama"), ParallelContext.single(CPU)), *new_stages(tiny("llama"), (1, 2, 1)))
    )
    for number in recorded:
        record(stages[number], longest=3)
    for plan in map(with_drafts, script(alone)[:14]):
        *others, found = [stage.launch(plan, needs_logits=True) for stage in stages]
        wanted = alone.launch(plan, needs_logits=True)
        assert all(one.is_empty for one in others)
        assert_close(found.logits, wanted.logits)
        assert wanted.features is not None and wanted.features.shape[1] == 3 * alone.config.hidden_size
        assert_close(found.features, wanted.features)


def with_drafts(plan: StepPlan) -> StepPlan:
    """The plan, with two draft tokens behind each row of a decode step whose page has room for them."""
    if not is_decode(plan):
        return plan
    drafts = np.array([7, 9], np.int32).tobytes()

    def checked(row: Row) -> Row:
        has_room = row.start % 16 < 14
        return replace(row, tokens=row.tokens + drafts, num_drafts=2) if has_room else row

    return replace(plan, rows=[checked(row) for row in plan.rows])


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_draft_model_follows_the_replays_of_the_last_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("raycache.rank.build.CudaRecorder", lambda device: OperationRecorder())
    model = draft = make_family(tmp_path / "model", "llama")
    if kind == "eagle3":
        draft = make_eagle3(tmp_path / "head", model, draft_vocab=200, has_embedding=True, outputs=(0, 1, 2))
    settings = {"model": str(model), "draft": str(draft), "draft_tokens": 2}
    (launched,), (first, last) = built(settings | {"cuda_graphs": False}), built(settings | {"pp": 2})
    assert first.graphs is not None and last.graphs is not None and launched.graphs is None
    assert last.drafter is not None and last.drafter.graphs is not None
    for number, plan in enumerate(drafting_plans()):
        assert first.graphs.can_run(plan) == last.graphs.can_run(plan) == (number > 0)
        assert not len(first.execute(plan))
        found = last.execute(plan)
        assert (found == launched.execute(plan)).all()
        assert len(found) == sum(row.num_drafts + 1 + row.num_next_drafts for row in plan.rows)


def built(settings: dict[str, Any]) -> list[Rank]:
    """Ranks of all stages, as a service has them."""
    limits = {"page_size": 16, "num_pages": 40, "max_running": 4, "max_step_tokens": 64, "max_model_len": 256}
    deployment = deploy(Config(**limits, **settings), device_type="cpu")
    split = deployment.config.split
    sent = [list[Tensor]() for _ in range(split.pp - 1)]
    contexts = (ParallelContext(split, rank, CPU, pp=Link(rank=rank, sent=sent)) for rank in range(split.pp))
    return [replace(load(deployment, replace(alone(), ctx=ctx)), backend=StaticBackend()).build(40) for ctx in contexts]


def drafting_plans() -> list[StepPlan]:
    """Three prompts, then steps in which some of them check draft tokens; all draft tokens for the next step."""
    tokens = np.random.default_rng(0).integers(3, 200, (3, 64)).astype(np.int32)
    ends, plans = [0, 0, 0], list[StepPlan]()
    for step, counts in enumerate([(17, 5, 9), (1, 1, 1), (3, 1, 2), (1, 3), (2,), (3, 3, 1), (1, 1)]):
        rows = [
            Row(
                slot,
                start=ends[slot],
                tokens=tokens[slot, ends[slot] : ends[slot] + count].tobytes(),
                output_position=0,
                num_drafts=count - 1 if step else 0,
                num_next_drafts=2,
            )
            for slot, count in enumerate(counts)
        ]
        for slot, count in enumerate(counts):
            ends[slot] += count
        admits = [Admit(row.slot, {FULL: range(4 * row.slot, 4 * row.slot + 4)}, GREEDY, seed=0) for row in rows]
        plans.append(StepPlan(step, rows, admits=[] if step else admits))
    return plans


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_padding_of_a_later_stage_keeps_nothing_of_earlier_steps(tiny: Make, family: str) -> None:
    """Their rows may be no numbers, if pages could not be loaded; padding writes to the scratch units."""
    stages = new_stages(tiny(family), (2, 2))
    for stage in stages:
        record(stage, sizes=(6,))
        for name in stage.pool.components:
            for rows in stage.pool.rows(name).values():
                rows.zero_()
    plans = script(stages[0])
    wide = next(plan for plan in plans if is_decode(plan) and len(plan.rows) == 6)
    narrow = replace(wide, rows=[replace(row, new_pages={}) for row in wide.rows[:1]], admits=[])
    for plan in (*plans[: plans.index(wide) + 1], narrow):
        stages[0].forward(plan)
    sent = stages[1].ctx.pp.sent[0]
    sent[-2] = torch.full_like(sent[-2], torch.nan)
    for plan in plans[: plans.index(wide)]:
        stages[1].forward(plan)
    found = stages[1].forward(wide)
    assert found is not None and found.isnan().all()
    stages[1].forward(narrow)
    for name in stages[1].pool.components:
        for field, rows in stages[1].pool.rows(name).items():
            assert rows[:, -1].isfinite().all(), f"{name} {field}"


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize(("cp", "has_all_tokens"), [(1, False), (2, False), (2, True)])
@torch.inference_mode()
def test_stages_without_graphs_give_the_same_rows_to_each_rank(has_states: bool, cp: int, has_all_tokens: bool) -> None:
    """What is sent between stages has a row per token of the rank, however each of them runs the step."""
    for rank in range(cp):
        split, pp = Split(pp=2, cp=cp, stages=(1, 1)), Group(rank=0, size=2)
        ctx = ParallelContext(split, rank, CPU, cp=Group(rank=rank, size=cp), pp=pp)
        pool = DevicePool([], num_layers=2, sizes={FULL: 9}, page_size=8, ctx=ctx, has_scratch=True)
        layers = GraphLayers(
            lambda ids, hidden, run: (ids,), pool, has_all_tokens=has_all_tokens, has_states=has_states, longest=3
        )
        graphs = DecodeGraphs(
            layers, sizes=[8], pool=pool, backend=NoAttention(), ctx=ctx, recorder=OperationRecorder()
        )
        tables = {FULL: PageTables()}
        for slot in range(4):
            tables[FULL].begin(slot, [slot])
        num_run = 0
        for counts in itertools.product((1, 3), repeat=3):
            plan = StepPlan(1, [decode_row(slot, count) for slot, count in enumerate(counts)])
            if not graphs.can_run(plan):
                continue
            graphs.prepare(plan, tables)
            takes_all = has_all_tokens and may_take_all_tokens(plan, has_states=has_states)
            launched = step_inputs(
                in_single_rows(plan) if takes_all else plan,
                tables,
                pool.windows,
                page_size=8,
                ctx=ctx,
                has_all_tokens=takes_all,
            )
            assert torch.equal(graphs.replay()[0], launched.ids)
            num_run += 1
        takes_drafts = cp == 1 or (has_all_tokens and not has_states)
        assert num_run == (7 if takes_drafts else 1)  # all but one of 9 tokens


class NoAttention(TorchBackend):
    """Plans nothing."""

    def plan_static(self, inputs: StepInputs) -> NoAttention:
        return self

    def replan(self, inputs: StepInputs) -> None:
        pass


def decode_row(slot: int, num_tokens: int) -> Row:
    tokens = np.arange(10 * slot, 10 * slot + num_tokens, dtype=np.int32).tobytes()
    return Row(
        slot,
        start=2,
        tokens=tokens,
        output_position=0,
        read_state=0,
        write_state=0,
        num_drafts=num_tokens - 1,
        draft_states=(0,) * (num_tokens - 1),
    )
