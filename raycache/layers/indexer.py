"""Sparse indexers: select the tokens that a layer attends to ("DeepSeek-V3.2", section 2.1).

An indexer has many small query heads and one key per token. Since a token's score is a sum over all heads, the indexer
is replicated on every tp rank: all ranks select the same tokens without communication, at the cost of computing
index_n_heads * index_head_dim query features per token on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens of this rank, C hidden size, Q rank of queries, Hi index heads of D features, of
# which the first Dr are rotated.


class Selector(Protocol):
    """Selects the tokens that each new token attends to."""

    def __call__(self, x: Tensor, source: Tensor, run: ForwardPass) -> Selection:
        """Input of the layer [T, C], low-rank queries [T, Q]."""
        ...

    def over_cp(self, split: CpSplit) -> Selector:
        """The same for decode steps, with its weights split over cp; raises NotSplitError."""
        ...


@dataclass(frozen=True)
class IndexerConfig:
    """The sparse indexers of a model's layers.

    Attributes:
        num_heads, head_dim: Hi and D.
        query_rank: Q.
        rope_dim: Dr.
        top_k: number of tokens that a query attends to.
        is_interleaved: which features its rope pairs (see `Rotary`).
        sources: for each layer, the layer whose indexer it uses: itself or the last one before it that has one.
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
        """Layers with an indexer of their own."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer == source)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Layers that use the selection of an earlier layer."""
        return tuple(layer for layer, source in enumerate(self.sources) if layer != source)

    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        """Index keys of the layers with an indexer of their own."""
        return (index_keys(self.layers, dim=self.head_dim, fmt=fmt),)


def read_indexer(file: ConfigFile, *, sources: Sequence[int], is_interleaved: bool) -> IndexerConfig:
    """Read the sizes of sparse indexers; `sources` and `is_interleaved` depend on the family.

    Raises:
        CheckpointError: a key is missing, invalid, or contradicts another.
    """
    read_given_layer_types(file, known=("indexed_attention", "deepseek_sparse_attention"))
    head_dim, rope_dim = file.integer("index_head_dim"), file.integer("qk_rope_head_dim")
    if head_dim < rope_dim:
        raise CheckpointError(f"{file.path}: index_head_dim={head_dim} is less than qk_rope_head_dim={rope_dim}")
    if file.raw("q_lora_rank") is None:
        raise CheckpointError(f"{file.path} has no q_lora_rank; indexers need low-rank queries")
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
    """A sparse indexer; later layers of the same pass may share its selection.

    Args:
        layer: index in the whole model.
        query: Q -> Hi * D features.
        key: C -> D features.
        key_norm: (weight, bias) of the LayerNorm of keys, [D] each.
        head_weights: [Hi, C], at least float32; head weights are computed in its dtype.
        rotary: may pair other features than that of attention.
        rope_dim: Dr.
        top_k: number of tokens that a query attends to.
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
        # Scale of the dot products times that of the sum over heads: relu(a x) = a relu(x) for a > 0.
        self._scale = (heads * dim) ** -0.5

    def __call__(self, x: Tensor, source: Tensor, run: ForwardPass) -> Selection:
        rotation = run.rotation(self._rotary, x.dtype)
        q = self._rotated(self._query(source).view(x.shape[0], *self._shape), rotation)
        k = F.layer_norm(self._key(x), self._shape[1:], *self._key_norm, eps=KEY_NORM_EPS)
        k = self._rotated(k[:, None], rotation)[:, 0]
        weights = F.linear(x.to(self._head_weights.dtype), self._head_weights) * self._scale
        selection = run.step.select(run.pool.index(self._layer), q, k, weights, top_k=self._top_k)
        run.selection = selection  # of the last one only: they are large
        return selection

    def over_cp(self, split: CpSplit) -> Indexer:
        """Each cp rank has all heads, whose scores are summed."""
        own = copy(self)
        own._query, own._key = self._query.over_cp(split), self._key.over_cp(split)
        return own

    def _rotated(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """[T, H, D] with the first Dr features rotated."""
        return torch.cat((rotation(heads[..., : self._rope_dim]), heads[..., self._rope_dim :]), dim=-1)


class SharedSelection:
    """Reuses what the last indexer before it selected in the same pass."""

    def __call__(self, x: Tensor, source: Tensor, run: ForwardPass) -> Selection:
        assert run.selection is not None, "a stage begins with an indexer"
        return run.selection

    def over_cp(self, split: CpSplit) -> SharedSelection:
        return self


KEY_NORM_EPS = 1e-6
"""The same in all models, independent of their rms_norm_eps."""


def load_selector(config: IndexerConfig, weights: ShardedWeights, *, layer: int, size: int, rotary: Rotary) -> Selector:
    """Read the indexer of a layer, whole on every rank, unless the layer shares another's selection. `size` is C."""
    if config.sources[layer] != layer:
        return SharedSelection()
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
