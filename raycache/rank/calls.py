"""Calls of attention that layers make in a step, handed to somebody who decides what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raycache.attention.base import AttentionStep, LatentProjection, NotRecordableError, RecurrentStep, Selection
from raycache.attention.delta_rule import DeltaRule
from raycache.attention.state_space import StateSpace
from raycache.memory.device import DevicePool
from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

# Shapes in this file: S tokens of the step.

Launch = Callable[..., Tensor | None]
"""A call of attention: (step, the newest selection of the step in a list, *its arguments with a row per token);
replaces the selection, or returns a tensor."""


class Calls(Protocol):
    """What becomes of calls of attention while layers run."""

    def call(self, layer: int, launch: Launch, rows: Sequence[Tensor | None]) -> Tensor | None:
        """Returns the result, [S, ...]; None for a selection."""
        ...


class LayerPool:
    """A pool that knows the layer of the view that it gave last."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool, self.layer = pool, 0

    def kv(self, layer: int) -> KVView:
        self.layer = layer
        return self._pool.kv(layer)

    def latent(self, layer: int) -> LatentView:
        self.layer = layer
        return self._pool.latent(layer)

    def index(self, layer: int) -> IndexView:
        self.layer = layer
        return self._pool.index(layer)

    def state(self, layer: int) -> StateView:
        self.layer = layer
        return self._pool.state(layer)


@dataclass(frozen=True)
class _Selected:
    """Stands for the newest selection of the step that is replayed."""


class CallingStep:
    """Passes all calls of attention on; see AttentionStep."""

    def __init__(self, calls: Calls, pool: LayerPool, trial: StepInputs) -> None:
        self._calls, self._pool, self._trial = calls, pool, trial
        self.recurrent: RecurrentStep = CallingRecurrence(calls, pool)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        return _tensor(
            self._calls.call(
                self._pool.layer,
                lambda step, selections, q, k, v: step.attend(view, q, k, v, scale=scale, sinks=sinks),
                (q, k, v),
            )
        )

    def attend_latent(
        self,
        view: LatentView,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        projection: LatentProjection,
        *,
        scale: float,
        selection: Selection | None,
    ) -> Tensor:
        assert selection is None or isinstance(selection, _Selected), "a selection is used in the step that made it"

        def launch(step: AttentionStep, selections: list[Selection], q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
            chosen = None if selection is None else selections[0]
            return step.attend_latent(view, q, latent, rope, projection, scale=scale, selection=chosen)

        return _tensor(self._calls.call(self._pool.layer, launch, (q, latent, rope)))

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        def launch(
            step: AttentionStep, selections: list[Selection], q: Tensor, k: Tensor, weights: Tensor
        ) -> Tensor | None:
            selections[:] = [step.select(view, q, k, weights, top_k=top_k)]  # older ones are freed: they are large
            return None

        self._calls.call(self._pool.layer, launch, (q, k, weights))
        return _Selected()

    @property
    def exchange(self) -> Exchange:
        """Of the trial: without cp, tokens stay where they are."""
        if self._trial.ctx.cp.size > 1:
            raise NotRecordableError("layers exchange tokens between cp ranks, whose number differs between steps")
        return self._trial.exchange


class CallingRecurrence:
    """Passes convolutions and scans of recurrent layers on; see RecurrentStep."""

    def __init__(self, calls: Calls, pool: LayerPool) -> None:
        self._calls, self._pool = calls, pool

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _tensor(
            self._calls.call(
                self._pool.layer,
                lambda step, selections, x: step.recurrent.convolve(view, name, x, weight, bias),
                (x,),
            )
        )

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        return _tensor(
            self._calls.call(
                self._pool.layer,
                lambda step, selections, q, k, v, g, beta: step.recurrent.scan(view, q, k, v, g, beta),
                (q, k, v, g, beta),
            )
        )

    def state_space(
        self, view: StateView, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
    ) -> Tensor:
        return weights.run(self, view, x=x, b=b, c=c, dt=dt)

    def delta_rule(
        self, view: StateView, weights: DeltaRule, *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        return weights.run(self, view, q=q, k=k, v=v, decay=decay, beta=beta)


def _tensor(found: Tensor | None) -> Tensor:
    assert found is not None, "only selections are no tensors"
    return found
