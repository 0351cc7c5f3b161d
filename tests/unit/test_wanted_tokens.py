"""Behind the last use of the cache, a step computes only the tokens whose hidden states are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.norm import RMSNorm
from raycache.memory.component import FULL
from raycache.models.decoder import Decoder, Residual
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.step.inputs import build_inputs
from raycache.wire.plan import Row, StepPlan
from tests.oracle.families import KNOWN, make_family
from tests.oracle.gang import Piece, gang_logits
from tests.oracle.golden import golden
from tests.oracle.recorded import new_rank

LENGTHS = (42, 37, 30)
IDS = [np.random.default_rng(seed).integers(3, 515, length).tolist() for seed, length in enumerate(LENGTHS)]
STEPS: list[list[Piece]] = [
    [(0, 0, 33)],
    [(0, 33, 34), (1, 0, 31), (2, 0, 29)],
    [(0, 34, 42), (1, 31, 37), (2, 29, 30)],
]
"""Prompts, some of them beside single tokens. Under cp, there are ranks without an end of a piece."""

CASES = [
    ("llama", Split()),
    ("qwen3", Split(tp=2, cp=2)),
    ("deepseek_v32", Split(cp=2)),
    ("gpt_oss", Split(tp=2)),
    ("gemma3", Split(cp=2)),
    ("gemma4", Split(tp=2, cp=2)),
    ("qwen3_next", Split(cp=2)),
    ("nemotron_h", Split(tp=2)),
    ("falcon_h1", Split()),
    ("kimi_k3", Split(tp=2, cp=2)),
    ("minimax", Split(cp=2)),
    ("bailing_moe_v2_5", Split()),
    ("granitemoehybrid", Split(tp=2)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")
    return lambda name: root / name if (root / name).exists() else make_family(root / name, name)


@pytest.mark.parametrize(("family", "split"), CASES, ids=str)
def test_logits_equal_transformers(
    tiny: Callable[[str], Path], family: str, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out, forward = list[int](), Decoder.forward

    def noted(self: Decoder, hidden: Tensor, run: ForwardPass) -> Tensor:
        found = forward(self, hidden, run)
        left_out.append(len(hidden) - len(found))
        return found

    monkeypatch.setattr(Decoder, "forward", noted)
    oracle = golden(tiny(family), IDS)
    found = gang_logits(tiny(family), IDS, STEPS, split=split, is_scored=False)
    assert sum(count > 0 for count in left_out) >= 2 * split.world_size
    for pieces in STEPS:
        for sequence, _, stop in pieces:
            error = np.abs(found[sequence][stop - 1] - oracle.logits[sequence][stop - 1]).max()
            assert error < oracle.atol  # also false for NaN


class Noting:
    """Adds the sum of all tokens, or doubles each; notes how many there are."""

    def __init__(self, seen: list[int], *, is_position_wise: bool) -> None:
        self._seen = seen
        self.is_position_wise = is_position_wise

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        self._seen.append(len(x))
        return 2 * x if self.is_position_wise else x + x.sum(0)

    def over_cp(self, split: object) -> Noting:
        raise NotImplementedError


@pytest.mark.parametrize("kinds", ["mf", "mfmff", "ffm", "ff", "m"])
def test_layers_behind_the_last_mixing_one_get_the_wanted_tokens(kinds: str) -> None:
    """m: a layer that mixes tokens; f: one that does not."""
    generator, seen = torch.Generator().manual_seed(5), list[int]()
    hidden = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    parts = [
        Residual(RMSNorm(torch.ones(8, dtype=torch.float64), 1e-6), Noting(seen, is_position_wise=kind == "f"))
        for kind in kinds
    ]
    decoder = Decoder({layer: (part,) for layer, part in enumerate(parts)}, embedding=None, norm=None, head=None)
    wanted = torch.tensor([7, 2, 0, 0])
    every = decoder.forward(hidden.clone(), ForwardPass(None, None, torch.arange(9)))  # type: ignore[arg-type]
    some = decoder.forward(hidden.clone(), ForwardPass(None, None, torch.arange(9), wanted=wanted))  # type: ignore[arg-type]
    torch.testing.assert_close(some, every[wanted], rtol=1e-12, atol=0)
    behind = len(kinds) - 1 - kinds.rfind("m")
    assert seen == [9] * len(kinds) + [9] * (len(kinds) - behind) + [4] * behind


@pytest.mark.parametrize("family", KNOWN)
def test_parts_behind_the_tail_are_those_without_a_cache(tiny: Callable[[str], Path], family: str) -> None:
    """Mixers that use the cache know the number of their layer."""
    model = new_rank(tiny(family), ParallelContext.single(torch.device("cpu"))).model
    assert isinstance(model, Decoder)
    numbered = [has_number(part, set()) for part in model._parts]
    assert [not part.is_position_wise for part in model._parts] == numbered
    assert model._tail == len(numbered) - numbered[::-1].index(True) < len(numbered)


def has_number(value: object, seen: set[int]) -> bool:
    if id(value) in seen or not type(value).__module__.startswith("raycache."):
        return False
    seen.add(id(value))
    fields = {name: getattr(value, name) for name in [*getattr(value, "__dict__", ())]}
    return "_layer" in fields or any(has_number(field, seen) for field in fields.values())


@pytest.mark.parametrize(
    ("num_tokens", "num_logits", "count"),
    [
        (1, 1, 0),
        (64, 64, 0),
        (255, 1, 0),
        (256, 1, 128),
        (256, 0, 128),
        (511, 129, 0),
        (512, 129, 256),
        (8192, 128, 128),
    ],
)
def test_wanted_tokens_are_padded_or_all(
    num_tokens: int, num_logits: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # what other tests have
    ctx, pages = ParallelContext.single(torch.device("cpu")), np.arange(-(-num_tokens // 16), dtype=np.int32)
    scored = max(num_logits - 1, 0)
    row = Row(0, 0, bytes(4 * num_tokens), output_position=0 if num_logits else -1, targets=bytes(4 * scored))
    if num_tokens == num_logits > 1:  # a batch of decode rows
        rows = [replace(row, slot=slot, tokens=bytes(4), targets=b"") for slot in range(num_tokens)]
    else:
        rows = [row]
    step = build_inputs(
        StepPlan(1, rows), {row.slot: {FULL: pages} for row in rows}, page_size=16, windows={FULL: 0}, ctx=ctx
    )
    assert len(step.logits) == num_logits
    if not count:
        assert step.wanted is None
    else:
        assert step.wanted is not None
        assert step.wanted.tolist() == step.logits.tolist() + [0] * (count - num_logits)
