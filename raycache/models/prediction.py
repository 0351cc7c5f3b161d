"""Prediction layers (multi-token prediction): predict the token after the next one.

Their input is the target's features of a token, and the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ModelConfig
from raycache.layers.cp_split import CpSplit
from raycache.layers.embedding import VocabEmbedding
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.linear import ColumnLinear
from raycache.layers.norm import RMSNorm
from raycache.layers.weights import ShardedWeights, whole_columns
from raycache.models.decoder import Decoder, MakeNorm, Norm

# Shapes in this file: T packed tokens, N of them to draft after, C hidden size, V vocabulary of the target.


class PredictionLayer:
    """Layers after the target's, with its embedding and head ("DeepSeek-V3", arXiv 2412.19437, section 2.2).

    Args:
        body: the layers, with the target's embedding and head and a final norm of their own.
        embed_norm, hidden_norm: of the token embedding and of the target's features.
        join: projection of both, 2 C -> C.
        target: its final norm is applied to the features.
        is_hidden_first: whether the features come before the embedding in the input of `join`.
    """

    def __init__(
        self,
        body: Decoder,
        *,
        embed_norm: Norm,
        hidden_norm: Norm,
        join: ColumnLinear,
        target: Decoder,
        is_hidden_first: bool = False,
    ) -> None:
        self.num_features = join.weight.shape[0]
        self._body = body
        self._embed_norm, self._hidden_norm, self._join = embed_norm, hidden_norm, join
        self._target = target
        self._is_hidden_first = is_hidden_first

    def features(self, hidden: Tensor) -> Tensor:
        """Apply the target's final norm, [T, C] -> [T, C]."""
        return self._target.normed(hidden)

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """[T] and [T, C] -> [T, C]."""
        assert features is not None, "a prediction layer takes the target's features"
        both = self._embed_norm(self._body.embed(ids)), self._hidden_norm(features)
        joined = self._join(torch.cat(both[::-1] if self._is_hidden_first else both, dim=-1))
        return self._body.normed(self._body.forward(joined, run))

    def logits(self, found: Tensor) -> Tensor:
        """[N, C] -> [N, V]."""
        return self._body.score(found)

    def over_cp(self, split: CpSplit) -> PredictionLayer:
        """The same with its weights split over cp."""
        own = copy(self)
        own._body, own._join = self._body.over_cp(split), self._join.over_cp(split)
        return own


@dataclass(frozen=True)
class PredictionNames:
    """Names of a prediction layer's own tensors, without ".weight"; see `PredictionLayer`."""

    norm: str
    embed_norm: str
    hidden_norm: str
    join: str
    is_hidden_first: bool = False

    @classmethod
    def inside(cls, at: str, *, norm: str) -> PredictionNames:
        """The names in most families, for the layer with the prefix `at`."""
        return cls(f"{at}.{norm}", f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj")


def load_prediction(
    config: ModelConfig,
    weights: ShardedWeights,
    parts: Sequence[Mixer],
    target: Decoder,
    *,
    names: PredictionNames,
    make_norm: MakeNorm = RMSNorm,
) -> PredictionLayer:
    """Load a prediction layer, given its attention and feed-forward block.

    Args:
        config: of the target.
        weights: of the target's checkpoint.
        parts: attention and feed-forward block.
        target: its embedding and head are used; copies of them in the prediction layer are identical.
    """
    size = config.hidden_size
    norm, embed_norm, hidden_norm = (
        make_norm(weights.whole(f"{name}.weight", size), config.rms_norm_eps)
        for name in (names.norm, names.embed_norm, names.hidden_norm)
    )
    table = target_embedding(config, weights, target)
    return PredictionLayer(
        target.sharing([parts], embedding=table, norm=norm),
        embed_norm=embed_norm,
        hidden_norm=hidden_norm,
        join=weights.column([whole_columns(names.join, size)], inputs=2 * size, has_bias=False),
        is_hidden_first=names.is_hidden_first,
        target=target,
    )


def target_embedding(config: ModelConfig, weights: ShardedWeights, target: Decoder) -> VocabEmbedding:
    """The target's embedding, which is read from `weights` if the last stage does not have it."""
    if target.embedding is not None:
        return target.embedding
    tp = weights.ctx.tp
    if config.tie_word_embeddings and target.head is not None:
        return VocabEmbedding(target.head.weight, tp)
    name = target.embedding_name
    return VocabEmbedding(weights.vocab(name, vocab_size=config.vocab_size, features=config.hidden_size), tp)
