"""Ranks of one gang on several nodes: a board and an arena on each, and the same tokens from every tier."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest

from raycache.errors import RankLostError
from raycache.host.service import open_arena
from raycache.types import Miss
from tests.oracle.families import make_family
from tests.oracle.golden import greedy
from tests.oracle.spread import Spread, host_services, spread
from tests.selection import mostly_long

PROMPT = np.random.default_rng(3).integers(3, 250, 61).tolist()
NUM_TOKENS = 6
WHOLE = 56  # tokens of its whole pages
CASES = {
    "llama, cp across nodes": ("llama", {"tp": 2, "cp": 2}, (0, 0, 1, 1)),
    "latents, replicas on both nodes": ("deepseek_v3", {"tp": 4}, (0, 1, 1, 0)),
    "states, pp across three nodes": ("qwen3_next", {"pp": 2, "tp": 2}, (0, 0, 1, 2)),
}


def settings(tmp_path: Path) -> dict[str, object]:
    return {
        "num_pages": 64,
        "storage": f"file://{tmp_path}/store/{{node}}?size=16MiB",
        "prefetch": "wait_complete",
        "prefetch_timeout_s": 30.0,
        "prefetch_share": 1.0,
        "rank_timeout_s": 60.0,
    }


def tiers(found: Spread) -> tuple[list[int], dict[str, int], Miss]:
    tokens, first = found.ask(PROMPT, NUM_TOKENS)
    return tokens, dict(first.cached_by_tier), first.miss


def damage(found: Spread, node: int) -> None:
    """Flip a bit of everything that the host tier of a node holds."""
    arena = open_arena(found.opened[node].path)
    for space in arena.layout.spaces:
        for rank in arena.layout.ranks:
            arena.slab(rank, space)[...] ^= 1


@pytest.mark.parametrize("case", mostly_long(CASES, but=["llama, cp across nodes"]))
def test_a_prompt_has_the_same_tokens_from_every_tier_of_several_nodes(tmp_path: Path, case: str) -> None:
    family, split, nodes = CASES[case]
    (tmp_path / "store").mkdir()
    model = make_family(tmp_path / "model", family)
    expected = greedy(model, PROMPT, NUM_TOKENS)
    last = max(nodes)
    with host_services(last + 1) as owners:
        with spread(model, owners, nodes=nodes, **split, **settings(tmp_path)) as found:
            assert all(each.is_fresh for each in found.opened)
            assert tiers(found) == (expected, {}, Miss.NEVER_SEEN)
            cached = tiers(found)[1]["device"]
            assert cached in (WHOLE, WHOLE - 8), "a state is kept at the last page that can be continued"
            found.clear("device")
            assert tiers(found)[:2] == (expected, {"host": cached})
            found.clear("device", "host")
            assert tiers(found)[:2] == (expected, {"storage": cached})
            # A load that fails on another node than the decider's is found out there, and told here.
            found.clear("device")
            damage(found, last)
            tokens, from_tiers, _ = tiers(found)
            assert tokens == expected and "host" not in from_tiers
            # Each node has stored its own part: without one of them there is nothing.
            found.clear("device", "host")
            owners[last].clear()
            assert tiers(found)[:2] == (expected, {})
            assert all(owner.status()["objects"] for owner in owners), "it was stored again, everywhere"
        # The next engine finds what this one has left on all nodes.
        with spread(model, owners, nodes=nodes, epoch=2, **split, **settings(tmp_path)) as found:
            assert not any(each.is_fresh for each in found.opened)
            assert tiers(found)[:2] == (expected, {"host": cached})


def test_a_rank_that_dies_on_another_node_is_named(tmp_path: Path) -> None:
    _, split, nodes = CASES["llama, cp across nodes"]
    (tmp_path / "store").mkdir()
    model = make_family(tmp_path / "model", "llama")
    with (
        host_services(2) as owners,
        pytest.raises(RankLostError) as lost,
        spread(model, owners, nodes=nodes, **split, **settings(tmp_path)) as found,
    ):
        found.ask(PROMPT, NUM_TOKENS)
        start_s = time.monotonic()
        (far,) = [child for child in multiprocessing.active_children() if child.name == "rank 3"]
        far.kill()
        found.ask(PROMPT, NUM_TOKENS)
    assert lost.value.rank == 3, "the other rank of its node has said that it lost a peer"
    assert time.monotonic() - start_s < 50, "long before the deadline of a step"
