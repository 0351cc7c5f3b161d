"""Mixture of experts: feed-forward blocks of which each token passes through a few.

Over tp every rank holds a slice of the inner features of every expert, so that whatever the router chooses, all ranks
have the same work:

    expert     0    1    2    3
    tp rank 0  [==] [==] [==] [==]      one half of the features of each; outputs are parts of a sum, which
    tp rank 1  [==] [==] [==] [==]      the other half; is taken once for routed and shared experts
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.attention.base import NotRecordableError
from raycache.layers.activation import Activation
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, Weight, linear
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise_dtype
from raycache.layers.router import Router

if TYPE_CHECKING:
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens of this rank, C hidden size, E experts that this rank holds, k experts per token,
# I inner features of one expert on this rank, F = 2 I in front of a gated activation and I in front of a plain one.

BLOCK = 1024
"""Tokens whose experts' outputs are added up at a time, in float32."""


class RoutedExperts(Protocol):
    """Experts that a router chooses of."""

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """This rank's part of the sum over each token's experts.

        Args:
            x: [T, C].
            weights: [T, k] float32.
            ids: [T, k], which experts.
        Returns:
            New [T, C], added up in at least float32.
        """
        ...


class Experts:
    """The routed experts, each on the tokens that chose it.

    Args:
        up: [E, F, C], with gate and up stacked, gate first, where the activation is gated.
        down: [E, C, I].
        activation: [n, F] -> [n, I].
        up_bias: [E, F], or None.
        down_bias: [E, C], or None; given to one rank of those whose outputs are added up.
        held: ids of the experts that the rows of the weights are. All of them while experts are split by features;
            a run of them when each rank is to hold some experts whole: tokens of other experts add nothing here.
    """

    def __init__(
        self,
        up: Tensor,
        down: Tensor,
        *,
        activation: Activation,
        held: range,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        assert len(held) == up.shape[0] == down.shape[0], "one row of the weights per expert"
        self.held = held
        self._up = up
        self._down = down
        self._activation = activation
        self._up_bias = up_bias
        self._down_bias = down_bias

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if not len(x):
            return torch.zeros_like(x)
        order = ids.flatten().argsort(stable=True)  # pairs of token and expert, by expert
        if self._can_group(x):
            return self._grouped(x, weights, ids.flatten()[order], order)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotRecordableError(f"experts of these sizes in {x.dtype} run one by one")
        tokens, shares = order // ids.shape[1], weights.flatten()[order, None]
        counts = ids.flatten().bincount(minlength=self.held.stop).tolist()
        total = torch.zeros_like(x, dtype=precise_dtype(x.dtype))
        stop = sum(counts[: self.held.start])
        for row, expert in enumerate(self.held):
            start, stop = stop, stop + counts[expert]
            if start < stop:
                here = tokens[start:stop]
                total.index_add_(0, here, self._run(row, x[here]) * shares[start:stop])
        return total.to(x.dtype)

    def _can_group(self, x: Tensor) -> bool:
        """Whether a grouped matrix product takes all experts at once: it wants rows of whole 16 bytes."""
        features = (x.shape[1], self._up.shape[1], self._down.shape[2])
        if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
            return (
                False  # elsewhere torch takes one expert after another too, and asks the device how many rows each has
            )
        is_fit = x.dtype == torch.bfloat16 and self.held.start == 0
        return is_fit and all(size % 8 == 0 for size in features)

    def _grouped(self, x: Tensor, weights: Tensor, chosen: Tensor, order: Tensor) -> Tensor:
        """All experts in two launches, however many tokens each has; nothing of it depends on numbers of the host.

        Args:
            x: [T, C].
            weights: [T, k].
            chosen: [T * k], expert of each pair, ascending.
            order: [T * k], which pair, as counted over `weights`.
        """
        num_chosen = weights.shape[1]
        held = torch.arange(self.held.stop, device=x.device)
        ends = torch.searchsorted(chosen, held, right=True).to(torch.int32)
        inner = F.grouped_mm(x[order // num_chosen], self._up.mT, offs=ends)
        if self._up_bias is not None:
            inner += self._up_bias[chosen.clamp(max=self.held.stop - 1)]
        out = F.grouped_mm(self._activation(inner), self._down.mT, offs=ends)
        if self._down_bias is not None:
            out += self._down_bias[chosen.clamp(max=self.held.stop - 1)]
        # Rows behind the last group are nobody's; what they hold was never written.
        out.masked_fill_((chosen >= self.held.stop)[:, None], 0)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view_as(weights)
        parts = [
            torch.einsum("tkc,tk->tc", out[place].to(weights.dtype), share)
            for place, share in zip(places.split(BLOCK), weights.split(BLOCK), strict=True)
        ]
        return torch.cat(parts).to(x.dtype)

    def _run(self, row: int, x: Tensor) -> Tensor:
        inner = F.linear(x, self._up[row], None if self._up_bias is None else self._up_bias[row])
        bias = None if self._down_bias is None else self._down_bias[row]
        return F.linear(self._activation(inner), self._down[row], bias)


class LatentExperts:
    """Routed experts of fewer features than the layer: into their space, through them, and back.

    The way back is linear, so that it can be taken by a part of their sum.

    Args:
        into: [L, C].
        back: [C, L].
        experts: of L features.
    """

    def __init__(self, into: Tensor, back: Tensor, experts: RoutedExperts) -> None:
        self._into = into
        self._back = back
        self._experts = experts

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return F.linear(self._experts(F.linear(x, self._into), weights, ids), self._back)


class NormedLatentExperts:
    """The same with a norm of their sum before the way back, for which the parts of all tp ranks are added up.

    Args:
        into: [L, C].
        back: [C, L / tp], of this rank's share of the features.
        experts: of L features.
        norm: of L features.
        taken: this rank's share of them.
        group: the tp group.
    """

    def __init__(
        self, into: Tensor, back: Tensor, experts: RoutedExperts, *, norm: RMSNorm, taken: range, group: Group
    ) -> None:
        self._into = into
        self._back = back
        self._experts = experts
        self._norm = norm
        self._taken = slice(taken.start, taken.stop)
        self._group = group

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        latent = self._group.all_reduce(self._experts(F.linear(x, self._into), weights, ids))
        return F.linear(self._norm(latent)[:, self._taken], self._back)


class SharedExpert:
    """The expert that every token passes through; its output is this rank's part of a sum.

    Args:
        up: gate and up stacked, or up alone: C to F features.
        down: [C, I].
        activation: [T, F] -> [T, I].
        gate: [1, C], whose sigmoid says how much it counts for a token, or None.
    """

    def __init__(self, up: ColumnLinear, down: Weight, *, activation: Activation, gate: Tensor | None = None) -> None:
        self._up = up
        self._down = down
        self._activation = activation
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, C]."""
        out = linear(self._activation(self._up(x)), self._down)
        return out if self._gate is None else out.mul_(F.linear(x, self._gate).sigmoid())


class MixtureOfExperts:
    """Routed experts and, where there is one, the shared expert: a layer's feed-forward part.

    Args:
        router: chooses experts; whole on every rank.
        experts: routed ones.
        group: the tp group, over which outputs are added up.
        shared: expert of all tokens, or None.
    """

    def __init__(
        self,
        router: Router,
        experts: RoutedExperts,
        group: Group,
        *,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._group = group
        self._shared = shared

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        out = self._experts(x, *self._router(x))
        if self._shared is not None:
            out.add_(self._shared(x))
        return self._group.all_reduce(out)
