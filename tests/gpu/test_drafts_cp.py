"""Models that draft under cp on two GPUs, in recorded steps: the steps of a service on one rank, run again.

Tokens of every step are given, so what differs in one by rounding does not change those behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from raycache import LLM
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.gang.processes import RankProcess, meet_here
from raycache.rank.build import load
from raycache.rank.drafter import DraftGraphs
from raycache.rank.graphs import DecodeGraphs
from raycache.rank.member import Invitation, Member, alone, join
from raycache.rank.rank import Rank
from raycache.wire.plan import StepPlan
from raycache.wire.results import RowResult, read_results
from tests.gpu.test_drafts import assert_likeliest, complete, prompts
from tests.oracle.draft_pairs import PAIRS
from tests.oracle.half import make_half
from tests.oracle.tiny_tokenizers import byte_level
from tests.unit.test_draft_models import NUM_DRAFTS, PAGE_SIZE
from tests.unit.test_draft_models_cp import SETTINGS, Service

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs"),
]

Replays = Counter[str]
"""How often graphs were replayed: of the target, of it with drafts to check, of the draft model's passes, and of it
when it follows."""


def config_of(service: Service, *, device: str = "cuda", **settings: Any) -> Config:
    return Config(
        model=str(service.target),
        draft=service.draft,
        draft_tokens=NUM_DRAFTS,
        page_size=PAGE_SIZE,
        max_model_len=256,
        device=device,
        dtype="bfloat16",
        **SETTINGS,
        **settings,
    )


def built(deployment: Deployment, member: Member) -> Rank:
    loaded = load(deployment, member)
    loaded.measure()
    assert isinstance(deployment.config.num_pages, int)
    return loaded.build(deployment.config.num_pages, warms_up=False)


def counting(rank: Rank) -> Replays:
    """Count the replays of a rank's graphs from now on."""
    counted = Replays()

    def count(kind: str, graphs: DecodeGraphs) -> None:
        replay, prepare = graphs.replay, graphs.prepare

        def replayed(**given: Any) -> Any:
            counted[kind] += 1
            return replay(**given)

        def prepared(plan: StepPlan, tables: Any) -> None:
            counted["checks"] += any(row.num_drafts for row in plan.rows)
            prepare(plan, tables)

        graphs.replay, graphs.prepare = replayed, prepared  # type: ignore[method-assign]

    if rank.graphs is not None:
        assert rank.drafter is not None and isinstance(rank.drafter.graphs, DraftGraphs)
        count("target", rank.graphs)
        count("passes", rank.drafter.graphs.passes)
        count("following", rank.drafter.graphs.following)
    return counted


def run_rank(connection: Connection, invitation: Invitation) -> None:
    """Run the plans that come through the connection; no decider is there."""
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    member = join(replace(invitation, handles=handles))
    rank = built(deploy(invitation.config, device_type=member.ctx.device.type), member)
    counted = counting(rank)
    connection.send([rank.execute(plan).copy() for plan in map(StepPlan.unpack, connection.recv())])
    connection.send((rank.decode_model is not None, counted))
    connection.recv()


def of_gang(config: Config, plans: Sequence[StepPlan]) -> tuple[list[list[RowResult]], list[Replays]]:
    """Results under cp, and replays of each rank."""
    meeting, invitations = meet_here(config, device_type=config.device)
    ranks = [RankProcess(run_rank, invitation) for invitation in invitations]
    try:
        for rank in ranks:
            rank.send([plan.pack() for plan in plans])
        found = [rank.receive() for rank in ranks]
        are_split, replays = zip(*[rank.receive() for rank in ranks], strict=True)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
        meeting.board.unlink()
    assert all(are_split)
    return [read_results(plan, [lines[i] for lines in found]) for i, plan in enumerate(plans)], list(replays)


def of_one(config: Config, plans: Sequence[StepPlan]) -> list[list[RowResult]]:
    rank = built(deploy(config, device_type=config.device), alone(device="cpu" if config.device == "cpu" else "cuda:0"))
    try:
        return [read_results(plan, [rank.execute(plan).copy()]) for plan in plans]
    finally:
        rank.close()
        torch.cuda.empty_cache()


def share(found: Sequence[list[RowResult]], wanted: Sequence[list[RowResult]], what: str) -> float:
    """Of sampled or drafted tokens that are equal."""
    pairs = [
        (one, other)
        for mine, theirs in zip(found, wanted, strict=True)
        for row, right in zip(mine, theirs, strict=True)
        for one, other in zip(getattr(row, what), getattr(right, what), strict=True)
    ]
    assert len(pairs) > 100
    return sum(one == other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("kind", list(PAIRS))
def test_recorded_steps_under_cp_draft_what_one_gpu_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    service = Service.of(*PAIRS[kind](tmp_path), monkeypatch)
    plans = [plan for plan in service.known if plan.rows]
    wanted = of_one(config_of(service, device="cuda", cuda_graphs=False), plans)
    found, replays = of_gang(config_of(service, cp=2, decode_split="on"), plans)
    for counted in replays:
        assert counted == replays[0] and counted["following"] == counted["target"] >= counted["checks"] > 10
        assert counted["passes"] > 20
    assert share(found, wanted, "tokens") > 0.9 and share(found, wanted, "next_drafts") > 0.8


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gemma3", "nemotron_h"])
def test_a_model_drafts_what_it_says_itself(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = byte_level(make_half(tmp_path / family, family))
    settings: dict[str, Any] = {"draft": str(model), "draft_tokens": 3, "adaptive_drafts": False}
    settings |= {"max_running": 8, "max_model_len": 512, "cp": 2, "decode_split": "on"}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    asked = prompts(oracle.config.vocab_size)
    with LLM(str(model), device="cuda", dtype="bfloat16", page_size=16, num_pages=64, **settings) as llm:
        assert llm.info.decode_weights == "split over cp"
        outputs = complete(llm, asked)
        stats = llm.stats()
    assert sum(stats.accepted.values()) > 0.85 * sum(stats.drafted.values()) > 0
    assert_likeliest(oracle, asked, outputs)
