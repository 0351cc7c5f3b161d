"""A feed-forward block with an MLP and routed experts in parallel, as in Gemma 4."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.experts import RoutedExperts
from raycache.layers.feed_forward import FeedForward
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.norm import RMSNorm
from raycache.layers.router import Router

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens of this rank, C hidden size, E experts, k of them per token.


@dataclass(frozen=True)
class BranchNorms:
    """Norms of a branch's input and output."""

    before: RMSNorm
    after: RMSNorm


class MlpAndExperts:
    """hidden + after(MLP branch + expert branch).

    Args:
        norms: of the MLP branch and of the expert branch.
        router: takes the hidden state before any norm.
        after: norm of the sum.
        group: the tp group.
    """

    is_position_wise = True

    def __init__(
        self,
        mlp: FeedForward,
        experts: RoutedExperts,
        norms: tuple[BranchNorms, BranchNorms],
        *,
        router: Router,
        after: RMSNorm,
        group: Group,
    ) -> None:
        self._mlp = mlp
        self._experts = experts
        self._norms = norms
        self._router = router
        self._after = after
        self._group = group

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        dense, routed = self._norms
        out = dense.after(self._mlp(dense.before(hidden), run))
        chosen = self._experts(routed.before(hidden), *self._router(hidden))
        out += routed.after(self._group.all_reduce(chosen))
        return self._after(out).add_(hidden)

    def over_cp(self, split: CpSplit) -> MlpAndExperts:
        """The same with the inner features of both branches split over cp."""
        own = copy(self)
        own._mlp, own._experts, own._group = self._mlp.over_cp(split), self._experts.over_cp(split), split.stage
        return own


class ScaledRouter:
    """A router that normalises its input and multiplies its weights by a factor per expert.

    Args:
        factors: [E], at least float32.
    """

    def __init__(self, norm: RMSNorm, router: Router, factors: Tensor) -> None:
        self._norm = norm
        self._router = router
        self._factors = factors

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self._router(self._norm(x))
        return weights * self._factors[ids], ids


class LayerScale:
    """hidden * scale, after a layer; `scale` is [1]."""

    is_position_wise = True

    def __init__(self, scale: Tensor) -> None:
        self._scale = scale

    def __call__(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return hidden * self._scale

    def over_cp(self, split: CpSplit) -> LayerScale:
        return self
