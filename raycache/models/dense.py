"""Dense decoders: blocks of grouped-query attention and a gated MLP, with RMSNorm before each.

Families (one file per model_type) say what is special about them; reading and running them is written here once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.embedding import VocabEmbedding, VocabHead
from raycache.layers.mlp import GatedMLP
from raycache.layers.norm import HeadNorm, RMSNorm
from raycache.layers.rope import Rotary, Rotation
from raycache.layers.self_attention import Attend, SelfAttention
from raycache.memory.component import Component, RowField
from raycache.models.config import ModelConfig
from raycache.models.weights import Columns, ShardedWeights
from raycache.parallel.sharding import even_range, kv_head_range, layer_range

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

Progress = Callable[[int, int], None]
"""Called while weights load: (layers loaded, layers of this stage)."""

# Shapes in this file: T packed tokens, N tokens to sample after, C hidden size, V vocabulary.


class DenseBlock:
    """One layer: hidden + attention(norm(hidden)), then the same with the MLP."""

    def __init__(self, attention_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, layer: int, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[T, C] -> new [T, C]."""
        hidden = self._attention(layer, self._attention_norm(hidden), rotation, attend).add_(hidden)
        return self._mlp(self._mlp_norm(hidden)).add_(hidden)


class DenseModel:
    """One rank's share of a dense decoder: its stage's layers, its heads (see models.base.Model).

    Args:
        layers: of this stage, counted over the whole model.
        blocks: one per layer.
        rotary: position embedding.
        embedding: on the first stage.
        norm, head: on the last stage.
    """

    def __init__(
        self,
        layers: range,
        blocks: Sequence[DenseBlock],
        rotary: Rotary,
        *,
        embedding: VocabEmbedding | None,
        norm: RMSNorm | None,
        head: VocabHead | None,
    ) -> None:
        self._blocks = tuple(zip(layers, blocks, strict=True))
        self._rotary = rotary
        self._embedding = embedding
        self._norm = norm
        self._head = head

    def embed(self, ids: Tensor) -> Tensor:
        """[T] -> [T, C]; first stage only."""
        assert self._embedding is not None, "token ids enter at the first stage"
        return self._embedding(ids)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T, C], [T] -> [T, C] through this stage's layers."""
        rotation = self._rotary(positions, hidden.dtype)
        for layer, block in self._blocks:
            hidden = block(layer, hidden, rotation, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V] float32; last stage only."""
        assert self._norm is not None and self._head is not None, "logits leave at the last stage"
        return self._head(self._norm(hidden))


def kv_component(config: ModelConfig, *, itemsize: int) -> Component:
    """Keys and values of every layer, split by KV heads."""
    shape = (config.num_kv_heads, config.head_dim)
    fields = (RowField("k", shape, head_axis=0), RowField("v", shape, head_axis=0))
    return Component("kv", tuple(range(config.num_layers)), fields, itemsize)


def load_dense(
    config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, *, has_qk_norm: bool, on_progress: Progress
) -> DenseModel:
    """Read this rank's share.

    Args:
        config: of the whole model.
        weights: where to read.
        ctx: whose share.
        has_qk_norm: whether query and key heads are normalised.
        on_progress: told after each layer.
    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    layers = layer_range(config.num_layers, ctx.pp.rank, ctx.pp.size)
    vocab = {"vocab_size": config.vocab_size, "features": config.hidden_size}
    is_tied = config.tie_word_embeddings
    table = head = norm = None
    if ctx.is_first_stage or (ctx.is_last_stage and is_tied):
        table = weights.vocab("model.embed_tokens.weight", **vocab)
    if ctx.is_last_stage:
        norm = RMSNorm(weights.whole("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        rows = table if is_tied and table is not None else weights.vocab("lm_head.weight", **vocab)
        head = VocabHead(rows, config.vocab_size, ctx.tp)
    blocks = []
    for layer in layers:
        blocks.append(_load_block(f"model.layers.{layer}", config, weights, ctx, has_qk_norm))
        on_progress(len(blocks), len(layers))
    return DenseModel(
        layers,
        blocks,
        Rotary(config.rope, config.head_dim, ctx.device),
        embedding=VocabEmbedding(table, ctx.tp) if ctx.is_first_stage and table is not None else None,
        norm=norm,
        head=head,
    )


def _load_block(
    at: str, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, has_qk_norm: bool
) -> DenseBlock:
    size, eps = config.hidden_size, config.rms_norm_eps
    return DenseBlock(
        RMSNorm(weights.whole(f"{at}.input_layernorm.weight", size), eps),
        _load_attention(f"{at}.self_attn", config, weights, ctx, has_qk_norm),
        RMSNorm(weights.whole(f"{at}.post_attention_layernorm.weight", size), eps),
        _load_mlp(f"{at}.mlp", config, weights, ctx),
    )


def _load_attention(
    at: str, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, has_qk_norm: bool
) -> SelfAttention:
    dim, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    heads = even_range(num_heads, ctx.tp.rank, ctx.tp.size)
    kv_heads = kv_head_range(num_kv_heads, ctx.tp.rank, ctx.tp.size)
    features, kv_features = _scaled(heads, dim), _scaled(kv_heads, dim)
    parts = (
        Columns(f"{at}.q_proj", num_heads * dim, features),
        Columns(f"{at}.k_proj", num_kv_heads * dim, kv_features),
        Columns(f"{at}.v_proj", num_kv_heads * dim, kv_features),
    )
    return SelfAttention(
        weights.column(parts, inputs=config.hidden_size, has_bias=config.attention_bias),
        weights.row(
            f"{at}.o_proj",
            outputs=config.hidden_size,
            inputs=num_heads * dim,
            taken=features,
            has_bias=config.attention_bias,
        ),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=dim,
        qk_norm=_load_qk_norm(at, config, weights, len(heads), len(kv_heads)) if has_qk_norm else None,
    )


def _load_qk_norm(at: str, config: ModelConfig, weights: ShardedWeights, num_heads: int, num_kv_heads: int) -> HeadNorm:
    q = weights.whole(f"{at}.q_norm.weight", config.head_dim).expand(num_heads, -1)
    k = weights.whole(f"{at}.k_norm.weight", config.head_dim).expand(num_kv_heads, -1)
    return HeadNorm(torch.cat((q, k)), config.rms_norm_eps)


def _load_mlp(at: str, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext) -> GatedMLP:
    size, inner = config.hidden_size, config.intermediate_size
    taken = even_range(inner, ctx.tp.rank, ctx.tp.size)
    parts = (Columns(f"{at}.gate_proj", inner, taken), Columns(f"{at}.up_proj", inner, taken))
    return GatedMLP(
        weights.column(parts, inputs=size, has_bias=config.mlp_bias),
        weights.row(f"{at}.down_proj", outputs=size, inputs=inner, taken=taken, has_bias=config.mlp_bias),
    )


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)
