"""Reading layers that say what follows the next token: those behind a model's own, and heads trained for it later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycache.checkpoint.config_file import ModelConfig
from raycache.layers.embedding import VocabEmbedding
from raycache.layers.forward_pass import Mixer
from raycache.layers.norm import RMSNorm
from raycache.models.decoder import Decoder, Norm
from raycache.models.drafts import PredictionLayer
from raycache.models.weights import Columns, ShardedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from raycache.parallel.context import ParallelContext


@dataclass(frozen=True)
class PredictionNames:
    """Tensors of a prediction layer outside of its attention and feed-forward part, without ".weight".

    Attributes:
        norm: before the head.
        embed_norm, hidden_norm: of the token's embedding, and of what the target found.
        join: of both.
        is_hidden_first: what the target found comes first in `join`, and not the embedding.
    """

    norm: str
    embed_norm: str
    hidden_norm: str
    join: str
    is_hidden_first: bool = False


def load_prediction(
    parts: Sequence[Mixer],
    names: PredictionNames,
    config: ModelConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    target: Decoder,
    *,
    make_norm: Callable[[Tensor, float], Norm] = RMSNorm,
) -> PredictionLayer:
    """Read what is around a prediction layer's attention and feed-forward part.

    Args:
        parts: those two.
        names: of the tensors.
        config: of the target.
        weights: where to read.
        ctx: whose share.
        target: whose embedding and head it uses; copies of them in the layer are the same.
        make_norm: of a norm's weight and rms_norm_eps.
    """
    size = config.hidden_size
    norm, embed_norm, hidden_norm = (
        make_norm(weights.whole(f"{name}.weight", size), config.rms_norm_eps)
        for name in (names.norm, names.embed_norm, names.hidden_norm)
    )
    table = target_embedding(config, weights, ctx, target)
    return PredictionLayer(
        target.sharing([parts], embedding=table, norm=norm),
        embed_norm=embed_norm,
        hidden_norm=hidden_norm,
        join=weights.column([Columns(names.join, size, range(size))], inputs=2 * size, has_bias=False),
        is_hidden_first=names.is_hidden_first,
        target=target,
    )


def target_embedding(
    config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, target: Decoder
) -> VocabEmbedding:
    """The target's embedding, which a last stage may not have; `weights` are the target's."""
    if target.embedding is not None:
        return target.embedding
    if config.tie_word_embeddings and target.head is not None:
        return VocabEmbedding(target.head.weight, ctx.tp)
    name = target.embedding_name
    return VocabEmbedding(weights.vocab(name, vocab_size=config.vocab_size, features=config.hidden_size), ctx.tp)
