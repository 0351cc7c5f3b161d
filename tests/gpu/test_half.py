"""The families in bfloat16 with the fast kernels and recorded decode steps, against the same weights in float32.

Right is what the torch backend computes in float32 with the same plans, which other tests compare with transformers. A
position's error is the norm of the difference of its logits over the norm of what is right. bfloat16 rounds by 0.2 %,
some ten times per layer; a router or an indexer that has to choose between two that are nearly alike may choose the
other one, which a few positions show. So there are two bounds: for the median of a sequence, and for every position.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from raycache import LLM, SamplingParams
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.memory.component import CacheFormat
from raycache.models.base import components
from raycache.parallel.context import ParallelContext
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.rank.rank import Rank
from raycache.types import CacheAction, CacheCommand
from raycache.wire.plan import StepPlan
from tests.oracle import tiny_tokenizers
from tests.oracle.families import FAMILIES
from tests.oracle.half import (
    LENGTHS,
    NUM_PAGES,
    PAGE_SIZE,
    SETTINGS,
    SHARED,
    STATES,
    WINDOW,
    Script,
    draw_sequences,
    make_half,
)
from tests.oracle.recorded import Link

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TYPICAL, WORST = 0.025, 0.2
RIGHT = {"dtype": "float32", "attention": "torch", "cuda_graphs": False}
FAST = {"dtype": "bfloat16", "attention": "flashinfer"}

LAG_CYCLES = 40_000_000
"""About 20 ms, much more than launching a step takes."""

Rows = dict[tuple[str, str], Tensor]
"""(component, field) -> rows [L, units, ...] in float32."""


@dataclass(frozen=True)
class Found:
    """What a rank made of the script.

    Attributes:
        logits: per sequence [T, V] float32, of the positions that were computed.
        rows: of the cache, at the end.
        num_replayed: steps that were replays of recorded ones.
    """

    logits: list[Tensor]
    rows: Rows
    num_replayed: int


@dataclass(frozen=True)
class Case:
    """A checkpoint and what is right.

    Attributes:
        model: its directory.
        plans: of the script.
        right: what they make.
        before: rows of the cache before it.
    """

    model: Path
    plans: list[StepPlan]
    right: Found
    before: Rows


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Case:
    """Of a family."""
    if FAMILIES[request.param].model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    model = make_half(tmp_path_factory.mktemp("half") / "model", request.param)
    rank = new_rank(model, RIGHT)
    before = fill(rank)
    plans = Script(draw_sequences(rank.config.vocab_size), rank.pool.windows, rank.pool.sizes).plans()
    return Case(model, plans, follow(rank, plans), before)


def settings(kind: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Of a service that is just large enough."""
    return {
        "device": DEVICE,
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "max_running": len(LENGTHS),
        "restore_points": STATES,
        "max_model_len": 512,
        "max_step_tokens": 512,
        **kind,
        **more,
    }


def new_rank(model: Path, kind: Mapping[str, Any]) -> Rank:
    """A rank as a service has it."""
    config = Config(model=str(model), **settings(kind))
    loaded = load(deploy(config, device_type=DEVICE), alone(device="cuda:0" if DEVICE == "cuda" else DEVICE))
    return loaded.build(loaded.measure())


def new_stages(model: Path, kind: Mapping[str, Any]) -> list[Rank]:
    """Ranks of two stages on one GPU, which are called in turn."""
    deployment = deploy(Config(model=str(model), **settings(kind, pp=2)), device_type=DEVICE)
    split, sent, stages = deployment.config.split, [list[Tensor]()], list[Rank]()
    for number in range(split.pp):
        member = alone(device="cuda:0" if DEVICE == "cuda" else DEVICE)
        ctx = ParallelContext(split, number, member.ctx.device, pp=Link(rank=number, sent=sent))
        loaded = load(deployment, replace(member, ctx=ctx))
        stages.append(loaded.build(loaded.measure()))
    assert not sent[0], "all stages run the same steps before they are ready"
    return stages


