"""Grouped-query attention: configuration, cache components, weights and projections.

Attention itself is computed by the step's backend, so models do not know where keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.config_file import MAX_HEAD_DIM, ConfigFile, read_rope
from raycache.checkpoint.rope_config import RopeConfig
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import Projection, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.precision import precise
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv
from raycache.parallel.collectives import Group
from raycache.parallel.sharding import HeadCount

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens of this rank, C hidden size, Q, K and V features of this rank's query, key and
# value heads.


@dataclass(frozen=True)
class HeadShape:
    """Heads of a model or of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class AttentionConfig(HeadShape):
    """The grouped-query attention of a model.

    Attributes:
        has_bias: of the query, key and value projections.
        has_output_bias: of the output projection.
        has_qk_norm: whether each query and key head is normalised.
        has_joint_qk_norm: whether queries and keys are normalised over all heads.
        norm_offset: added to the weights of the query and key norms.
        rotary_share: share of a head's features that are rotated, the first ones.
        scale: of the scores; None for head_dim ** -0.5.
        has_sinks: whether every head has an attention sink, a key without a value.
        window: number of tokens that a query of a sliding-window layer attends to, including itself.
        windowed: sliding-window layers, ascending.
        unrotated: layers without rotary embedding.
    """

    rope: RopeConfig = field(default_factory=RopeConfig)
    has_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_joint_qk_norm: bool = False
    norm_offset: float = 0.0
    rotary_share: float = 1.0
    scale: float | None = None
    has_sinks: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    unrotated: tuple[int, ...] = ()

    def rotary(self, device: torch.device) -> Rotary:
        """Rotary embedding, to be shared by all layers."""
        return Rotary(self.rope, int(self.head_dim * self.rotary_share), device)

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """Keys and values of `layers`: one component for full layers, one for sliding-window layers."""

        def rows(name: str, layers: Sequence[int], window: int) -> tuple[Component, ...]:
            sizes = {"heads": self.num_kv_heads, "dim": self.head_dim}
            return (kv(name, layers, fmt=fmt, window=window, **sizes),) if layers else ()

        full = [layer for layer in layers if layer not in self.windowed]
        return rows("kv", full, 0) + rows("window", self.windowed, self.window)

    @property
    def head_counts(self) -> tuple[HeadCount, ...]:
        """Head counts to be split over tp."""
        return (
            HeadCount("num_attention_heads", self.num_heads),
            HeadCount("num_key_value_heads", self.num_kv_heads, is_shared=True),
        )


