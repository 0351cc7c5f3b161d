"""Recorded steps without a GPU: a recorder of operations instead of kernels, attention that can be recorded, and stages
that take turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from raycache.attention.base import Selection
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.component import FULL, STATE, CacheFormat
from raycache.memory.device import DevicePool
from raycache.models.base import components, load_model, read_config
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.calls import CallingStep, Launch
from raycache.rank.rank import Rank
from raycache.rank.recorder import Replay
from raycache.step.inputs import StepInputs
from tests.oracle.half import NUM_PAGES, PAGE_SIZE, STATES
from tests.oracle.weights import open_weights


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

    def launch(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call what is one operation to a graph, whatever it does."""
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            found = func(*args)
        self._made.append((func, args, {}, found))
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

    num_bytes = 0

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


class StaticBackend(TorchBackend):
    """Attention in plain torch, whose decode batches can be recorded; without cp."""

    capabilities = replace(TorchBackend.capabilities, can_capture=True)

    def plan_static(self, inputs: StepInputs, *, has_chunks: bool = False) -> StaticStep:
        """Prepare a step for many batches, without indexers."""
        return StaticStep(self, inputs, has_chunks=has_chunks)


class StaticStep(CallingStep):
    """A step of a batch, whose calls are operations of a graph that run as it was planned last."""

    def __init__(self, backend: TorchBackend, inputs: StepInputs, *, has_chunks: bool) -> None:
        super().__init__(self, SimpleNamespace(layer=0), inputs)
        self._backend, self._has_chunks = backend, has_chunks
        self.replan(inputs)

    def replan(self, inputs: StepInputs) -> None:
        """Prepare the next replay."""
        if self._has_chunks:
            self._step = self._backend.plan(inputs)
            return
        numbers = zip(
            inputs.rows,
            inputs.positions.tolist(),
            inputs.read_states.tolist(),
            inputs.write_states.tolist(),
            strict=True,
        )
        rows = tuple(
            replace(row, start=start, read_state=read, write_state=write) for row, start, read, write in numbers
        )
        self._step = self._backend.plan(replace(inputs, rows=rows))

    def call(self, layer: int, launch: Launch, rows: Sequence[Tensor | None]) -> Tensor | None:
        """See `Calls`."""

        def run(*rows: Tensor | None) -> Tensor | None:
            return launch(self._step, list[Selection](), *rows)

        mode = _get_current_dispatch_mode()  # type: ignore[no-untyped-call]
        found: Tensor | None = mode.launch(run, *rows) if isinstance(mode, Operations) else run(*rows)
        return found


class Link(Group):
    """Between stages that take turns.

    Attributes:
        sent: of each stage but the last, what the next one has not received.
    """

    def __init__(self, *, rank: int, sent: Sequence[list[Tensor]]) -> None:
        super().__init__(rank=rank, size=len(sent) + 1)
        self.sent = sent

    def isend(self, tensor: Tensor, *, to: int) -> Callable[[], None]:
        self.sent[self.rank].append(tensor)  # not copied: it must not change before it is received
        return lambda: None

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        return tensor.copy_(self.sent[source].pop(0))


def new_stages(model_dir: Path, num_layers: Sequence[int]) -> list[Rank]:
    """Ranks with so many layers each, that are called in turn."""
    split, sent = Split(pp=len(num_layers), stages=tuple(num_layers)), [list[Tensor]() for _ in num_layers[1:]]
    links = [Link(rank=number, sent=sent) for number in range(split.pp)]
    return [
        new_rank(model_dir, ParallelContext(split, number, torch.device("cpu"), pp=link))
        for number, link in enumerate(links)
    ]


def new_rank(model_dir: Path, ctx: ParallelContext) -> Rank:
    """A rank with a model in float32 and a pool for the script of half.py."""
    config = read_config(model_dir)
    parts = components(config, CacheFormat("float32"))
    sizes = {part.space: STATES if part.space == STATE else NUM_PAGES for part in parts} | {FULL: NUM_PAGES}
    pool = DevicePool(parts, num_layers=config.num_layers, sizes=sizes, page_size=PAGE_SIZE, ctx=ctx, has_scratch=True)
    source = open_weights(model_dir, dtype=torch.float32, device=ctx.device)
    model = load_model(config, source, ctx, torch.float32, on_progress=lambda done, total: None)
    return Rank(ctx, config, model, pool, TorchBackend(), torch.float32)
