"""The feed-forward part of a layer that has an MLP and routed experts beside each other, as in Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.experts import RoutedExperts
from raycache.layers.feed_forward import FeedForward
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.norm import RMSNorm
from raycache.layers.router import Router

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens of this rank, C hidden size, E experts, k of them per token.


@dataclass(frozen=True)
class Way:
    """One of the two, between its norms.

    Attributes:
        before, after: norms of what it takes and gives.
    """

    before: RMSNorm
    after: RMSNorm


class MlpAndExperts:
    """hidden + after(mlp way(hidden) + experts' way(hidden)).

    Args:
        mlp, experts: the two, each with its norms in `ways`.
        ways: of the MLP, of the experts.
        router: takes the hidden state as it is.
        after: norm of the sum.
        group: the tp group, over which the experts' outputs are added up.
    """

    def __init__(
        self,
        mlp: FeedForward,
        experts: RoutedExperts,
        ways: tuple[Way, Way],
        *,
        router: Router,
        after: RMSNorm,
        group: Group,
    ) -> None:
        self._mlp = mlp
        self._experts = experts
        self._ways = ways
        self._router = router
        self._after = after
        self._group = group

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        dense, routed = self._ways
        out = dense.after(self._mlp(dense.before(hidden), run))
        chosen = self._experts(routed.before(hidden), *self._router(hidden))
        out += routed.after(self._group.all_reduce(chosen))
        return self._after(out).add_(hidden)


class ScaledRouter:
    """A router with a norm in front and a factor per expert behind.

    Args:
        norm: of the hidden state; its weight is all that scales it.
        router: with weights that sum to one.
        factors: [E] float32.
    """

    def __init__(self, norm: RMSNorm, router: Router, factors: Tensor) -> None:
        self._norm = norm
        self._router = router
        self._factors = factors

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self._router(self._norm(x))
        return weights * self._factors[ids], ids


class LayerScale:
    """hidden * scale, behind a layer.

    Args:
        scale: [1].
    """

    def __init__(self, scale: Tensor) -> None:
        self._scale = scale

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return hidden * self._scale