def read_heads(file: ConfigFile, *, default_kv_heads: int = 0) -> HeadShape:
    """Read heads; the number of KV heads defaults to that of query heads, the head size to hidden_size / num_heads."""
    num_heads = file.integer("num_attention_heads")
    num_kv_heads = file.integer("num_key_value_heads", default_kv_heads or num_heads)
    return HeadShape(num_heads, num_kv_heads, file.integer("head_dim", file.integer("hidden_size") // num_heads))


def read_stated_heads(file: ConfigFile) -> HeadShape:
    """Read heads from a file that must specify all three numbers."""
    return HeadShape(*map(file.integer, ("num_attention_heads", "num_key_value_heads", "head_dim")))


def read_attention(
    file: ConfigFile,
    heads: HeadShape,
    *,
    has_qk_norm: bool = False,
    layer_type: str = "",
    theta: float | None = None,
    rotary_share: float = 1.0,
) -> AttentionConfig:
    """Read the configuration of attention.

    Args:
        heads: of the model; their defaults differ between families.
        layer_type: whose rope parameters to read, if they differ between layer types.
        theta: default base of the rope frequencies; None makes it required.
        rotary_share: see `read_rotary_share`.
    Raises:
        CheckpointError: a key is missing, invalid or not supported.
    """
    require_heads(file, heads)
    has_bias = file.flag("attention_bias", False)
    return AttentionConfig(
        **vars(heads),
        rope=read_rope(file, layer_type=layer_type, partial=rotary_share, theta=theta),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=has_qk_norm,
        rotary_share=rotary_share,
    )


def read_rotary_share(file: ConfigFile, *, head_dim: int, default: float) -> float:
    """Read the share of a head's features that are rotated, from `partial_rotary_factor` or `rotary_dim`.

    Raises:
        CheckpointError: the keys contradict each other, or the number of rotated features is odd or out of range.
    """
    sections = (file, file.section("rope_parameters"), file.section("rope_scaling"))
    shares = [section.number("partial_rotary_factor", 0.0) for section in sections]
    shares.append(file.count("rotary_dim", 0) / head_dim)
    given = sorted({share for share in shares if share})
    if len(given) > 1:
        raise CheckpointError(f"{file.path}: partial_rotary_factor and rotary_dim contradict each other: {given}")
    share = given[0] if given else default
    rotated = int(head_dim * share)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise CheckpointError(
            f"{file.path}: {rotated} of head_dim={head_dim} features are rotated; it must be an even number of them"
        )
    return share


def require_heads(file: ConfigFile, heads: HeadShape) -> None:
    """Check head counts and sizes.

    Raises:
        CheckpointError: KV heads do not divide query heads, or the head size is odd or too large.
    """
    if heads.num_heads % heads.num_kv_heads:
        raise CheckpointError(
            f"{file.path}: num_key_value_heads={heads.num_kv_heads} does not divide "
            f"num_attention_heads={heads.num_heads}"
        )
    if heads.head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"{file.path}: head_dim={heads.head_dim} must be at most {MAX_HEAD_DIM}")
    if heads.head_dim < 2 or heads.head_dim % 2:
        raise CheckpointError(
            f"{file.path}: head_dim={heads.head_dim} must be even; rotary embedding rotates pairs of features"
        )


class SelfAttention:
    """Query, key and value projection, rotary embedding, attention, output projection.

    Args:
        layer: index in the whole model.
        qkv: projection to queries, keys and values.
        heads: of this rank.
        qk_norm: applied to query and key heads before rotation.
        scale: of the scores; None for head_dim ** -0.5.
        sinks: [num_heads], score of the attention sink of each head.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        qkv: Projection,
        out: RowLinear,
        *,
        heads: HeadShape,
        rotary: Rotary | None,
        qk_norm: HeadNorm | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._out = out
        self._num_heads = heads.num_heads
        self._num_rotated = heads.num_heads + heads.num_kv_heads
        self._shape = (self._num_rotated + heads.num_kv_heads, heads.head_dim)
        self._rotary = rotary
        self._qk_norm = qk_norm
        self._scale = heads.head_dim**-0.5 if scale is None else scale
        self._sinks = sinks

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        qkv = self._qkv(x).view(x.shape[0], *self._shape)
        qk, v = qkv[:, : self._num_rotated], qkv[:, self._num_rotated :]
        rotation = None if self._rotary is None else run.rotation(self._rotary, qk.dtype)
        if rotation is not None:
            qk = rotation(qk, norm=self._qk_norm)
        elif self._qk_norm is not None:
            qk = self._qk_norm(qk)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        if rotation is not None and rotation.query_scale is not None:
            q = q * rotation.query_scale
        view = run.pool.kv(self._layer)
        return self._out(run.step.attend(view, q, k, v, scale=self._scale, sinks=self._sinks).flatten(1))

    def over_cp(self, split: CpSplit) -> SelfAttention:
        """The same with all heads until attention, and 1 / cp of them after it."""
        split.part(self._num_heads, what="attention heads")
        own = copy(self)
        own._qkv, own._out = self._qkv.over_cp(split), self._out.over_cp(split)
        return own


class NormedProjection:
    """Projection to queries, keys and values, with queries and keys each normalised over all heads of all tp ranks.

    All ranks have the same number of features, and each shared KV head is on the same number of ranks, so the mean over
    all heads is the mean of the ranks' means.

    Args:
        q_weight, k_weight: of the norms, [Q] and [K].
        group: the tp group.
    """

    def __init__(self, qkv: Projection, q_weight: Tensor, k_weight: Tensor, *, eps: float, group: Group) -> None:
        self._qkv = qkv
        self._weights = (q_weight, k_weight)
        self._eps = eps
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, Q + K + V]; means are computed in at least float32."""
        qkv = self._qkv(x)
        q_size, k_size = (len(weight) for weight in self._weights)
        parts = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        means = torch.stack([precise(part).square().mean(-1) for part in parts], dim=-1)
        factors = torch.rsqrt(self._group.all_reduce(means) / self._group.size + self._eps)
        for part, factor, weight in zip(parts, factors.unbind(-1), self._weights, strict=True):
            part.copy_((precise(part) * factor[:, None]).to(part.dtype) * weight)
        return qkv

    def over_cp(self, split: CpSplit) -> NormedProjection:
        """Each cp rank has all features for the norms."""
        own = copy(self)
        own._qkv = self._qkv.over_cp(split)
        return own


def load_attention(
    config: AttentionConfig,
    weights: ShardedWeights,
    *,
    layer: int,
    size: int,
    eps: float,
    rotary: Rotary | None,
    inputs: int = 0,
) -> SelfAttention:
    """Read this rank's heads.

    Args:
        layer: index in the whole model.
        size: C, features of the output.
        eps: of the norms of queries and keys.
        inputs: features of the input; 0 for C.
    """
    dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    heads, kv_heads = weights.heads(num_heads), weights.heads(num_kv_heads, is_shared=True)
    own = HeadShape(len(heads), len(kv_heads), dim)
    parts = (
        Columns("q_proj", num_heads * dim, features(heads, dim)),
        Columns("k_proj", num_kv_heads * dim, features(kv_heads, dim)),
        Columns("v_proj", num_kv_heads * dim, features(kv_heads, dim)),
    )
    columns = weights.column(parts, inputs=inputs or size, has_bias=config.has_bias)
    qkv: Projection = columns
    if config.has_joint_qk_norm:
        norms = (
            weights.cut(f"{name}.weight", (count * dim,), axis=0, taken=features(taken, dim))
            for name, count, taken in (("q_norm", num_heads, heads), ("k_norm", num_kv_heads, kv_heads))
        )
        qkv = NormedProjection(columns, *norms, eps=eps, group=weights.ctx.tp)
    return SelfAttention(
        layer,
        qkv,
        load_output(weights, config, heads, size=size, has_bias=config.has_output_bias),
        heads=own,
        rotary=rotary,
        qk_norm=load_qk_norm(weights, own, eps=eps, offset=config.norm_offset) if config.has_qk_norm else None,
        scale=config.scale,
        sinks=weights.cut("sinks", (num_heads,), axis=0, taken=heads) if config.has_sinks else None,
    )


def load_output(weights: ShardedWeights, shape: HeadShape, heads: range, *, size: int, has_bias: bool) -> RowLinear:
    """Read the output projection of this rank's `heads` to `size` features."""
    inputs, taken = shape.num_heads * shape.head_dim, features(heads, shape.head_dim)
    return weights.row("o_proj", outputs=size, inputs=inputs, taken=taken, has_bias=has_bias)


def load_qk_norm(weights: ShardedWeights, heads: HeadShape, *, eps: float, offset: float = 0.0) -> HeadNorm:
    """Read the norms of query and key heads as one norm; `offset` is added to their weights."""
    dtype = weights.precise if offset else None  # 1 + a small weight would lose digits
    q, k = (weights.whole(f"{name}.weight", heads.head_dim, dtype=dtype) for name in ("q_norm", "k_norm"))
    # Without torch.cat and sums: on the meta device, used to check shapes, they import torch's compiler, which is slow.
    both = q.new_empty(heads.num_heads + heads.num_kv_heads, heads.head_dim)
    both[: heads.num_heads], both[heads.num_heads :] = q, k
    return HeadNorm(both.add_(offset), eps)