def fields(rank: Rank) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Rows [L, units, ...] of the pool, without what only padding uses."""
    fmt = CacheFormat(str(rank.dtype).removeprefix("torch."))
    for part in components(rank.config, fmt):
        for name, rows in rank.pool.rows(part.name).items():
            yield (part.name, name), rows[:, : rank.pool.sizes[part.space]]


def fill(rank: Rank) -> Rows:
    """Fill the pool with noise: whoever reads a row that was not written shows it."""
    generator = torch.Generator().manual_seed(0)
    noise = {key: torch.randn(rows.shape, generator=generator).bfloat16().float() for key, rows in fields(rank)}
    for key, rows in fields(rank):
        rows.copy_(noise[key])
    return noise


def fill_stages(stages: Sequence[Rank], noise: Rows) -> None:
    """Fill the pools of stages with the noise of a rank with all layers."""
    num_filled = Counter[tuple[str, str]]()
    for stage in stages:
        for key, rows in fields(stage):
            first = num_filled[key]
            rows.copy_(noise[key][first : first + len(rows)])
            num_filled[key] += len(rows)


def rows_of(stages: Sequence[Rank]) -> Rows:
    """Rows of all layers."""
    parts: dict[tuple[str, str], list[Tensor]] = {}
    for stage in stages:
        for key, rows in fields(stage):
            parts.setdefault(key, []).append(rows.float().cpu())
    return {key: torch.cat(of_stages) for key, of_stages in parts.items()}


def follow(rank: Rank, plans: Sequence[StepPlan], *, lag_cycles: int = 0, before: Sequence[Rank] = ()) -> Found:
    """Execute plans; each emits every position.

    Args:
        rank: of the last stage.
        lag_cycles: for which the device sleeps before each step, while further steps are launched.
        before: ranks of the stages before.
    """
    lines: list[list[Tensor]] = [[] for _ in LENGTHS]
    found, num_replayed = list[Tensor](), 0
    stages = (*before, rank)
    for plan in plans:
        num_replayed += all(stage.graphs is not None and stage.graphs.can_run(plan) for stage in stages)
        if lag_cycles:
            torch.cuda._sleep(lag_cycles)
        for stage in before:
            stage.forward(plan)
        logits = rank.forward(plan)
        assert logits is not None
        found.append(logits.float().clone() if lag_cycles else logits.float().cpu())
    for plan, logits in zip(plans, found, strict=True):
        for row, part in zip(plan.rows, logits.cpu().split([row.num_tokens for row in plan.rows]), strict=True):
            lines[row.slot].append(part)
    return Found([torch.cat(parts) for parts in lines], rows_of(stages), num_replayed)


def errors(found: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[float, float]:
    """(largest median of a sequence, largest of a position) of the relative errors; infinite where one is no number."""
    every = [
        ((one - other).norm(dim=1) / other.norm(dim=1)).nan_to_num(nan=torch.inf)
        for one, other in zip(found, right, strict=True)
    ]
    return max(float(some.median()) for some in every), max(float(some.max()) for some in every)


def is_right(found: Found, right: Found) -> bool:
    typical, worst = errors(found.logits, right.logits)
    print(f"median {typical:.4f}, worst {worst:.4f}, replayed {found.num_replayed}")
    return typical < TYPICAL and worst < WORST


def check_rows(found: Rows, case: Case) -> None:
    """What was written is right, all else is as it was."""
    for key, right in case.right.rows.items():
        units = [x.flatten(2) if x.dim() > 2 else x[..., None] for x in (found[key], right, case.before[key])]
        one, other, before = (x.flatten(0, 1) for x in units)
        is_written = (other != before).any(1)
        assert is_written.any(), key
        assert torch.equal(one[~is_written], before[~is_written]), f"{key}: rows of nobody were written"
        distances = (one - other).norm(dim=1)[is_written] / other.norm(dim=1)[is_written]
        print(f"{key}: median {float(distances.median()):.4f}, worst {float(distances.max()):.4f}")
        assert distances.median() < TYPICAL, key
        assert distances.max() < WORST, key


@pytest.mark.parametrize("case", list(SETTINGS), indirect=True)
def test_logits_and_cache_are_right_with_recorded_steps_and_without(case: Case) -> None:
    rank = new_rank(case.model, FAST)
    num_decodes = sum(all(row.num_tokens == 1 for row in plan.rows) for plan in case.plans)
    fill(rank)
    recorded = follow(rank, case.plans)
    assert recorded.num_replayed == num_decodes
    assert rank.pieces is not None
    rank.graphs = rank.short_steps = rank.pieces = None
    fill(rank)
    launched = follow(rank, case.plans)
    assert is_right(recorded, case.right) & is_right(launched, case.right)
    assert is_right(recorded, launched)
    check_rows(recorded.rows, case)
    check_rows(launched.rows, case)


@pytest.mark.parametrize("case", ["qwen3", "gpt_oss"], indirect=True)
def test_logits_and_cache_are_right_with_short_steps_recorded_as_a_whole(case: Case) -> None:
    rank = new_rank(case.model, FAST)
    rank.graphs = rank.pieces = None
    assert rank.short_steps is not None
    assert sum(map(rank.short_steps.can_run, case.plans)) > len(case.plans) - 4
    fill(rank)
    recorded = follow(rank, case.plans)
    assert is_right(recorded, case.right)
    check_rows(recorded.rows, case)


@pytest.mark.parametrize("case", list(SETTINGS), indirect=True)
def test_logits_and_cache_of_two_stages_are_right_with_recorded_steps(case: Case) -> None:
    first, last = new_stages(case.model, FAST)
    fill_stages((first, last), case.before)
    recorded = follow(last, case.plans, before=[first])
    assert recorded.num_replayed == sum(all(row.num_tokens == 1 for row in plan.rows) for plan in case.plans)
    first.graphs = None  # as if its layers could not be recorded
    fill_stages((first, last), case.before)
    half = follow(last, case.plans, before=[first])
    assert is_right(recorded, case.right) & is_right(half, case.right) & is_right(recorded, half)
    check_rows(recorded.rows, case)
    check_rows(half.rows, case)


@pytest.mark.parametrize("case", ["qwen3", "deepseek_v32", "nemotron_h"], indirect=True)
def test_stages_may_be_launched_before_the_device_has_begun_those_before(case: Case) -> None:
    first, last = new_stages(case.model, FAST)
    fill_stages((first, last), case.before)
    found = follow(last, case.plans, lag_cycles=LAG_CYCLES, before=[first])
    assert is_right(found, case.right)
    check_rows(found.rows, case)


@pytest.mark.parametrize("case", ["kimi_linear", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"], indirect=True)
def test_logits_of_latents_in_fp8_are_right_with_recorded_steps_and_without(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    rank = new_rank(case.model, {**RIGHT, "kv_dtype": "fp8"})
    fill(rank)
    right = follow(rank, case.plans)
    rank = new_rank(case.model, {**FAST, "kv_dtype": "fp8"})
    fill(rank)
    recorded = follow(rank, case.plans)
    assert recorded.num_replayed == sum(all(row.num_tokens == 1 for row in plan.rows) for plan in case.plans)
    rank.graphs = rank.short_steps = rank.pieces = None
    fill(rank)
    launched = follow(rank, case.plans)
    assert is_right(recorded, right) & is_right(launched, right) & is_right(recorded, launched)
    assert "attention: no kernel" not in caplog.text


@pytest.mark.parametrize("case", list(SETTINGS), indirect=True)
@pytest.mark.parametrize("is_recorded", [True, False])
def test_steps_may_be_launched_before_the_device_has_begun_those_before(case: Case, is_recorded: bool) -> None:
    rank = new_rank(case.model, FAST)
    if not is_recorded:
        rank.graphs = rank.short_steps = rank.pieces = None
    fill(rank)
    found = follow(rank, case.plans, lag_cycles=LAG_CYCLES)
    assert is_right(found, case.right)
    check_rows(found.rows, case)


# --- what the bounds notice -------------------------------------------------------------------------------------------


def narrower_window(model: Path, plans: list[StepPlan]) -> list[StepPlan]:
    """By less than a page."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW - 6}))
    return plans


