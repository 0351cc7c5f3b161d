"""What an attention backend is: a factory of steps. A step is planned once per plan and serves all layers.

Every backend implements every method; what it cannot do, it says in its capabilities, and is refused at start. Models
reach a step through layers.forward_pass.ForwardPass only, whatever wraps the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

# Shapes in this file: T_local new tokens of this rank, T new tokens of all cp ranks, Hq query heads, Hkv key heads,
# D head size.


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        name: for people.
        device_types: such as "cpu", "cuda".
        dtypes: of queries and cache, such as "float32".
        can_capture: whether steps of decode batches can be recorded as CUDA graphs.
    """

    name: str
    device_types: frozenset[str]
    dtypes: frozenset[str]
    can_capture: bool = False


@dataclass(frozen=True)
class LatentProjection:
    """How latents become keys and values of the heads of this rank.

    Attributes:
        key: [Hq, Dn, R]; key without rotary part of head h = key[h] @ latent.
        value: [Hq, Dv, R].
    """

    key: Tensor
    value: Tensor


class Selection(Protocol):
    """Which earlier tokens each new one attends to, as one backend's `select` made it; opaque to models."""


class AttentionStep(Protocol):
    """Attention of one step. All methods are collective over cp: every rank calls the same ones in the same order."""

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """Keep the new keys and values that this rank owns; attend the new queries to everything that they see.

        Args:
            view: of the layer; has its window.
            q: [T_local, Hq, D].
            k, v: [T_local, Hkv, D].
            scale: of the scores, such as D ** -0.5.
            sinks: [Hq] scores of one more key per head, whose value is zero, or None.
        Returns:
            [T_local, Hq, D].
        """
        ...

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
        """Keep the new latents that this rank owns; attend the new queries to the keys and values made of latents.

        Args:
            view: of the layer.
            q: [T_local, Hq, Dn + Dr], its rotary part last.
            latent: [T_local, R], normalised.
            rope: [T_local, Dr], the keys' rotary part, turned; one for all heads.
            projection: of this rank's heads.
            scale: of the scores.
            selection: made by `select` in this step, or None for all earlier tokens.
        Returns:
            [T_local, Hq, Dv].
        """
        ...

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        """Keep the new index keys that this rank owns; choose the `top_k` tokens with the largest scores per query.

        The score of a key is the sum over heads of weight * relu(q . k) ("DeepSeek-V3.2", section 2.1); equal scores
        are won by the earlier token. A query chooses among itself and all before it.

        Args:
            view: of the layer.
            q: [T_local, Hi, D].
            k: [T_local, D].
            weights: [T_local, Hi], all scales included.
            top_k: tokens per query.
        """
        ...

    @property
    def recurrent(self) -> RecurrentStep:
        """Convolutions and scans of recurrent layers."""
        ...

    @property
    def exchange(self) -> Exchange:
        """Exchange of tokens and heads between the cp ranks."""
        ...


class RecurrentStep(Protocol):
    """What recurrent layers compute over time, in one step."""

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Short causal convolution of every channel, continued from and kept in the layer's states.

        Args:
            view: of the layer.
            name: which of its convolutions.
            x: [T, H, D], all tokens and this rank's recurrent heads.
            weight: [H, D, K], the newest input's tap last.
            bias: [H, D] or None.
        Returns:
            [T, H, D], before any activation.
        """
        ...

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """Linear attention with decay, continued from and kept in the layer's states.

        Per head, S [Dk, Dv] in float32:

            S <- exp(g_t) S
            S <- S + k_t v_t^T,  or with beta  S <- S + beta_t k_t (v_t - S^T k_t)^T
            out_t = S^T q_t

        Args:
            view: of the layer.
            q, k: [T, Hk, Dk]; value head i reads key head i // (Hv / Hk).
            v: [T, Hv, Dv].
            g: [T, Hv, 1] or [T, Hv, Dk] float32, log of the decay.
            beta: [T, Hv] for the delta rule, or None.
        Returns:
            [T, Hv, Dv].
        """
        ...


class NotRecordableError(Exception):
    """A layer has nothing that a CUDA graph could hold; the text says what."""


class StaticStep(AttentionStep, Protocol):
    """A step of a decode batch that is recorded once, in a CUDA graph, and replayed with other rows.

    What its methods launch depends on nothing but the values of tensors: those of the inputs and those that `replan`
    fills.
    """

    def replan(self, inputs: StepInputs) -> None:
        """Prepare the next replay, on the current stream.

        Args:
            inputs: the same tensors with new values, as many rows, other pages.
        """
        ...


class AttentionBackend(Protocol):
    """Plans steps."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def plan(self, inputs: StepInputs) -> AttentionStep:
        """Prepare one step.

        Args:
            inputs: the rank's view of the plan.
        """
        ...

    def plan_static(self, inputs: StepInputs) -> StaticStep:
        """Prepare a step for many decode batches of one size.

        Called only where the capabilities say `can_capture`. Its methods raise NotRecordableError, before anything is
        recorded, for a layer that needs what cannot be.

        Args:
            inputs: of a decode batch; its tensors keep their places and are overwritten before each replay.
        """
        ...
