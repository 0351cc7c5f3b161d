"""Two backends as one: softmax attention from the first, recurrent layers from the second."""

from __future__ import annotations

from torch import Tensor

from raycache.attention.base import (
    AttentionBackend,
    AttentionStep,
    Capabilities,
    LatentProjection,
    Selection,
    StaticStep,
)
from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.step.inputs import StepInputs


class CompositeBackend:
    """Such as a fast backend that has no kernels for recurrent layers, with one that has.

    Args:
        softmax: attends, to keys or latents, and selects.
        recurrent: convolves and scans.
    """

    def __init__(self, *, softmax: AttentionBackend, recurrent: AttentionBackend) -> None:
        self._softmax, self._recurrent = softmax, recurrent
        self.capabilities: Capabilities = softmax.capabilities & recurrent.capabilities

    def plan(self, inputs: StepInputs) -> CompositeStep:
        """Prepare one step."""
        return CompositeStep(softmax=self._softmax.plan(inputs), recurrent=self._recurrent.plan(inputs))

    def plan_static(self, inputs: StepInputs) -> CompositeStaticStep:
        """Prepare a step for many decode batches."""
        return CompositeStaticStep(
            softmax=self._softmax.plan_static(inputs), recurrent=self._recurrent.plan_static(inputs)
        )


class CompositeStep:
    """See AttentionStep.

    Args:
        softmax, recurrent: steps of the same plan.
    """

    def __init__(self, *, softmax: AttentionStep, recurrent: AttentionStep) -> None:
        self._softmax, self._recurrent = softmax, recurrent

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """See AttentionStep."""
        return self._softmax.attend(view, q, k, v, scale=scale, sinks=sinks)

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
        """See AttentionStep."""
        return self._softmax.attend_latent(view, q, latent, rope, projection, scale=scale, selection=selection)

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        """See AttentionStep."""
        return self._softmax.select(view, q, k, weights, top_k=top_k)

    def to_heads(self, local: Tensor) -> Tensor:
        """See AttentionStep."""
        return self._recurrent.to_heads(local)

    def to_tokens(self, every: Tensor) -> Tensor:
        """See AttentionStep."""
        return self._recurrent.to_tokens(every)

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See AttentionStep."""
        return self._recurrent.convolve(view, name, x, weight, bias)

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """See AttentionStep."""
        return self._recurrent.scan(view, q, k, v, g, beta)


class CompositeStaticStep(CompositeStep):
    """See StaticStep.

    Args:
        softmax, recurrent: static steps of the same inputs.
    """

    def __init__(self, *, softmax: StaticStep, recurrent: StaticStep) -> None:
        super().__init__(softmax=softmax, recurrent=recurrent)
        self._parts = (softmax, recurrent)

    def replan(self, inputs: StepInputs) -> None:
        """See StaticStep."""
        for part in self._parts:
            part.replan(inputs)