def no_sinks(model: Path, plans: list[StepPlan]) -> list[StepPlan]:
    """Scores that nothing is left of."""
    for file in model.glob("*.safetensors"):
        weights = load_file(file)
        sinks = {key: torch.full_like(weight, -50) for key, weight in weights.items() if key.endswith(".sinks")}
        assert sinks
        save_file(weights | sinks, file, {"format": "pt"})
    return plans


def other_page(model: Path, plans: list[StepPlan]) -> list[StepPlan]:
    """One row goes on behind 9 of 10 right pages."""
    step, admit = next((i, admit) for i, plan in enumerate(plans) for admit in plan.admits if any(admit.pages.values()))
    pages = {space: [ids[0], *ids[:-1]] for space, ids in admit.pages.items()}
    admits = [replace(one, pages=pages) if one is admit else one for one in plans[step].admits]
    return [*plans[:step], replace(plans[step], admits=admits), *plans[step + 1 :]]


def stale_state(model: Path, plans: list[StepPlan]) -> list[StepPlan]:
    """Decode rows go on from the state that their sequence had a page earlier, while that is kept."""
    before: dict[int, int] = {}
    found, num_damaged = [], 0
    for plan in plans:
        rows = []
        for row in plan.rows:
            older = before.get(row.slot, -1)
            if row.write_state != row.read_state:
                before[row.slot] = row.read_state
            elif row.num_tokens == 1 and older >= 0 and row.start > SHARED:
                row, num_damaged = replace(row, read_state=older), num_damaged + 1
            rows.append(row)
        found.append(replace(plan, rows=rows))
    assert num_damaged > 0, "no row has an older state"
    return found


