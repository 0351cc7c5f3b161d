"""Mamba2: a state per head with an input-dependent decay ("Transformers are SSMs", arXiv 2405.21060).

    z, x, B, C, dt = in_proj(u)
    y              = attention/state_space.py(x, B, C, dt)
    out            = out_proj(group_norm(y * silu(z)) * weight)

Projections, z and the norm cover the tokens of this cp rank and the heads of this tp rank. The convolutions and the
recurrence, between two exchanges over cp, cover all tokens and this rank's share of the heads over tp x cp.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.attention.state_space import StateSpace, Taps
from raycache.layers import fused
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import Projection, RowLinear
from raycache.layers.mamba2_config import Mamba2Config
from raycache.layers.precision import precise
from raycache.layers.scaled import ScaledProjection
from raycache.layers.weights import Columns, ShardedWeights, features

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.parallel.collectives import Group

# Shapes in this file: T tokens of this cp rank, C hidden size, F = H P features of H heads, G groups of N state
# features (the heads of a group share B and C).


class GatedGroupNorm:
    """RMSNorm of y * silu(z) over the features of each group, in at least float32.

    If tp splits groups, each rank has an equal part of one group, and sums of squares are reduced over tp.

    Args:
        weight: [F], of this rank's features.
        groups: groups that these features belong to.
        num_groups: of the whole model.
        size: features of a whole group.
        group: the tp group.
    """

    def __init__(self, weight: Tensor, *, groups: range, num_groups: int, size: int, eps: float, group: Group) -> None:
        self._weight = weight
        self._groups = groups
        self._num_groups = num_groups
        self._size = size
        self._eps = eps
        self._group = group
        self._is_split = weight.shape[0] < len(groups) * size

    def __call__(self, y: Tensor, z: Tensor) -> Tensor:
        """[T, F], [T, F] -> new [T, F] in the dtype of z."""
        if not self._is_split:
            parts, gate = (part.unflatten(1, (len(self._groups), self._size)) for part in (y, z))
            normed = fused.gated_norm(parts, gate, self._weight, self._eps, activation="silu", is_gated_first=True)
            return normed.flatten(1)
        gated = F.silu(precise(z)) * y
        normed = gated * torch.rsqrt(self._sum_of_squares(gated) / self._size + self._eps)
        return (normed * self._weight).to(z.dtype)

    def _sum_of_squares(self, gated: Tensor) -> Tensor:
        """Sum over the whole group that these features are a part of: [T, F] -> [T, 1]."""
        sums = gated.new_zeros(gated.shape[0], self._num_groups)
        own = slice(self._groups.start, self._groups.stop)
        sums[:, own] = gated.square().sum(dim=1, keepdim=True)
        return self._group.all_reduce(sums)[:, own]


def silu_gate(y: Tensor, z: Tensor) -> Tensor:
    """y * silu(z), for models without the norm: [T, F], [T, F] -> new [T, F] in the dtype of z."""
    return (F.silu(precise(z)) * y).to(z.dtype)


class Mamba2:
    """A Mamba2 mixer.

    Args:
        layer: index in the whole model.
        project: projection to z, x, B, C and dt.
        norm: (y, z) -> gated output, normalised or not.
        heads: H and P of this tp rank.
        groups: G and N of this tp rank.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        project: Projection,
        weights: StateSpace,
        norm: Callable[[Tensor, Tensor], Tensor],
        out: RowLinear,
        *,
        heads: tuple[int, int],
        groups: tuple[int, int],
    ) -> None:
        self._layer = layer
        self._project = project
        self._weights = weights
        self._norm = norm
        self._out = out
        self._heads = heads
        self._groups = groups
        inner, shared = heads[0] * heads[1], groups[0] * groups[1]
        self._sizes = (inner, inner, shared, shared, heads[0])

    def __call__(self, u: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        z, x, b, c, dt = self._project(u).split(self._sizes, dim=1)
        # Two exchanges: one per head and one per group, since ranks may share groups.
        x, dt = run.step.exchange.to_heads(x.unflatten(1, self._heads), dt[..., None])
        b, c = run.step.exchange.to_heads(b.unflatten(1, self._groups), c.unflatten(1, self._groups))
        view = run.pool.state(self._layer)
        y = run.step.recurrent.state_space(view, self._weights, x=x, b=b, c=c, dt=dt[..., 0])
        return self._out(self._norm(run.step.exchange.to_tokens(y).flatten(1), z))

    def over_cp(self, split: CpSplit) -> Mamba2:
        """The same with the weights of its projections split over cp, as its states are."""
        own = copy(self)
        own._project, own._out = self._project.over_cp(split), self._out.over_cp(split, is_input_split=False)
        return own


def load_mamba2(mamba: Mamba2Config, weights: ShardedWeights, *, layer: int, size: int, eps: float) -> Mamba2:
    """Read this rank's heads and groups; `size` is C.

    Checkpoints pack several matrices into one tensor; a rank reads a slice of each:

        in_proj    [ z | x | B | C | dt ]      H P, H P, G N, G N and H rows of the whole model
        conv1d         [ x | B | C ]
    """
    heads, groups = weights.heads(mamba.heads), weights.heads(mamba.groups, is_shared=True)
    of_heads, of_groups = features(heads, mamba.head_dim), features(groups, mamba.state_dim)
    taken = _packed((mamba.inner, of_heads), *_conv_runs(mamba, of_heads, of_groups), (mamba.heads, heads))
    num_rows = 2 * mamba.inner + 2 * mamba.shared + mamba.heads
    project: Projection = weights.column(
        [Columns("in_proj", num_rows, run) for run in taken], inputs=size, has_bias=mamba.has_bias
    )
    if mamba.factors:
        per_row = [factor for factor, run in zip(mamba.factors, taken, strict=True) for _ in run]
        project = ScaledProjection(project, torch.tensor(per_row, dtype=weights.precise, device=weights.ctx.device))
    return Mamba2(
        layer,
        project,
        _load_state_space(mamba, weights),
        _load_norm(mamba, weights, of_heads=of_heads, groups=groups, eps=eps) if mamba.has_norm else silu_gate,
        weights.row("out_proj", outputs=size, inputs=mamba.inner, taken=of_heads, has_bias=mamba.has_bias),
        heads=(len(heads), mamba.head_dim),
        groups=(len(groups), mamba.state_dim),
    )


def _load_norm(
    mamba: Mamba2Config, weights: ShardedWeights, *, of_heads: range, groups: range, eps: float
) -> GatedGroupNorm:
    return GatedGroupNorm(
        weights.cut("norm.weight", (mamba.inner,), axis=0, taken=of_heads),
        groups=groups,
        num_groups=mamba.groups,
        size=mamba.inner // mamba.groups,
        eps=eps,
        group=weights.ctx.tp,
    )


def _load_state_space(mamba: Mamba2Config, weights: ShardedWeights) -> StateSpace:
    heads = weights.heads(mamba.heads, is_shared=True, over_cp=True)
    groups = weights.heads(mamba.groups, is_shared=True, over_cp=True)
    runs = _packed(*_conv_runs(mamba, features(heads, mamba.head_dim), features(groups, mamba.state_dim)))
    dims = (mamba.head_dim, mamba.state_dim, mamba.state_dim)
    x, b, c = (_load_taps(mamba, weights.under("conv1d"), run, dim) for run, dim in zip(runs, dims, strict=True))
    dt_bias, a_log, skip = (
        weights.cut(name, (mamba.heads,), axis=0, taken=heads, dtype=weights.precise)
        for name in ("dt_bias", "A_log", "D")
    )
    return StateSpace(x, b, c, dt_bias=dt_bias, decay=-a_log.exp(), skip=skip, dt_limit=mamba.dt_limit)


def _load_taps(mamba: Mamba2Config, weights: ShardedWeights, taken: range, dim: int) -> Taps:
    channels = mamba.inner + 2 * mamba.shared
    weight = weights.cut("weight", (channels, 1, mamba.kernel), axis=0, taken=taken)
    bias = weights.cut("bias", (channels,), axis=0, taken=taken) if mamba.has_conv_bias else None
    return Taps(weight.view(-1, dim, mamba.kernel), None if bias is None else bias.view(-1, dim))


def _conv_runs(mamba: Mamba2Config, of_heads: range, of_groups: range) -> tuple[tuple[int, range], ...]:
    """Parts of the convolution's channels, for `_packed`."""
    return (mamba.inner, of_heads), (mamba.shared, of_groups), (mamba.shared, of_groups)


def _packed(*parts: tuple[int, range]) -> list[range]:
    """(number of rows, taken rows) of consecutive parts -> taken rows of the whole."""
    runs, start = [], 0
    for rows, taken in parts:
        runs.append(range(start + taken.start, start + taken.stop))
        start += rows
    return runs
