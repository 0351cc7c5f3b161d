"""Reading Mamba2 layers: their sizes, what they keep, how they are split, and their tensors as checkpoints name them.

Checkpoints pack rows of different meaning into one tensor; a rank takes a run of each:

    in_proj    [ z | x | B | C | dt ]      of H P, H P, G N, G N and H rows
    conv1d         [ x | B | C ]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.layers.mamba2 import GatedGroupNorm, Mamba2, StateSpace, Taps, silu_gate
from raycache.layers.scaled import ScaledProjection
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, recurrent
from raycache.parallel.sharding import HeadCount, even_range, shared_head_range, state_part

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

# Shapes in this file: H heads of P features, G groups of N state features, K taps; of the whole model.


@dataclass(frozen=True)
class Mamba2Config:
    """The Mamba2 layers of a model.

    Attributes:
        heads, head_dim: H and P.
        groups, state_dim: G and N; heads of a group share B and C.
        kernel: K.
        has_bias: of both projections.
        has_conv_bias: of the convolution.
        dt_limit: smallest and largest step.
        has_norm: before the output projection; without, there is the gate alone.
        factors: of z, x, B, C and dt behind their projection; empty for none.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    has_bias: bool
    has_conv_bias: bool
    dt_limit: tuple[float, float]
    has_norm: bool = True
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of B, and of C, of all groups."""
        return self.groups * self.state_dim


def require_groups(file: ConfigFile, mamba: Mamba2Config) -> Mamba2Config:
    """Refuse sizes that no layer can have; returns `mamba`.

    Raises:
        CheckpointError: says which.
    """
    if mamba.heads % mamba.groups:
        raise CheckpointError(f"{file.path}: {mamba.groups} groups do not divide the {mamba.heads} heads of Mamba2")
    if mamba.kernel < 2:
        raise CheckpointError(f"{file.path}: a convolution of {mamba.kernel} tap is not supported; at least 2 are")
    return mamba


def mamba2_component(mamba: Mamba2Config, layers: Sequence[int], fmt: CacheFormat) -> Component:
    """What `layers` carry on: the state, and the last inputs of the convolutions of x, B and C."""
    per_group = (mamba.groups, mamba.state_dim)
    return recurrent(
        layers,
        heads=mamba.heads,
        key_dim=mamba.state_dim,
        value_dim=mamba.head_dim,
        fmt=fmt,
        conv=[("x", mamba.heads, mamba.head_dim), ("b", *per_group), ("c", *per_group)],
        conv_kernel=mamba.kernel,
    )


def mamba2_head_counts(mamba: Mamba2Config, *, heads_key: str, groups_key: str) -> tuple[HeadCount, ...]:
    """What is divided, under the names of config.json. Groups are shared like KV heads, over tp and over tp x cp."""
    return (
        HeadCount(heads_key, mamba.heads, over_cp=True),
        HeadCount(groups_key, mamba.groups, is_shared=True),
        HeadCount(groups_key, mamba.groups, is_shared=True, over_cp=True),
    )


def load_mamba2(
    layer: int,
    at: str,
    mamba: Mamba2Config,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    size: int,
    eps: float,
) -> Mamba2:
    """Read the layer whose tensors begin with `at`; `size` is the hidden size, `eps` of its norm."""
    heads = even_range(mamba.heads, ctx.tp.rank, ctx.tp.size)
    groups = shared_head_range(mamba.groups, ctx.tp.rank, ctx.tp.size)
    of_heads, of_groups = features(heads, mamba.head_dim), features(groups, mamba.state_dim)
    taken = _packed((mamba.inner, of_heads), *_conv_runs(mamba, of_heads, of_groups), (mamba.heads, heads))
    num_rows = 2 * mamba.inner + 2 * mamba.shared + mamba.heads
    project: Callable[[Tensor], Tensor] = weights.column(
        [Columns(f"{at}.in_proj", num_rows, run) for run in taken], inputs=size, has_bias=mamba.has_bias
    )
    if mamba.factors:
        per_row = [factor for factor, run in zip(mamba.factors, taken, strict=True) for _ in run]
        project = ScaledProjection(project, torch.tensor(per_row, dtype=weights.precise, device=ctx.device))
    return Mamba2(
        layer,
        project,
        _load_state_space(at, mamba, weights, ctx),
        _load_norm(at, mamba, weights, ctx, of_heads=of_heads, groups=groups, eps=eps) if mamba.has_norm else silu_gate,
        weights.row(f"{at}.out_proj", outputs=size, inputs=mamba.inner, taken=of_heads, has_bias=mamba.has_bias),
        heads=(len(heads), mamba.head_dim),
        groups=(len(groups), mamba.state_dim),
    )


def _load_norm(
    at: str,
    mamba: Mamba2Config,
    weights: ShardedWeights,
    ctx: ParallelContext,
    *,
    of_heads: range,
    groups: range,
    eps: float,
) -> GatedGroupNorm:
    return GatedGroupNorm(
        weights.cut(f"{at}.norm.weight", (mamba.inner,), axis=0, taken=of_heads),
        groups=groups,
        num_groups=mamba.groups,
        size=mamba.inner // mamba.groups,
        eps=eps,
        group=ctx.tp,
    )


def _load_state_space(at: str, mamba: Mamba2Config, weights: ShardedWeights, ctx: ParallelContext) -> StateSpace:
    part = state_part(ctx.split, ctx.coords)
    heads, groups = shared_head_range(mamba.heads, *part), shared_head_range(mamba.groups, *part)
    runs = _packed(*_conv_runs(mamba, features(heads, mamba.head_dim), features(groups, mamba.state_dim)))
    dims = (mamba.head_dim, mamba.state_dim, mamba.state_dim)
    x, b, c = (_load_taps(f"{at}.conv1d", mamba, weights, run, dim) for run, dim in zip(runs, dims, strict=True))
    dt_bias, a_log, skip = (
        weights.cut(f"{at}.{name}", (mamba.heads,), axis=0, taken=heads, dtype=weights.precise)
        for name in ("dt_bias", "A_log", "D")
    )
    return StateSpace(x, b, c, dt_bias=dt_bias, decay=-a_log.exp(), skip=skip, dt_limit=mamba.dt_limit)


def _load_taps(at: str, mamba: Mamba2Config, weights: ShardedWeights, taken: range, dim: int) -> Taps:
    channels = mamba.inner + 2 * mamba.shared
    weight = weights.cut(f"{at}.weight", (channels, 1, mamba.kernel), axis=0, taken=taken)
    bias = weights.cut(f"{at}.bias", (channels,), axis=0, taken=taken) if mamba.has_conv_bias else None
    return Taps(weight.view(-1, dim, mamba.kernel), None if bias is None else bias.view(-1, dim))


def _conv_runs(mamba: Mamba2Config, of_heads: range, of_groups: range) -> tuple[tuple[int, range], ...]:
    """What goes through the convolution, see `_packed`."""
    return (mamba.inner, of_heads), (mamba.shared, of_groups), (mamba.shared, of_groups)


def _packed(*parts: tuple[int, range]) -> list[range]:
    """(rows, those wanted) of parts that lie one after another -> the wanted rows of the whole."""
    runs, start = [], 0
    for rows, wanted in parts:
        runs.append(range(start + wanted.start, start + wanted.stop))
        start += rows
    return runs


def read_dt_limit(file: ConfigFile) -> tuple[float, float]:
    """`time_step_limit`, without limits when it is missing or null.

    Raises:
        CheckpointError: it is no pair of numbers, smallest first.
    """
    limit = file.raw("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    numbers = [_number(value) for value in limit] if isinstance(limit, list) else []
    match numbers:
        case [float(low), float(high)] if 0 <= low < high:
            return low, high
    raise CheckpointError(f"{file.path}: time_step_limit must be two numbers, smallest first, got {limit!r}")


def _number(value: object) -> float | None:
    """A number; infinite where it is beyond float32, in which steps are computed: some files say 1e308."""
    # Infinity is no JSON: transformers 5 writes {"__float__": "Infinity"}, versions before it Infinity, others strings.
    if isinstance(value, dict):
        value = value.get("__float__")
    if value in ("Infinity", "inf"):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return math.inf if value > _MAX_FLOAT32 else float(value)


_MAX_FLOAT32 = torch.finfo(torch.float32).max
