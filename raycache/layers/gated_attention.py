"""Attention with an output gate per feature and partial rotary embedding."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers import fused
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import HeadNorm
from raycache.layers.rope import Rotary
from raycache.layers.self_attention import AttentionConfig, HeadShape, load_output, load_qk_norm
from raycache.layers.weights import Columns, ShardedWeights, features

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens of this rank, C hidden size, Hq query and Hkv key heads, D head size.


class GatedAttention:
    """Projections, norms of query and key heads, rotary embedding, attention, sigmoid gate, output projection
    ("Gated Attention for Large Language Models", arXiv 2505.06708).

    Args:
        layer: index in the whole model.
        inputs: projection to queries, keys, values and gates: (2 Hq + 2 Hkv) D features.
        heads: Hq, Hkv and D of this rank.
        rotary: rotates the first features of each head.
        qk_norm: applied to query and key heads before rotation.
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
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._out = out
        self._head_dim = heads.head_dim
        self._qk_kinds = (heads.num_heads, heads.num_kv_heads)
        self._kinds = (sum(self._qk_kinds), heads.num_kv_heads, heads.num_heads)
        self._rotary = rotary
        self._qk_norm = qk_norm

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        heads = self._inputs(x).unflatten(1, (-1, self._head_dim))
        qk, v, gate = heads.split(self._kinds, dim=1)
        qk = run.rotation(self._rotary, qk.dtype)(qk, norm=self._qk_norm)
        q, k = qk.split(self._qk_kinds, dim=1)
        out = run.step.attend(run.pool.kv(self._layer), q, k, v, scale=self._head_dim**-0.5, sinks=None)
        return self._out(fused.sigmoid_gated(out, run.step.exchange.own(gate)).flatten(1))

    def over_cp(self, split: CpSplit) -> GatedAttention:
        """The same with all heads until attention, and 1 / cp of them after it."""
        split.part(self._qk_kinds[0], what="attention heads")
        own = copy(self)
        own._inputs, own._out = self._inputs.over_cp(split), self._out.over_cp(split)
        return own


def load_gated_attention(
    config: AttentionConfig, weights: ShardedWeights, *, layer: int, size: int, eps: float, rotary: Rotary
) -> GatedAttention:
    """Read this rank's heads; `q_proj` holds query and gate of a head next to each other. `size` is C."""
    dim, rows = config.head_dim, 2 * config.num_heads * config.head_dim
    heads, kv_heads = weights.heads(config.num_heads), weights.heads(config.num_kv_heads, is_shared=True)
    own = HeadShape(len(heads), len(kv_heads), dim)

    def of_queries(half: int) -> list[Columns]:
        starts = ((2 * head + half) * dim for head in heads)
        return [Columns("q_proj", rows, range(start, start + dim)) for start in starts]

    of_kv = [Columns(name, config.num_kv_heads * dim, features(kv_heads, dim)) for name in ("k_proj", "v_proj")]
    return GatedAttention(
        layer,
        weights.column([*of_queries(0), *of_kv, *of_queries(1)], inputs=size, has_bias=config.has_bias),
        load_output(weights, config, heads, size=size, has_bias=config.has_output_bias),
        heads=own,
        rotary=rotary,
        qk_norm=load_qk_norm(weights, own, eps=eps, offset=config.norm_offset),
    )
