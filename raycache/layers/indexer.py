"""The sparse indexer: which tokens a layer attends to ("DeepSeek-V3.2", section 2.1).

Its many small heads only choose; one key per token serves all of them. Index keys have no heads to split, and a choice
needs the sum over all heads, so the whole indexer is on every tp rank: each computes the same choice and nothing is
exchanged, at the price of all index_n_heads * index_head_dim query features per token on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.attention.base import Selection
from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear
from raycache.layers.rope import Rotary, Rotation
from raycache.layers.weights import ShardedWeights, whole_columns
from raycache.memory.component import CacheFormat, Component, index_keys

# Shapes in this file: T packed tokens of this rank, C hidden size, Q rank of queries, Hi index heads, D their size, Dr
# size of the part of them that is turned, which comes first.

Selector = Callable[[Tensor, Tensor, ForwardPass], Selection]
"""(input of the layer [T, C], what attention's queries are made of [T, Q], run) -> what each new token sees."""


@dataclass(frozen=True)
class IndexerConfig:
    """The sparse indexers of a model's layers.

    Attributes:
        num_heads, head_dim: Hi and D.
        query_rank: Q.
        rope_dim: Dr.
        top_k: tokens that a query sees.
        is_interleaved: which features its rope pairs.
        sources: per layer the one whose indexer it uses, itself or one before.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    rope_dim: int
    top_k: int
    is_interleaved: bool
    sources: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Those with an indexer of their own."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer == source)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Those that use what a layer before them chose."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer != source)

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        """Index keys of the layers with an indexer of their own."""
        return (index_keys(self.layers, dim=self.head_dim, fmt=fmt),)


def read_indexer(file: ConfigFile, *, sources: Sequence[int], is_interleaved: bool) -> IndexerConfig:
    """Read the keys of sparse indexers.

    Args:
        file: config.json.
        sources: per layer the one whose indexer it uses.
        is_interleaved: which features their rope pairs.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or does not go with the others.
    """
    read_given_layer_types(file, known=("indexed_attention", "deepseek_sparse_attention"))
    head_dim, rope_dim = file.integer("index_head_dim"), file.integer("qk_rope_head_dim")
    if head_dim < rope_dim:
        raise CheckpointError(f"{file.path}: index_head_dim={head_dim} is less than qk_rope_head_dim={rope_dim}")
    if file.raw("q_lora_rank") is None:
        raise CheckpointError(f"{file.path} has no q_lora_rank, which its indexer's queries are made of")
    return IndexerConfig(
        num_heads=file.integer("index_n_heads"),
        head_dim=head_dim,
        query_rank=file.integer("q_lora_rank"),
        rope_dim=rope_dim,
        top_k=file.integer("index_topk"),
        is_interleaved=is_interleaved,
        sources=tuple(sources),
    )


class Indexer:
    """Queries, keys and head weights of an indexer; later layers of the same pass may share what it selects.

    Args:
        layer: its number in the whole model.
        query: Q -> Hi * D features.
        key: C -> D features.
        key_norm: (weight, bias) [D] of a LayerNorm of the keys.
        head_weights: [Hi, C]; head weights are computed in its dtype, at least float32.
        rotary: of the turned part; its pairs may be others than those of attention.
        rope_dim: Dr.
        top_k: tokens that a query sees.
    """

    def __init__(
        self,
        layer: int,
        *,
        query: ColumnLinear,
        key: ColumnLinear,
        key_norm: tuple[Tensor, Tensor],
        head_weights: Tensor,
        rotary: Rotary,
        rope_dim: int,
        top_k: int,
    ) -> None:
        self._layer = layer
        self._query = query
        self._key = key
        self._key_norm = key_norm
        self._head_weights = head_weights
        self._rotary = rotary
        self._rope_dim = rope_dim
        self._top_k = top_k
        heads, dim = head_weights.shape[0], key_norm[0].shape[0]
        self._shape = (heads, dim)
        # One factor for both scales, that of products and that of the sum over heads: relu(a x) = a relu(x) for a > 0.
        self._scale = (heads * dim) ** -0.5

    def __call__(self, x: Tensor, source: Tensor, run: ForwardPass) -> Selection:
        turn = run.rotation(self._rotary, x.dtype)
        q = self._turned(self._query(source).view(x.shape[0], *self._shape), turn)
        k = F.layer_norm(self._key(x), self._shape[1:], *self._key_norm, eps=KEY_NORM_EPS)
        k = self._turned(k[:, None], turn)[:, 0]
        weights = F.linear(x.to(self._head_weights.dtype), self._head_weights) * self._scale
        selection = run.step.select(run.pool.index(self._layer), q, k, weights, top_k=self._top_k)
        run.selections[self._layer] = selection
        return selection

    def _turned(self, heads: Tensor, turn: Rotation) -> Tensor:
        """[T, H, D] with its first Dr features turned."""
        return torch.cat((turn(heads[..., : self._rope_dim]), heads[..., self._rope_dim :]), dim=-1)


class SharedSelection:
    """What the indexer of a layer before this one selected in the same pass.

    Args:
        source: that layer.
    """

    def __init__(self, source: int) -> None:
        self._source = source

    def __call__(self, x: Tensor, source: Tensor, run: ForwardPass) -> Selection:
        return run.selections[self._source]


KEY_NORM_EPS = 1e-6
"""The same in all models, whatever their rms_norm_eps."""


def load_selector(config: IndexerConfig, weights: ShardedWeights, *, layer: int, size: int, rotary: Rotary) -> Selector:
    """Read an indexer, all of it on every rank, unless this layer shares another's.

    Args:
        config: of the model.
        weights: of the layer's indexer.
        layer: its number in the whole model.
        size: C.
        rotary: that pairs features as the indexers do.
    """
    if config.sources[layer] != layer:
        return SharedSelection(config.sources[layer])
    heads, dim = config.num_heads, config.head_dim
    return Indexer(
        layer,
        query=weights.column([whole_columns("wq_b", heads * dim)], inputs=config.query_rank, has_bias=False),
        key=weights.column([whole_columns("wk", dim)], inputs=size, has_bias=False),
        key_norm=(weights.whole("k_norm.weight", dim), weights.whole("k_norm.bias", dim)),
        head_weights=weights.whole("weights_proj.weight", heads, size, dtype=weights.precise),
        rotary=rotary,
        rope_dim=config.rope_dim,
        top_k=config.top_k,
    )
