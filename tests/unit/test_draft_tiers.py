"""What draft models draft does not depend on where a prefix comes from: what a draft keeps goes through all tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycache.deployment.deployment import deploy
from raycache.gang.executors import LocalExecutor
from raycache.llm import LLM
from raycache.memory.component import CacheFormat
from raycache.models.base import components
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.types import CacheAction, CacheCommand
from tests.selection import mostly_long
from tests.unit.test_draft_models import (
    PAIRS,
    PROMPTS,
    Rows,
    check_rows,
    complete,
    counts,
    watch,
)


def clear(llm: LLM, *tiers: str) -> None:
    llm.cache(CacheCommand(CacheAction.CLEAR, tiers=tiers))


def rebuild(llm: LLM) -> None:
    """A new rank with an empty pool takes the place of the one that there is; the host tier stays."""
    assert llm._rank is not None and llm._host is not None
    llm._executor.close()
    llm._rank.close()
    member = alone()
    loaded = load(deploy(llm.config, device_type="cpu"), member)
    llm._rank = loaded.build(llm.info.num_pages, llm._host.path)
    llm._executor = LocalExecutor(llm._rank, member.board)
    llm.engine.restart(llm._executor)


def ask(llm: LLM, prompts: list[list[int]], rows: Rows) -> tuple[list[list[int]], Rows, dict[str, int]]:
    """Texts, rows with drafts, and tokens of the prompts by the tier that they came from."""
    before = llm.stats().cached_by_tier
    rows.clear()
    texts, after = complete(llm, prompts), llm.stats().cached_by_tier
    cached = {tier: count - before.get(tier, 0) for tier, count in after.items() if count > before.get(tier, 0)}
    return texts, dict(rows), cached


NAMES = ["llama by nemotron_h", "qwen3_next by gemma3", "mtp of deepseek_v32", "mtp of qwen3_next", "eagle3 of llama"]


@pytest.mark.parametrize("name", mostly_long(NAMES, but=["llama by nemotron_h"]))
def test_drafts_are_the_same_wherever_the_prefix_comes_from(tmp_path: Path, name: str) -> None:
    """Prompts go on from answers: the pages of those were written in rows with drafts."""
    pair = PAIRS[name](tmp_path / "pair")
    waits = {"prefetch": "wait_complete", "prefetch_timeout_s": 20.0, "prefetch_share": 1.0}
    tiers = {"host_memory": "32MiB", "storage": f"file://{tmp_path}/store?size=32MiB", **waits}
    with pair.open(**tiers) as llm:
        rows = watch(llm)
        prompts = [[*text, 7, 8, 9] for text in complete(llm, PROMPTS)]
        of_answers = ask(llm, prompts, rows)
        clear(llm, "device", "host", "storage")
        texts, cold, nothing = ask(llm, prompts, rows)
        assert nothing == {} and of_answers == (texts, cold, {"device": 64 + 96 + 32})
        check_rows(pair, cold, texts)
        made, right = counts(cold, texts)
        assert 0 < right.total() < made.total()

        num_cached = 64 + 112 + 32  # whole pages of 80, 113 and 48 tokens, all but the last token
        assert ask(llm, prompts, rows) == (texts, cold, {"device": num_cached})
        clear(llm, "device")
        assert ask(llm, prompts, rows) == (texts, cold, {"host": num_cached})
        clear(llm, "device", "host")
        assert ask(llm, prompts, rows) == (texts, cold, {"storage": num_cached})
        rebuild(llm)
        assert ask(llm, prompts, rows) == (texts, cold, {"host": num_cached})
    with pair.open(**tiers) as llm:
        assert ask(llm, prompts, watch(llm)) == (texts, cold, {"storage": num_cached})


@pytest.mark.parametrize("name", mostly_long(NAMES, but=["mtp of deepseek_v32"]))
def test_damage_to_what_the_draft_keeps_is_noticed_and_changes_no_output(tmp_path: Path, name: str) -> None:
    """Or the test above would prove nothing."""
    with PAIRS[name](tmp_path).open() as llm:
        rows = watch(llm)
        prompts = [[*text, 7, 8, 9] for text in complete(llm, PROMPTS)]
        texts, cold, _ = ask(llm, prompts, rows)
        rank = llm._rank
        assert rank is not None
        for component in components(rank.config, CacheFormat("float32")):
            if component.is_draft:
                for tensor in rank.pool.rows(component.name).values():
                    tensor.zero_()
        again, damaged, cached = ask(llm, prompts, rows)
        assert cached == {"device": 64 + 112 + 32}
        assert again == texts and damaged != cold
