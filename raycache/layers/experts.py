"""Mixture of experts.

Every tp rank holds a slice of the inner features of every expert, so that all ranks have the same work whatever the
router chooses:

    expert     0    1    2    3
    tp rank 0  [==] [==] [==] [==]      one half of the features of each expert
    tp rank 1  [==] [==] [==] [==]      the other half

The outputs are partial sums; routed and shared experts share one all-reduce over tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.attention.base import NotRecordableError
from raycache.layers.activation import Activation, recipe
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.fused_experts import FusedExperts
from raycache.layers.linear import ColumnLinear, Weight, linear
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise_dtype
from raycache.layers.router import Router

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens of this rank, C hidden size, E experts on this rank, k experts per token, I inner
# features of one expert on this rank, F = 2 I for gated activations, else I.

BLOCK = 1024
"""Tokens whose experts' outputs are summed at a time, in float32."""


class RoutedExperts(Protocol):
    """Experts chosen by a router."""

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """This rank's partial sum over the experts of each token.

        Args:
            x: [T, C].
            weights: [T, k], at least float32.
            ids: [T, k], expert ids.
        Returns:
            New [T, C] in the dtype of x, summed in at least float32.
        """
        ...

    def over_cp(self, split: CpSplit) -> RoutedExperts:
        """The same with partial sums over tp x cp; raises NotSplitError."""
        ...


class Experts:
    """Routed experts.

    Args:
        up: [E, F, C]; for gated activations, gate and up stacked, gate first. Also as several tensors [E, f, C].
        down: [E, C, I].
        activation: [n, F] -> [n, I].
        up_bias: [E, F], or None.
        down_bias: [E, C], or None; on one tp rank only, since outputs are summed.
        held: ids of the E experts; choices of other experts contribute nothing here.
        num_shared: so many of them, the last ones, are shared experts, which the router chooses for every token.
    """

    def __init__(
        self,
        up: Tensor | Sequence[Tensor],
        down: Tensor,
        *,
        activation: Activation,
        held: range,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        num_shared: int = 0,
    ) -> None:
        self.num_shared = num_shared
        self._up = (up,) if isinstance(up, Tensor) else tuple(up)
        assert {len(part) for part in (*self._up, down)} == {len(held)}, "one row of the weights per expert"
        self.held = held
        self._down = down
        self._activation = activation
        self._up_bias = up_bias
        self._down_bias = down_bias
        self._fused = None
        if held.start == 0:
            biases = {"up_bias": up_bias, "down_bias": down_bias}
            self._fused = FusedExperts.of(self._up, down, activation=activation, **biases)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if not len(x):
            return torch.zeros_like(x)
        if self._fused is not None and self._fused.takes(x):
            return self._fused(x, weights, ids)
        order = ids.flatten().argsort(stable=True)  # (token, choice) pairs, by expert
        if self._can_group(x):
            return self._grouped(x, weights, ids.flatten()[order], order)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotRecordableError(f"experts of these sizes in {x.dtype} run one after another")
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
        """Whether one grouped matrix product can run all experts; its rows must be multiples of 16 bytes."""
        features = (x.shape[1], *(part.shape[1] for part in self._up), self._down.shape[2])
        if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
            return False  # torch's fallback also runs experts one after another, and waits for the device
        is_fit = x.dtype == torch.bfloat16 and self.held.start == 0
        return is_fit and all(size % 8 == 0 for size in features)

    def _grouped(self, x: Tensor, weights: Tensor, chosen: Tensor, order: Tensor) -> Tensor:
        """Run all experts in two grouped products, without waiting for the device.

        Args:
            x: [T, C].
            weights: [T, k].
            chosen: [T * k], expert of each (token, choice) pair, ascending.
            order: [T * k], index of each of these pairs in `weights`.
        """
        num_chosen = weights.shape[1]
        held = torch.arange(self.held.stop, device=x.device)
        ends = torch.searchsorted(chosen, held, right=True).to(torch.int32)
        rows = x[order // num_chosen]
        inner = _beside([F.grouped_mm(rows, part.mT, offs=ends) for part in self._up])
        if self._up_bias is not None:
            inner += self._up_bias[chosen.clamp(max=self.held.stop - 1)]
        out = F.grouped_mm(self._activation(inner), self._down.mT, offs=ends)
        if self._down_bias is not None:
            out += self._down_bias[chosen.clamp(max=self.held.stop - 1)]
        # Rows after the last group belong to no expert here and were not written.
        out.masked_fill_((chosen >= self.held.stop)[:, None], 0)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view_as(weights)
        parts = [
            torch.einsum("tkc,tk->tc", out[some].to(weights.dtype), share)
            for some, share in zip(places.split(BLOCK), weights.split(BLOCK), strict=True)
        ]
        return torch.cat(parts).to(x.dtype)

    def _run(self, row: int, x: Tensor) -> Tensor:
        sizes = [part.shape[1] for part in self._up]
        biases = [None] * len(sizes) if self._up_bias is None else self._up_bias[row].split(sizes)
        inner = _beside([F.linear(x, part[row], own) for part, own in zip(self._up, biases, strict=True)])
        bias = None if self._down_bias is None else self._down_bias[row]
        return F.linear(self._activation(inner), self._down[row], bias)

    def over_cp(self, split: CpSplit) -> Experts:
        """Each cp rank has its run of the inner features of each expert."""
        (up,) = self._up
        matrices = up.shape[1] // self._down.shape[2]  # gate and up, or up alone
        parts = up.unflatten(1, (matrices, -1))
        own = parts[:, :, split.part(parts.shape[2], what="inner features of experts")]
        return Experts(
            own.unbind(1),
            split.columns(self._down),
            activation=self._activation,
            held=self.held,
            up_bias=None if self._up_bias is None else split.numbers(self._up_bias, matrices=matrices),
            down_bias=self._down_bias if split.cp.rank == 0 else None,
            num_shared=self.num_shared,
        )


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=-1)


