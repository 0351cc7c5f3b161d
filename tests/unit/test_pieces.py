"""Steps whose layers run as recorded pieces, against the same steps launched, with a recorder that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.rank.pieces import PieceSizes, RecordedPieces, piece_sizes
from raycache.rank.rank import Rank
from raycache.rank.recorder import Recorder
from raycache.step.inputs import StepInputs
from raycache.wire.plan import StepPlan
from tests.oracle.families import make_family
from tests.oracle.half import Script, draw_sequences
from tests.oracle.kept_selections import count_selections
from tests.oracle.recorded import OperationRecorder, new_rank, new_stages

SIZES = [1, 8, 24, 96, 512]
DENSE = {"first_k_dense_replace": 9}  # experts on a CPU run one after another, as many as tokens chose

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},  # windows
    "deepseek_v32": DENSE,  # latents, an indexer
    "qwen3_5": {},  # gated delta net
    "falcon_h1": {},  # Mamba2 beside attention
    "kimi_linear": DENSE,  # KDA
}
CASES = ("llama", "gemma3", "deepseek_v32", "qwen3_5", "falcon_h1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else make_family(root / name, name, **SETTINGS[name])

    return make


def record(
    rank: Rank, sizes: list[int], *, recorder: Recorder | None = None, is_measured: bool = False
) -> RecordedPieces:
    """Pieces of the rank's stage; it has the same pool."""
    ctx, width = rank.ctx, rank.config.stream_width(rank.ctx.layers(rank.config.num_layers).start)
    return RecordedPieces(
        rank.model,
        sizes=PieceSizes(sizes, is_measured),
        pool=rank.pool,
        backend=rank.backend,
        ctx=ctx,
        hidden=None if ctx.is_first_stage else torch.empty(0, width),
        recorder=recorder or OperationRecorder(),
    )


def script(rank: Rank) -> list[StepPlan]:
    return Script(draw_sequences(rank.config.vocab_size), rank.pool.windows, rank.pool.sizes).plans()


@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_launched_steps(tiny: Callable[[str], Path], family: str) -> None:
    ctx = ParallelContext.single(torch.device("cpu"))
    launched, recorded = new_rank(tiny(family), ctx), new_rank(tiny(family), ctx)
    recorded.pieces = record(recorded, SIZES)
    for plan in script(launched)[:24]:
        wanted, found = launched.forward(plan), recorded.forward(plan)
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_stages_send_and_take_hidden_states(tiny: Callable[[str], Path], family: str) -> None:
    alone = new_rank(tiny(family), ParallelContext.single(torch.device("cpu")))
    first, last = new_stages(tiny(family), (alone.config.num_layers - 2, 2))
    for stage in (first, last):
        stage.pieces = record(stage, SIZES)
    plans = script(alone)[:12]
    for one, other in zip(plans[::2], plans[1::2], strict=True):  # the first stage is a step ahead
        assert first.forward(one) is None and first.forward(other) is None
        for plan in (one, other):
            torch.testing.assert_close(last.forward(plan), alone.forward(plan), rtol=0, atol=2e-4)


