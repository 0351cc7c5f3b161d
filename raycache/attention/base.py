"""The interface of attention backends. A backend plans steps; a step is planned once and serves all layers.

Every backend implements every method, and lists what it supports in its capabilities. Models use a step only through
layers.forward_pass.ForwardPass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.state_space import StateSpace
from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

# Shapes in this file: T_local new tokens of this rank, T new tokens of all cp ranks, Hq query heads, Hkv key heads,
# D head size.


@dataclass(frozen=True)
class Capabilities:
    """What a backend supports.

    Attributes:
        name: for messages.
        device_types: such as "cpu", "cuda".
        dtypes: of queries and cache, such as "float32".
        can_capture: whether decode steps can be captured in CUDA graphs.
    """

    name: str
    device_types: frozenset[str]
    dtypes: frozenset[str]
    can_capture: bool = False


@dataclass(frozen=True)
class LatentProjection:
    """Projection of latents to keys and values of this rank's heads.

    Attributes:
        key: [Hq, Dn, R]; the plain part of head h's key is key[h] @ latent.
        value: [Hq, Dv, R].
    """

    key: Tensor
    value: Tensor


class Selection(Protocol):
    """The tokens that each new token attends to, made by a backend's `select`; opaque to models."""


class AttentionStep(Protocol):
    """Attention of one step. All methods are collective over cp."""

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """Store this rank's share of the new keys and values in the cache, and compute attention of the new queries.

        Args:
            view: of the layer, with its window.
            q: [T_local, Hq, D].
            k, v: [T_local, Hkv, D].
            scale: of the scores, such as D ** -0.5.
            sinks: [Hq], score of an additional key per head whose value is zero; or None.
        Returns:
            [T_own, H_own, D], the tokens and heads that this rank continues with (see `Exchange`).
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
        """Store this rank's share of the new latents in the cache, and compute attention of the new queries to them.

        Args:
            q: [T_local, Hq, Dn + Dr], rotary part last.
            latent: [T_local, R], normalised.
            rope: [T_local, Dr], rotated rotary part of the keys, shared by all heads.
            scale: of the scores.
            selection: made by `select` in this step, or None for all earlier tokens.
        Returns:
            [T_own, H_own, Dv], as in `attend`.
        """
        ...

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        """Store this rank's share of the new index keys; select the `top_k` tokens with the highest scores per query.

        The score of a key is the sum over heads of weight * relu(q . k) ("DeepSeek-V3.2", section 2.1); of equal
        scores, the earlier token's wins. A query selects among itself and all tokens before it.

        Args:
            q: [T_local, Hi, D].
            k: [T_local, D].
            weights: [T_local, Hi], all scales included.
        """
        ...

    @property
    def recurrent(self) -> RecurrentStep:
        """Convolutions and scans of recurrent layers."""
        ...

    @property
    def exchange(self) -> Exchange:
        """Exchange of tokens and heads between cp ranks."""
        ...


class RecurrentStep(Protocol):
    """Recurrent layers in one step: convolutions and scans alone, or all that a layer does between its projections."""

    def convolve(self, view: StateView, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Short causal convolution of each channel; its last inputs are read from and written to the layer's states.

        Args:
            name: of the convolution.
            x: [T, H, D], all tokens and this rank's recurrent heads.
            weight: [H, D, K], the tap of the newest input last.
            bias: [H, D] or None.
        Returns:
            [T, H, D], before any activation.
        """
        ...

    def scan(self, view: StateView, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """Linear attention with decay; S is read from and written to the layer's states.

        Per head, S [Dk, Dv] in float32:

            S <- exp(g_t) S
            S <- S + k_t v_t^T,  or with beta  S <- S + beta_t k_t (v_t - S^T k_t)^T
            out_t = S^T q_t

        Args:
            q, k: [T, Hk, Dk]; value head i uses key head i // (Hv / Hk).
            v: [T, Hv, Dv].
            g: [T, Hv, 1] or [T, Hv, Dk] float32, log of the decay.
            beta: [T, Hv] for the delta rule, or None.
        Returns:
            [T, Hv, Dv].
        """
        ...

    def state_space(
        self, view: StateView, weights: StateSpace, *, x: Tensor, b: Tensor, c: Tensor, dt: Tensor
    ) -> Tensor:
        """A Mamba2 layer between its projection and its norm, see state_space.py.

        Args:
            x: [T, H, P].
            b, c: [T, G, N].
            dt: [T, H], before its bias.
        Returns:
            [T, H, P] in x's dtype.
        """
        ...

    def delta_rule(
        self, view: StateView, weights: DeltaRule, *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """A gated delta net or KDA layer between its projections and its norm, see delta_rule.py.

        Args:
            q, k: [T, Hk, Dk].
            v: [T, Hv, Dv].
            decay: [T, Hv, 1] or [T, Hv, Dk], before the gate.
            beta: [T, Hv], before the sigmoid.
        Returns:
            [T, Hv, Dv] in v's dtype.
        """
        ...


class NotRecordableError(Exception):
    """A layer cannot be captured in a CUDA graph."""


class StaticStep(AttentionStep, Protocol):
    """A step of a decode batch that is captured in a CUDA graph and replayed with other rows.

    What its methods launch depends only on the values of tensors: those of the inputs, and those set by `replan`.
    """

    def replan(self, inputs: StepInputs) -> None:
        """Prepare the next replay, on the current stream.

        Args:
            inputs: the same tensors with new values, with the same number of rows (with chunks: of tokens) and other
                pages.
        """
        ...


class AttentionBackend(Protocol):
    """Plans the attention of steps."""

    @property
    def capabilities(self) -> Capabilities:
        """What the backend supports."""
        ...

    def plan(self, inputs: StepInputs) -> AttentionStep:
        """Plan one step."""
        ...

    def plan_static(self, inputs: StepInputs, *, has_chunks: bool = False) -> StaticStep:
        """Plan a step for batches of one size; only if `can_capture`.

        The methods of the step raise NotRecordableError for layers that cannot be captured, before they are.

        Args:
            inputs: of the batch; its tensors stay at their addresses and are overwritten before each replay.
            has_chunks: whether rows may have any number of tokens, with one cp rank; otherwise each has one.
        """
        ...