class LatentExperts:
    """Routed experts with L features, fewer than the hidden size, between a down and an up projection.

    The up projection is linear, so it can be applied to partial sums.

    Args:
        down: [L, C].
        up: [C, L].
    """

    def __init__(self, down: Tensor, up: Tensor, experts: RoutedExperts) -> None:
        self._down = down
        self._up = up
        self._experts = experts

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return linear(self._experts(linear(x, self._down), weights, ids), self._up)

    def over_cp(self, split: CpSplit) -> LatentExperts:
        """Only the experts are split: the projections are as small as one of them."""
        return LatentExperts(self._down, self._up, self._experts.over_cp(split))


class NormedLatentExperts:
    """Like `LatentExperts`, with a norm of the experts' sum, which therefore needs an all-reduce of its own.

    Args:
        down: [L, C].
        up: [C, L / tp].
        norm: of L features.
        taken: this rank's share of the L features.
        group: the tp group.
    """

    def __init__(
        self, down: Tensor, up: Tensor, experts: RoutedExperts, *, norm: RMSNorm, taken: range, group: Group
    ) -> None:
        self._down = down
        self._up = up
        self._experts = experts
        self._norm = norm
        self._taken = slice(taken.start, taken.stop)
        self._group = group

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        latent = self._group.all_reduce(self._experts(linear(x, self._down), weights, ids))
        return linear(self._norm(latent)[:, self._taken], self._up)

    def over_cp(self, split: CpSplit) -> NormedLatentExperts:
        """The experts and the up projection are split."""
        own, part = copy(self), split.part(self._up.shape[1], what="latent features")
        own._up, own._experts = split.columns(self._up), self._experts.over_cp(split)
        own._taken = slice(self._taken.start + part.start, self._taken.start + part.stop)
        own._group = split.stage
        return own


class SharedExpert:
    """The expert of all tokens; its output is this rank's partial sum.

    Args:
        up: C -> F features; for gated activations, gate and up stacked, gate first.
        down: [C, I].
        activation: [T, F] -> [T, I].
        gate: [1, C]; the output is multiplied by sigmoid(gate x). None for no gate.
    """

    def __init__(self, up: ColumnLinear, down: Weight, *, activation: Activation, gate: Tensor | None = None) -> None:
        self.gate = gate
        self._up = up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, C]."""
        out = linear(self._activation(self._up(x)), self._down)
        return out if self.gate is None else out.mul_(linear(x, self.gate).sigmoid())

    def as_routed(self, inner: int, activation: Activation) -> tuple[Tensor, Tensor] | None:
        """Matrices of S routed experts with `inner` inner features that compute the same, the gate aside.

        Returns:
            up [S, F, C] and down [S, C, inner]; None if there are none, or a kernel has to know `activation`.
        """
        up, down = self._up.weight, self._down
        if not isinstance(up, Tensor) or not isinstance(down, Tensor) or self._up.bias is not None:
            return None
        found = recipe(activation)
        if found is None or found != recipe(self._activation) or down.shape[1] % inner:
            return None
        parts = up.unflatten(0, (1 + found.is_gated, -1, inner))
        return parts.transpose(0, 1).flatten(1, 2), down.unflatten(1, (-1, inner)).transpose(0, 1)

    def over_cp(self, split: CpSplit) -> SharedExpert:
        """Each cp rank has its run of the inner features."""
        matrices = self._up.weight.shape[0] // self._down.shape[1]  # gate and up, or up alone
        up = self._up.own_features(split, matrices=matrices)
        return SharedExpert(up, split.columns(self._down), activation=self._activation, gate=self.gate)


class MixtureOfExperts:
    """Routed experts, and the shared expert if there is one; `group` is the tp group."""

    is_position_wise = True

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

    def over_cp(self, split: CpSplit) -> MixtureOfExperts:
        """The same with the inner features of all experts split over cp."""
        shared = None if self._shared is None else self._shared.over_cp(split)
        return MixtureOfExperts(self._router, self._experts.over_cp(split), split.stage, shared=shared)
