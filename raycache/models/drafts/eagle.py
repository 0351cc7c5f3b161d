"""EAGLE heads: small draft models that continue from the target's features, with checkpoints of their own.

EAGLE      fc(embedding, features after the last norm) -> layers -> the target's head            (arXiv 2401.15077)
EAGLE-3    fc(three hidden states of the target) and embedding -> one layer -> norm and head, maybe with a reduced
           vocabulary                                                                            (arXiv 2503.01840)
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, ModelConfig
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.cp_split import CpSplit
from raycache.layers.embedding import VocabEmbedding, VocabHead
from raycache.layers.feed_forward import load_feed_forward
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.linear import ColumnLinear
from raycache.layers.norm import RMSNorm
from raycache.layers.rope import Rotary
from raycache.layers.self_attention import load_attention, read_attention, read_heads
from raycache.layers.weights import ShardedWeights, whole_columns
from raycache.models.decoder import Decoder, Residual
from raycache.models.drafts.base import DraftModel, widened
from raycache.models.llama import DenseConfig, read_dense
from raycache.models.prediction import PredictionLayer, target_embedding

# Shapes in this file: T packed tokens, N of them to draft after, C hidden size of the head, Ct of its target, D
# vocabulary of the head, V of the target.


@dataclass(frozen=True)
class EagleConfig(DenseConfig):
    """An EAGLE head; `vocab_size` is its target's.

    Attributes:
        draft_vocab_size: D of EAGLE-3, 0 for EAGLE.
        target_size: Ct.
        recorded: target layers whose inputs the head takes.
        has_fc_bias: whether fc has a bias.
        is_mapped: whether it has a reduced vocabulary with token ids of its own.
    """

    draft_vocab_size: int
    target_size: int
    recorded: tuple[int, ...]
    has_fc_bias: bool
    is_mapped: bool


def is_eagle(directory: Path) -> bool:
    """Whether a directory holds an EAGLE head."""
    names = ConfigFile.read(directory.absolute() / "config.json").raw("architectures")
    return isinstance(names, list) and any("eagle" in str(name).lower() for name in names)


def read_eagle(directory: Path, target: ModelConfig, *, has_bias: bool) -> EagleConfig:
    """Read config.json of an EAGLE head.

    Args:
        target: the model that it drafts for.
        has_bias: whether fc has a bias, which is not in config.json.
    Raises:
        CheckpointError: a key is missing, invalid or not supported.
        ConfigError: the head was made for another target.
    """
    file = ConfigFile.read(directory.absolute() / "config.json")
    names = [str(name).lower() for name in file.raw("architectures")]
    file = file.having(architectures=None)
    for key in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        file.require(key, False)
    dense = read_dense(file, read_attention(file, read_heads(file), theta=10000.0))
    is_third = any("eagle3" in name for name in names)
    _require_target(dense, file, target, is_third=is_third)
    draft_vocab = file.integer("draft_vocab_size", dense.vocab_size) if is_third else 0
    values: dict[str, Any] = {**vars(dense), "model_type": "llama"}  # defines the components of its cache
    return EagleConfig(
        **values,
        draft_vocab_size=draft_vocab,
        target_size=target.hidden_size,
        recorded=_recorded(file, target) if is_third else (),
        has_fc_bias=has_bias,
        is_mapped=is_third and draft_vocab != dense.vocab_size,
    )


def _require_target(head: DenseConfig, file: ConfigFile, target: ModelConfig, *, is_third: bool) -> None:
    if is_third and head.num_layers != 1:
        raise CheckpointError(f"{file.path} has num_hidden_layers={head.num_layers}, an EAGLE-3 head has 1")
    size = file.integer("target_hidden_size", head.hidden_size) if is_third else head.hidden_size
    if (size, head.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"draft {file.path.parent} is a head for hidden_size={size}, vocab_size={head.vocab_size}; {target.name} "
            f"has {target.hidden_size} and {target.vocab_size}; use a head that was trained for it"
        )


def _recorded(file: ConfigFile, target: ModelConfig) -> tuple[int, ...]:
    """Layers whose inputs are taken; config.json lists the layers before them, whose outputs these are."""
    section, count = file.section("eagle_config"), target.num_layers
    section.require("use_aux_hidden_state", True)
    outputs = section.raw("eagle_aux_hidden_state_layer_ids")
    given = [2, count // 2, count - 3] if outputs is None else outputs
    if not isinstance(given, list) or len(given) != 3 or not all(type(layer) is int for layer in given):
        raise CheckpointError(f"{file.path}: eagle_aux_hidden_state_layer_ids must be three layers, got {given!r}")
    layers = tuple(given) if outputs is None else tuple(layer + 1 for layer in given)
    if not 0 <= min(layers) <= max(layers) < count or list(layers) != sorted(set(layers)):
        raise ConfigError(f"draft {file.path.parent} takes hidden states before layers {layers} of {count}")
    return layers


def load_eagle(
    config: ModelConfig,
    head: EagleConfig,
    weights: ShardedWeights,
    target: Decoder,
    *,
    target_weights: ShardedWeights,
) -> DraftModel:
    """Load this rank's share of an EAGLE head.

    Args:
        config: of the target.
        weights: of the head; its embedding is used only if the target's has another size.
        target_weights: of the target, for its embedding if this stage does not have it.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    size = head.hidden_size
    if head.target_size == size:
        embedding = target_embedding(config, target_weights, target)
    else:
        table = weights.vocab("embed_tokens.weight", vocab_size=head.vocab_size, features=size)
        embedding = VocabEmbedding(table, weights.ctx.tp)
    if head.recorded:
        return _load_eagle3(head, weights, embedding)
    rotary = head.attention.rotary(weights.ctx.device)
    layers: list[Sequence[Mixer]] = []
    for layer in range(head.num_layers):
        own = weights.under(f"layers.{layer}")
        attention, block = _load_parts(layer, head, own, rotary, inputs=size)
        before = _load_norm("input_layernorm", head, own) if layer else Unchanged()  # the first layer has no norm
        between = _load_norm("post_attention_layernorm", head, own)
        layers.append((Residual(before, attention), Residual(between, block)))
    return PredictionLayer(
        target.sharing(layers, embedding=embedding, norm=Unchanged()),
        embed_norm=Unchanged(),
        hidden_norm=Unchanged(),
        join=_load_join(head, weights, inputs=2 * size),
        target=target,
    )


