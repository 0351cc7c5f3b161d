"""The sparse indexer's projections: which tokens a layer attends to ("DeepSeek-V3.2", section 2.1).

Its many small heads only choose; one key per token serves all of them. Index keys have no heads to split, and a choice
needs the sum over all heads, so the whole indexer is on every tp rank: each computes the same choice and nothing is
exchanged, at the price of all index_n_heads * index_head_dim query features per token on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.attention.base import Selection
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.linear import ColumnLinear
from raycache.layers.rope import Rotary, Rotation

# Shapes in this file: T packed tokens of this rank, C hidden size, Q rank of queries, Hi index heads, D their size, Dr
# size of the part of them that is turned, which comes first.

Selector = Callable[[Tensor, Tensor, ForwardPass], Selection]
"""(input of the layer [T, C], what attention's queries are made of [T, Q], run) -> what each new token sees."""


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
        """See `Selector`."""
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
        """See `Selector`."""
        return run.selections[self._source]


KEY_NORM_EPS = 1e-6
"""The same in all models, whatever their rms_norm_eps."""
