"""Attention with norms of query, key and value heads, as in Gemma 4."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.checkpoint.rope_config import RopeConfig
from raycache.layers import fused
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary
from raycache.layers.self_attention import HeadShape, load_output, load_qk_norm
from raycache.layers.weights import Columns, ShardedWeights, features
from raycache.memory.component import CacheFormat, Component, kv

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens of this rank, C hidden size.


@dataclass(frozen=True)
class NormedAttentionConfig(HeadShape):
    """Attention of a model's full layers, or of its sliding-window layers.

    Attributes:
        layers: which layers these are.
        has_values: whether there is a value projection; else values are made from the keys.
        window: number of tokens that a query attends to, including itself; 0 for no limit.
    """

    layers: tuple[int, ...]
    rope: RopeConfig
    has_values: bool = True
    window: int = 0

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        """Keys and values of these layers."""
        name = "window" if self.window else "kv"
        sizes = {"heads": self.num_kv_heads, "dim": self.head_dim}
        return (kv(name, self.layers, fmt=fmt, window=self.window, **sizes),) if self.layers else ()


class NormedAttention:
    """Like SelfAttention, with a norm of the values that has no weight.

    Args:
        layer: index in the whole model.
        inputs: projection to queries, keys and, with `has_values`, values.
        heads: of this rank.
        qk_norm: applied to query and key heads before rotation; the norm of the values has the same eps.
        has_values: if false, values are made from the keys before norm and rotation.
    """

    is_position_wise = False

    def __init__(
        self,
        layer: int,
        inputs: ColumnLinear,
        out: RowLinear,
        *,
        heads: HeadShape,
        rotary: Rotary,
        qk_norm: HeadNorm,
        has_values: bool,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._num_heads = heads.num_heads
        self._num_rotated = heads.num_heads + heads.num_kv_heads
        self._first_value = self._num_rotated if has_values else heads.num_heads
        self._shape = (self._first_value + heads.num_kv_heads, heads.head_dim)
        self._rotary = rotary
        self._qk_norm = qk_norm
        self._ones = torch.ones_like(qk_norm.weight[heads.num_heads :])

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]. Scores are not scaled: the norms of queries and keys bound them."""
        rows = self._inputs(x).view(x.shape[0], *self._shape)
        v = fused.head_norm(rows[:, self._first_value :], self._ones, self._qk_norm.eps)
        qk = run.rotation(self._rotary, rows.dtype)(rows[:, : self._num_rotated], norm=self._qk_norm)
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        return self._out(run.step.attend(run.pool.kv(self._layer), q, k, v, scale=1.0, sinks=None).flatten(1))

    def over_cp(self, split: CpSplit) -> NormedAttention:
        """The same with all heads until attention, and 1 / cp of them after it."""
        split.part(self._num_heads, what="attention heads")
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split)
        return own


def load_normed_attention(
    config: NormedAttentionConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, rotary: Rotary
) -> NormedAttention:
    """Read this rank's heads; `size` is C."""
    dim = config.head_dim
    heads, kv_heads = weights.heads(config.num_heads), weights.heads(config.num_kv_heads, is_shared=True)
    own = HeadShape(len(heads), len(kv_heads), dim)
    parts = [Columns("q_proj", config.num_heads * dim, features(heads, dim))]
    for name in ("k_proj", "v_proj") if config.has_values else ("k_proj",):
        parts.append(Columns(name, config.num_kv_heads * dim, features(kv_heads, dim)))
    return NormedAttention(
        layer,
        weights.column(parts, inputs=size, has_bias=False),
        load_output(weights, config, heads, size=size, has_bias=False),
        heads=own,
        rotary=rotary,
        qk_norm=load_qk_norm(weights, own, eps=eps),
        has_values=config.has_values,
    )
