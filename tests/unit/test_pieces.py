"""Steps whose layers run as recorded pieces, against the same steps launched, with a recorder that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, STATE, CacheFormat
from raycache.memory.device import DevicePool
from raycache.models.base import components, load_model, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.pieces import RecordedPieces, piece_sizes
from raycache.rank.rank import Rank
from raycache.rank.recorder import Recorder, Replay
from raycache.step.inputs import StepInputs
from raycache.wire.plan import StepPlan
from tests.oracle.families import make_family
from tests.oracle.half import NUM_PAGES, PAGE_SIZE, STATES, Script, draw_sequences
from tests.oracle.weights import open_weights

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


class Operations(TorchDispatchMode):
    """Notes operations, and makes them again with the same tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "empty" not in func.name():  # memory is allocated once
            self._made.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, found in self._made:
                given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)


class OperationRecorder:
    """Records operations instead of kernels. Memory is not shared."""

    def __init__(self) -> None:
        self._now = Operations()

    @contextmanager
    def trying(self) -> Iterator[None]:
        yield

    def times(self, run: Callable[[], object]) -> Sequence[tuple[float, float]]:
        return [(1.0, 1.0)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._now.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def cut(self) -> Replay:
        self._now.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        replay = self._now.replay
        self._begin()
        return replay

    def last(self) -> Replay:
        return self._now.replay

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor

    def _begin(self) -> None:
        self._now = Operations()
        self._now.__enter__()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else make_family(root / name, name, **SETTINGS[name])

    return make


def new_rank(model_dir: Path, ctx: ParallelContext) -> Rank:
    config = read_config(model_dir)
    parts = components(config, CacheFormat("float32"))
    sizes = {part.space: STATES if part.space == STATE else NUM_PAGES for part in parts} | {FULL: NUM_PAGES}
    pool = DevicePool(parts, num_layers=config.num_layers, sizes=sizes, page_size=PAGE_SIZE, ctx=ctx, has_scratch=True)
    source = open_weights(model_dir, dtype=torch.float32, device=ctx.device)
    model = load_model(config, source, ctx, torch.float32, on_progress=lambda done, total: None)
    return Rank(ctx, config, model, pool, TorchBackend(), torch.float32)


def record(rank: Rank, sizes: list[int], *, recorder: Recorder | None = None) -> RecordedPieces:
    """Pieces of the rank's stage; it has the same pool."""
    ctx, width = rank.ctx, rank.config.stream_width(rank.ctx.layers(rank.config.num_layers).start)
    return RecordedPieces(
        rank.model,
        sizes=sizes,
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


class Link(Group):
    """Between two stages that take turns."""

    def __init__(self, *, rank: int, sent: list[Tensor]) -> None:
        super().__init__(rank=rank, size=2)
        self._sent = sent

    def isend(self, tensor: Tensor, *, to: int) -> Callable[[], None]:
        self._sent.append(tensor)  # not copied: it must not change before it is received
        return lambda: None

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        return tensor.copy_(self._sent.pop(0))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_stages_send_and_take_hidden_states(tiny: Callable[[str], Path], family: str) -> None:
    alone = new_rank(tiny(family), ParallelContext.single(torch.device("cpu")))
    split, sent = Split(pp=2, stages=(alone.config.num_layers - 2, 2)), list[Tensor]()
    first, last = (
        new_rank(tiny(family), ParallelContext(split, number, torch.device("cpu"), pp=Link(rank=number, sent=sent)))
        for number in range(2)
    )
    for stage in (first, last):
        stage.pieces = record(stage, SIZES)
    plans = script(alone)[:12]
    for one, other in zip(plans[::2], plans[1::2], strict=True):  # the first stage is a step ahead
        assert first.forward(one) is None and first.forward(other) is None
        for plan in (one, other):
            torch.testing.assert_close(last.forward(plan), alone.forward(plan), rtol=0, atol=2e-4)


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
        return torch.stack([tensor, torch.tensor([[1.9, 2.0]])])


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
    assert piece_sizes(100, least=8) == [8, 16, 32, 64]
    assert piece_sizes(4, least=8) == []
