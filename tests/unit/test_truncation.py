"""A model without layers that launch the same kernels as earlier ones makes every operation of the whole one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycache.layers.linear import ColumnLinear
from raycache.layers.norm import RMSNorm
from raycache.models.base import for_warm_up
from raycache.models.truncation import kind_of, num_layers_needed
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.rank.rank import Rank
from tests.oracle.families import make_family
from tests.oracle.half import Script, draw_sequences
from tests.oracle.recorded import new_rank, new_stages

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"num_hidden_layers": 7}, 2),
    "gpt_oss": ({"num_hidden_layers": 8, "layer_types": [SLIDING, FULL] * 4}, 4),
    "gemma3": ({"num_hidden_layers": 14, "layer_types": [SLIDING, SLIDING, FULL] * 4 + [SLIDING] * 2}, 6),
    "deepseek_v32": ({"num_hidden_layers": 6}, 3),  # the first is dense
    "glm_moe_dsa": ({"num_hidden_layers": 9, "indexer_types": (["full", "shared"] * 5)[:9]}, 5),
    "qwen3_5": ({"num_hidden_layers": 9, "layer_types": [LINEAR, FULL, LINEAR] * 3}, 5),
    "minimax": ({"num_hidden_layers": 8, "layer_types": [LINEAR, FULL] * 4}, 4),
    "kimi_linear": ({"num_hidden_layers": 9, "layer_types": [LINEAR, FULL, LINEAR] * 3}, 5),
    "falcon_h1": ({"num_hidden_layers": 6}, 2),
    "kimi_k3": ({}, 5),  # of 5: hidden states become wider from layer to layer
}
"""Settings, and how many layers have all kinds twice."""


class Noted(TorchDispatchMode):
    """Operations with types and shapes of what they take, except for the number of rows, which depends on routers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.made.add((func.name(), *((x.dtype, x.shape[1:]) for x in given)))
        return func(*args, **(kwargs or {}))


def run(rank: Rank) -> tuple[set[Any], list[tuple[int, ...]]]:
    """Operations of some steps, and shapes of their results."""
    plans = Script(draw_sequences(rank.config.vocab_size), rank.pool.windows, rank.pool.sizes).plans()[:12]
    with Noted() as noted:
        found = [rank.forward(plan) for plan in plans]
    return noted.made, [() if logits is None else tuple(logits.shape) for logits in found]


def num_run(rank: Rank) -> int:
    """Layers that a step calls attention in."""
    seen = set()

    class Pool:
        def __getattr__(self, name: str) -> Any:
            def view(layer: int) -> Any:
                seen.add(layer)
                return getattr(rank.pool, name)(layer)

            return view if name in ("kv", "latent", "index", "state") else getattr(rank.pool, name)

    other = copy.copy(rank)
    other.pool = Pool()  # type: ignore[assignment]
    run(other)
    return len(seen)


@pytest.mark.parametrize("family", CASES)
def test_every_operation_is_made(family: str, tmp_path: Path) -> None:
    settings, count = CASES[family]
    folder = make_family(tmp_path / family, family, **settings)
    whole, other = (new_rank(folder, ParallelContext.single(torch.device("cpu"))) for _ in range(2))
    part = replace(other, model=for_warm_up(other.model, other.ctx))
    wanted, found = run(whole), run(part)
    assert wanted[0] <= found[0], sorted(map(str, wanted[0] - found[0]))[:5]
    assert wanted[1] == found[1]
    assert num_run(replace(part, _slots={})) == count


def test_each_stage_is_truncated(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "qwen3", "qwen3", num_hidden_layers=9)
    first, last = (replace(rank, model=for_warm_up(rank.model, rank.ctx)) for rank in new_stages(folder, (5, 4)))
    plans = Script(draw_sequences(first.config.vocab_size), first.pool.windows, first.pool.sizes).plans()[:3]
    for plan in plans:
        assert first.forward(plan) is None
        assert last.forward(plan) is not None


class Stage(Group):
    """With another rank, which needs more layers."""

    def __init__(self, other: int) -> None:
        super().__init__(rank=0, size=2)
        self._other = other

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.full_like(tensor, self._other)])


@pytest.mark.parametrize("other", [1, 2, 5])
def test_ranks_of_a_stage_skip_the_same_layers(tmp_path: Path, other: int) -> None:
    folder = make_family(tmp_path / "llama", "llama", num_hidden_layers=6)
    rank = new_rank(folder, ParallelContext.single(torch.device("cpu")))
    agreed = SimpleNamespace(stage=Stage(other), device=torch.device("cpu"))
    assert num_run(replace(rank, model=for_warm_up(rank.model, agreed))) == max(2, other)  # type: ignore[arg-type]


def test_layers_are_recorded_that_are_not_run(tmp_path: Path) -> None:
    rank = new_rank(
        make_family(tmp_path / "llama", "llama", num_hidden_layers=6), ParallelContext.single(torch.device("cpu"))
    )
    hidden = torch.randn(3, rank.config.hidden_size)
    run = type("Run", (), {"records": (0, 5), "recorded": [], "wanted": None})()
    short = for_warm_up(rank.model, rank.ctx)
    short._parts = short._parts[-2:] * 6  # type: ignore[attr-defined]  # none of them runs
    assert torch.equal(short.forward(hidden, run), hidden)
    assert [tuple(part.shape) for part in run.recorded] == [tuple(hidden.shape)] * 2


@pytest.mark.parametrize(
    ("kinds", "count"),
    [("", 0), ("a", 1), ("aaaa", 2), ("abab", 4), ("abbbb", 3), ("aaab" * 4, 8), ("aaaaab", 6), ("abcabc", 6)],
)
def test_each_kind_comes_twice_or_as_often_as_it_can(kinds: str, count: int) -> None:
    assert num_layers_needed(kinds) == count


def test_kinds() -> None:
    norm = RMSNorm(torch.rand(4), 1e-6)
    weight = torch.rand(6, 4)

    def layer(weight: Tensor, bias: Tensor | None = None) -> ColumnLinear:
        return ColumnLinear(weight, bias)

    same = kind_of((layer(weight), norm))
    kept = {3}  # without a hash, like objects of some libraries
    assert kind_of([kept]) == kind_of([kept]) != kind_of([{3}])
    assert kind_of([slice(0, 4)]) == kind_of([slice(0, 4)]) != kind_of([slice(0, 5)])
    assert same == kind_of((layer(torch.rand(6, 4)), norm))
    others = [
        (layer(torch.rand(6, 5)), norm),
        (layer(weight.double()), norm),
        (layer(torch.rand(4, 6).T), norm),
        (layer(torch.rand(25)[1:].view(6, 4)), norm),  # not aligned
        (layer(weight, torch.rand(6)), norm),
        (layer(weight), RMSNorm(torch.rand(5), 1e-6)),
        (layer(weight), RMSNorm(torch.rand(4), 1e-5)),
        (layer(weight),),
    ]
    assert all(kind_of(other) != same for other in others)