Damage = Callable[[Path, list[StepPlan]], list[StepPlan]]


@pytest.mark.parametrize(
    ("case", "damage"),
    [
        ("gpt_oss", narrower_window),
        ("gpt_oss", no_sinks),
        ("qwen3", other_page),
        ("deepseek_v32", other_page),
        ("kimi_linear", stale_state),
        ("nemotron_h", stale_state),
    ],
    indirect=["case"],
)
def test_the_bounds_notice_damage(case: Case, damage: Damage, tmp_path: Path) -> None:
    model = shutil.copytree(case.model, tmp_path / "model")
    plans = damage(model, case.plans)
    rank = new_rank(model, FAST)
    fill(rank)
    assert not is_right(follow(rank, plans), case.right)


# --- the whole engine -------------------------------------------------------------------------------------------------

TIE = 0.3
"""Difference of log-probabilities that rounding may hide. Logits spread by 1: a token drawn at random is about 3
below the best one."""

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


def check_scores(model: str, found: list[list[int]]) -> None:
    """The last tokens of each sequence are the likeliest behind those before."""
    with LLM(model, **settings(RIGHT)) as llm:
        for answer in llm.generate(found, SCORED):
            scores = [score for score in answer.prompt_logprobs[-GREEDY.max_tokens :] if score is not None]
            assert len(scores) == GREEDY.max_tokens
            assert max(score.top[0][1] - score.logprob for score in scores) < TIE


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v32", "nemotron_h"])
def test_greedy_tokens_of_two_stages_are_the_best_ones(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = str(tiny_tokenizers.byte_level(make_half(tmp_path / "model", name)))
    prompts = [tokens[:-8] for tokens in draw_sequences(515)]
    with LLM(model, **settings(FAST, pp=2)) as llm:
        answers = [*llm.generate(prompts, GREEDY), *llm.generate(prompts, GREEDY)]
        llm.check()
    check_scores(model, [[*one.prompt_token_ids, *one.token_ids] for one in answers])


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v32", "nemotron_h"])
def test_greedy_tokens_are_the_best_ones(name: str, tmp_path: Path) -> None:
    model = str(tiny_tokenizers.byte_level(make_half(tmp_path / "model", name)))
    prompts = [tokens[:-8] for tokens in draw_sequences(515)]
    found, alone = [], []
    for overlap, has_graphs in (("on", True), ("off", True), ("on", False)):
        with LLM(model, **settings(FAST, overlap=overlap, cuda_graphs=has_graphs)) as llm:
            cold, cached = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY)
            assert all(one.cached_tokens >= 64 for one in cached)
            found += [[*one.prompt_token_ids, *one.token_ids] for one in (*cold, *cached)]
            alone.append(llm.generate(prompts[:1], GREEDY)[0].token_ids)
            llm.check()
    check_scores(model, found)
    if name == "qwen3":  # the same kernels on the same rows; experts add up in any order
        assert alone[0] == alone[1], "planning ahead changes a token"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("decode_split", ["off", "on"])
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_greedy_tokens_of_what_indexers_select_under_cp_are_the_best_ones(
    name: str, decode_split: str, tmp_path: Path
) -> None:
    model = str(tiny_tokenizers.byte_level(make_half(tmp_path / "model", name)))
    prompts = [tokens[:-8] for tokens in draw_sequences(515)]
    with LLM(model, **settings(FAST, cp=2, decode_split=decode_split)) as llm:
        answers = llm.generate(prompts, GREEDY)
        llm.check()
    check_scores(model, [[*one.prompt_token_ids, *one.token_ids] for one in answers])


@pytest.mark.parametrize(
    "split",
    [
        {},
        {"tp": 2},
        {"pp": 2},
        {"cp": 2},
        {"cp": 2, "decode_split": "on"},
        {"pp": 2, "tp": 2},
        {"pp": 2, "cp": 2, "decode_split": "on"},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_steps_that_gather_logits(split: Mapping[str, Any], tmp_path: Path) -> None:
    num_gpus = math.prod(split.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if num_gpus > torch.cuda.device_count():
        pytest.skip(f"needs {num_gpus} GPUs")
    model = str(tiny_tokenizers.byte_level(make_half(tmp_path / "model", "qwen3")))
    with LLM(model, **settings(FAST, **split)) as llm:
        for prompt in draw_sequences(515)[:3]:
            found = []
            for logprobs in (None, 0):
                found.append(llm.generate([prompt], replace(GREEDY, logprobs=logprobs))[0].token_ids)
                llm.cache(CacheCommand(CacheAction.CLEAR, tiers=("device",)))
            assert found[0] == found[1]