def _load_eagle3(head: EagleConfig, weights: ShardedWeights, embedding: VocabEmbedding) -> Eagle3Head:
    own, rotary = weights.under("midlayer"), head.attention.rotary(weights.ctx.device)
    attention, block = _load_parts(0, head, own, rotary, inputs=2 * head.hidden_size)
    return Eagle3Head(
        _load_join(head, weights, inputs=3 * head.target_size),
        Eagle3Layer(
            _load_norm("input_layernorm", head, own),
            _load_norm("hidden_norm", head, own),
            attention,
            Residual(_load_norm("post_attention_layernorm", head, own), block),
        ),
        embedding=embedding,
        norm=_load_norm("norm", head, weights),
        head=_load_head(head, weights),
        known=_known_tokens(head, weights),
        vocab_size=head.vocab_size,
    )


def _load_parts(
    layer: int, head: EagleConfig, own: ShardedWeights, rotary: Rotary, *, inputs: int
) -> tuple[Mixer, Mixer]:
    size, eps, inner = head.hidden_size, head.rms_norm_eps, head.intermediate_size
    at = own.under("self_attn")
    attention = load_attention(head.attention, at, layer=layer, size=size, eps=eps, rotary=rotary, inputs=inputs)
    return attention, load_feed_forward(own.under("mlp"), size=size, inner=inner, has_bias=head.mlp_bias)


def _load_join(head: EagleConfig, weights: ShardedWeights, *, inputs: int) -> ColumnLinear:
    return weights.column([whole_columns("fc", head.hidden_size)], inputs=inputs, has_bias=head.has_fc_bias)


def _load_norm(name: str, head: EagleConfig, weights: ShardedWeights) -> RMSNorm:
    return RMSNorm(weights.whole(f"{name}.weight", head.hidden_size), head.rms_norm_eps)


def _load_head(head: EagleConfig, weights: ShardedWeights) -> VocabHead:
    rows = weights.vocab("lm_head.weight", vocab_size=head.draft_vocab_size, features=head.hidden_size)
    return VocabHead(rows, head.draft_vocab_size, weights.ctx.tp)


def _known_tokens(head: EagleConfig, weights: ShardedWeights) -> Tensor | None:
    """The target's id of each of the head's D tokens, stored as differences; None if their vocabularies are equal."""
    if not head.is_mapped:
        return None
    offsets = weights.integers("d2t", head.draft_vocab_size)
    return offsets + torch.arange(head.draft_vocab_size, device=weights.ctx.device)


class Unchanged:
    """Identity, where other models have a norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] as it is."""
        return x

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden + delta twice."""
        total = hidden + delta
        return total, total


@dataclass(frozen=True)
class Eagle3Layer:
    """The one layer of an EAGLE-3 head.

    Attributes:
        embed_norm: of the token embedding.
        hidden_norm: of the features.
        attention: takes both, 2 C features.
        block: feed-forward block with its norm.
    """

    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    attention: Mixer
    block: Residual


class Eagle3Head:
    """An EAGLE-3 draft model.

    Args:
        join: 3 Ct -> C.
        embedding: of C features.
        norm: before the head.
        head: C -> D.
        known: int64 [D], the target's ids of the head's tokens; None if D = V.
        vocab_size: V.
    """

    def __init__(
        self,
        join: ColumnLinear,
        layer: Eagle3Layer,
        *,
        embedding: VocabEmbedding,
        norm: RMSNorm,
        head: VocabHead,
        known: Tensor | None,
        vocab_size: int,
    ) -> None:
        self.num_features = join.weight.shape[0]
        self._join, self._layer, self._embedding = join, layer, embedding
        self._norm, self._head, self._known, self._vocab_size = norm, head, known, vocab_size

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 3Ct] -> [T, C]."""
        return self._join(hidden)

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """[T] and [T, C] -> [T, C]."""
        assert features is not None, "an EAGLE head takes the target's features"
        layer = self._layer
        both = torch.cat([layer.embed_norm(self._embedding(ids)), layer.hidden_norm(features)], dim=-1)
        return layer.block(features + layer.attention(both, run), run)

    def logits(self, found: Tensor) -> Tensor:
        """[N, C] -> [N, V]."""
        return widened(self._head(self._norm(found)), self._vocab_size, known=self._known)

    def over_cp(self, split: CpSplit) -> Eagle3Head:
        """The same with its weights split over cp."""
        own, layer = copy(self), self._layer
        own._layer = replace(layer, attention=layer.attention.over_cp(split), block=layer.block.over_cp(split))
        own._join, own._head = self._join.over_cp(split), self._head.over_cp(split)
        return own
