"""A service whose model has another that drafts for it, on Ray: kill -9 of a rank changes no token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.cluster import Cluster
from raycache.types import SamplingParams
from tests.actors.serving import Service, serving
from tests.actors.test_survival import Heard, kill, listen, prompts, spoken
from tests.unit.test_draft_models import NUM_DRAFTS, PAGE_SIZE, PAIRS, open_llm

_NUM_TOKENS = 120
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.0, "presence_penalty": 1.0},
)


async def figures(service: Service) -> dict[str, float]:
    """What /metrics says, added up over labels."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{service.endpoint}/metrics")).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@pytest.mark.long
def test_streams_with_drafts_go_on_with_the_same_tokens_when_a_rank_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    pair, asked = PAIRS["llama by nemotron_h"](tmp_path), prompts(3, seed=9)
    with open_llm(pair.target) as plain:
        samplings = [SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True, **wishes) for wishes in _SAMPLINGS]
        expected = [list(completion.token_ids) for completion in plain.generate(asked, samplings)]

    async def run() -> None:
        drafts: dict[str, Any] = {"draft": pair.draft, "draft_tokens": NUM_DRAFTS, "adaptive_drafts": False}
        tiers: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 64, "host_memory": "32MiB"}
        async with serving(pair.target, cp=2, **drafts, **tiers) as service:
            heard = [Heard() for _ in asked]
            streams = [
                asyncio.create_task(listen(service, prompt, _NUM_TOKENS, into, **wishes))
                for prompt, into, wishes in zip(asked, heard, _SAMPLINGS, strict=True)
            ]
            await spoken(heard, at_least=90)
            before = await figures(service)
            kill("RankActor")
            await asyncio.gather(*streams)
            assert [each.tokens for each in heard] == expected
            stats, after = await service.engine.stats(), await figures(service)
            assert stats.rebuilds == 1
            drafted, accepted = "raycache_drafted_tokens_total", "raycache_accepted_draft_tokens_total"
            assert 0 < before[accepted] < after[accepted] < after[drafted] and before[accepted] < before[drafted]
            await service.engine.check()

    asyncio.run(asyncio.wait_for(run(), 500))