def test_a_warm_up_calls_the_first_layers_only(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rank, called = new_rank(tiny("llama"), ParallelContext.single(torch.device("cpu"))), list[int]()
    rank.pieces = record(rank, SIZES).for_warm_up()
    for recorded in rank.pieces._recorded.values():
        for piece in recorded.pieces:
            if piece.call is not None and piece.call.out is not None:
                with torch.inference_mode():  # as it was made
                    piece.call.out.fill_(torch.nan)
    monkeypatch.setattr(rank.pool, "gate", called.append)
    for plan in script(rank)[:6]:
        found = rank.forward(plan)
        assert found is not None and found.isfinite().all()
    assert called == [0, 1] * 6


def test_selections_of_earlier_layers_are_freed(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = new_rank(tiny("deepseek_v32"), ParallelContext.single(torch.device("cpu")))
    rank.pieces = record(rank, [512])
    kept = count_selections(monkeypatch)
    rank.forward(script(rank)[0])
    assert len(kept) == rank.config.num_layers and max(kept) == 1


def test_longer_steps_are_launched(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = new_rank(tiny("llama"), ParallelContext.single(torch.device("cpu")))
    rank.pieces = record(rank, [4, 16])
    replayed: list[int] = []
    forward = rank.pieces.forward

    def noted(inputs: StepInputs, hidden: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        replayed.append(len(inputs.ids))
        return forward(inputs, hidden)

    monkeypatch.setattr(rank.pieces, "forward", noted)
    plans = script(rank)
    lengths = [sum(row.num_tokens for row in plan.rows) for plan in plans]
    for plan in plans:
        rank.forward(plan)
    assert replayed == [length for length in lengths if length <= 16] and len(replayed) < len(lengths)


@pytest.mark.parametrize("most", range(6))
def test_sizes_that_gain_nothing_are_not_recorded(tiny: Callable[[str], Path], most: int) -> None:
    rank, sizes = new_rank(tiny("llama"), ParallelContext.single(torch.device("cpu"))), [64, 4, 16, 8, 32]
    recorded = record(rank, sizes, recorder=Busy(rank, longest=sorted(sizes)[most - 1] if most else 0)).sizes
    assert sorted(recorded) == sorted(sizes)[:most]


@pytest.mark.parametrize("sizes", [[], [1], SIZES])
def test_what_ranks_before_have_found_is_not_measured_again(
    tiny: Callable[[str], Path], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(OperationRecorder, "times")
    ctx = ParallelContext.single(torch.device("cpu"))
    launched, rank = new_rank(tiny("kimi_linear"), ctx), new_rank(tiny("kimi_linear"), ctx)
    rank.pieces = record(rank, sizes, is_measured=True)
    assert sorted(rank.pieces.sizes) == sizes and rank.pieces.longest == max(sizes, default=0)
    for plan in script(launched)[:12]:
        torch.testing.assert_close(rank.forward(plan), launched.forward(plan), rtol=0, atol=2e-4)


class Busy(OperationRecorder):
    """Where computing takes twice as long as launching, in steps of more than `longest` tokens."""

    def __init__(self, rank: Rank, *, longest: int) -> None:
        super().__init__()
        self._model, self._longest = rank.model, longest

    def times(self, run: Callable[[], object]) -> Sequence[tuple[float, float]]:
        with patch.object(self._model, "embed", wraps=self._model.embed) as embed:
            run()
        return [(1.0, 1.0 if len(embed.call_args.args[0]) <= self._longest else 2.0)]


class Ahead(Group):
    """With another rank, which takes longer to launch what takes both of them as long."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.tensor([[1.9, 2.0]]) if tensor.is_floating_point() else tensor])


def test_the_slowest_rank_tells_whether_a_step_is_bound_by_launches(tiny: Callable[[str], Path]) -> None:
    rank = new_rank(tiny("llama"), ParallelContext.single(torch.device("cpu")))
    assert record(rank, [4, 8], recorder=Busy(rank, longest=0)).sizes == []
    with patch.object(ParallelContext, "stage", Ahead()):
        assert sorted(record(rank, [4, 8], recorder=Busy(rank, longest=0)).sizes) == [4, 8]


def test_attention_waits_for_pages_of_its_layer(tiny: Callable[[str], Path]) -> None:
    rank = new_rank(tiny("deepseek_v32"), ParallelContext.single(torch.device("cpu")))
    rank.pieces = record(rank, [512])
    asked: list[int] = []
    rank.pool.gate = asked.append
    rank.forward(script(rank)[0])
    layers = range(rank.config.num_layers)
    assert asked == [layer for layer in layers for _ in ("indexer", "attention")]


def test_sizes_lie_between_their_bounds() -> None:
    assert piece_sizes(100, least=8) == ([8, 16, 32, 64], False)
    assert piece_sizes(100, least=8, longest=32) == ([8, 16, 32], True)
    assert piece_sizes(100, least=8, longest=3072) == ([8, 16, 32, 64], True)
    assert piece_sizes(4, least=8) == ([], False)
