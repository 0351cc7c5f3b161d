"""EAGLE heads: small layers trained to go on from a model's features, in directories of their own.

EAGLE      fc(embedding, features after the last norm) -> layers -> the target's head            (arXiv 2401.15077)
EAGLE-3    fc(three inner states of the target) and embedding -> one layer -> norm, a head of its own for the tokens
           that are frequent                                                                     (arXiv 2503.01840)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, ModelConfig
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.embedding import VocabEmbedding, VocabHead
from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.linear import ColumnLinear
from raycache.layers.norm import RMSNorm
from raycache.layers.rope import Rotary
from raycache.layers.weights import Columns, ShardedWeights
from raycache.models.decoder import Decoder, Residual
from raycache.models.dense import DenseConfig, load_attention, read_dense_config
from raycache.models.drafts.base import DraftModel, widened
from raycache.models.feed_forward import load_feed_forward
from raycache.models.prediction import PredictionLayer, target_embedding

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

# Shapes in this file: T packed tokens, N of them to draft after, C hidden size of the head, Ct of its target, D tokens
# that the head knows, V of the target.


@dataclass(frozen=True)
class EagleConfig(DenseConfig):
    """A head; `vocab_size` is its target's.

    Attributes:
        draft_vocab_size: D of an EAGLE-3 head, 0 for a head of the first kind.
        target_size: Ct.
        recorded: target layers before which its inner states are taken.
        has_fc_bias: whether fc has one.
        is_mapped: whether its tokens are some of its target's, numbered anew.
    """

    draft_vocab_size: int
    target_size: int
    recorded: tuple[int, ...]
    has_fc_bias: bool
    is_mapped: bool


def is_eagle(directory: Path) -> bool:
    """Whether a directory holds such a head."""
    names = ConfigFile.read(directory.absolute() / "config.json").raw("architectures")
    return isinstance(names, list) and any("eagle" in str(name).lower() for name in names)


def read_eagle(directory: Path, target: ModelConfig, *, has_bias: bool) -> EagleConfig:
    """Read config.json of a head.

    Args:
        directory: with it.
        target: the model that it drafts for.
        has_bias: whether its fc has one, which the file does not say.
    Raises:
        CheckpointError: a key is missing, has a wrong value, or asks for what is not implemented.
        ConfigError: it is for another target.
    """
    file = ConfigFile.read(directory.absolute() / "config.json")
    names = [str(name).lower() for name in file.raw("architectures")]
    file = file.having(architectures=None)
    for key in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        file.require(key, False)
    num_heads = file.integer("num_attention_heads")
    dense = read_dense_config(
        file,
        num_kv_heads=file.integer("num_key_value_heads", num_heads),
        head_dim=file.integer("head_dim", file.integer("hidden_size") // num_heads),
        has_qk_norm=False,
        theta=10000.0,
    )
    is_third = any("eagle3" in name for name in names)
    _require_target(dense, file, target, is_third=is_third)
    draft_vocab = file.integer("draft_vocab_size", dense.vocab_size) if is_third else 0
    values: dict[str, Any] = {**vars(dense), "model_type": "llama"}  # whose caches its layers have
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
            f"has {target.hidden_size} and {target.vocab_size}; use a head that was trained for this model"
        )


def _recorded(file: ConfigFile, target: ModelConfig) -> tuple[int, ...]:
    """Layers whose inputs are taken. The file counts their outputs, which are the inputs of the next ones."""
    section, count = file.section("eagle_config"), target.num_layers
    section.require("use_aux_hidden_state", True)
    outputs = section.raw("eagle_aux_hidden_state_layer_ids")
    found = [2, count // 2, count - 3] if outputs is None else outputs
    if not isinstance(found, list) or len(found) != 3 or not all(type(layer) is int for layer in found):
        raise CheckpointError(f"{file.path}: eagle_aux_hidden_state_layer_ids must be three layers, got {found!r}")
    layers = tuple(found) if outputs is None else tuple(layer + 1 for layer in found)
    if not 0 <= min(layers) <= max(layers) < count or list(layers) != sorted(set(layers)):
        raise ConfigError(f"draft {file.path.parent} takes inner states before layers {layers} of {count}")
    return layers


def load_eagle(
    config: ModelConfig,
    head: EagleConfig,
    weights: ShardedWeights,
    ctx: ParallelContext,
    target: Decoder,
    *,
    target_weights: ShardedWeights,
) -> DraftModel:
    """Read this rank's share of a head.

    Args:
        config: of the target.
        head: to read.
        weights: of the head; its embedding is read only where the target's does not fit.
        ctx: whose share.
        target: the model that it drafts for.
        target_weights: of that, for its embedding on a stage that has none.
    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    size = head.hidden_size
    if head.target_size == size:
        embedding = target_embedding(config, target_weights, ctx, target)
    else:
        table = weights.vocab("embed_tokens.weight", vocab_size=head.vocab_size, features=size)
        embedding = VocabEmbedding(table, ctx.tp)
    rotary = Rotary(head.rope, head.head_dim, ctx.device)
    num_joined = 3 * head.target_size if head.recorded else 2 * size
    join = weights.column([Columns("fc", size, range(size))], inputs=num_joined, has_bias=head.has_fc_bias)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.whole(f"{name}.weight", size), head.rms_norm_eps)

    def parts(layer: int, at: str, inputs: int) -> tuple[Mixer, Mixer]:
        attention = load_attention(layer, f"{at}.self_attn", head, weights, ctx, rotary=rotary, inputs=inputs)
        inner = head.intermediate_size
        return attention, load_feed_forward(f"{at}.mlp", weights, ctx, size=size, inner=inner, has_bias=head.mlp_bias)

    if head.recorded:
        at = "midlayer"
        attention, block = parts(0, at, 2 * size)
        return Eagle3Head(
            join,
            attention,
            block,
            embedding=embedding,
            norms=[norm(f"{at}.{name}") for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")],
            norm=norm("norm"),
            head=_load_head(head, weights, ctx),
            known=_known_tokens(head, weights, ctx),
            vocab_size=head.vocab_size,
        )
    layers: list[Sequence[Mixer]] = []
    for layer in range(head.num_layers):
        at = f"layers.{layer}"
        attention, block = parts(layer, at, size)
        before = norm(f"{at}.input_layernorm") if layer else Unchanged()  # the first layer has none
        layers.append((Residual(before, attention), Residual(norm(f"{at}.post_attention_layernorm"), block)))
    return PredictionLayer(
        target.sharing(layers, embedding=embedding, norm=Unchanged()),
        embed_norm=Unchanged(),
        hidden_norm=Unchanged(),
        join=join,
        target=target,
    )


def _load_head(head: EagleConfig, weights: ShardedWeights, ctx: ParallelContext) -> VocabHead:
    rows = weights.vocab("lm_head.weight", vocab_size=head.draft_vocab_size, features=head.hidden_size)
    return VocabHead(rows, head.draft_vocab_size, ctx.tp)


def _known_tokens(head: EagleConfig, weights: ShardedWeights, ctx: ParallelContext) -> Tensor | None:
    """[D], the target's number of each token that the head knows; None where it knows all. Stored as differences."""
    if not head.is_mapped:
        return None
    offsets = weights.integers("d2t", head.draft_vocab_size)
    return offsets + torch.arange(head.draft_vocab_size, device=ctx.device)


class Unchanged:
    """A norm that is none."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] as it is."""
        return x

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden + delta) twice."""
        total = hidden + delta
        return total, total


class Eagle3Head:
    """See DraftModel.

    Args:
        join: 3Ct -> C.
        attention: takes 2C features: the embedded token's, and what was joined.
        block: feed-forward part.
        embedding: of C features.
        norms: of the embedded token, of what was joined, and between attention and block.
        norm: before the head.
        head: C -> D.
        known: int64 [D], tokens of the target, or None where D = V.
        vocab_size: V.
    """

    def __init__(
        self,
        join: ColumnLinear,
        attention: Mixer,
        block: Mixer,
        *,
        embedding: VocabEmbedding,
        norms: Sequence[RMSNorm],
        norm: RMSNorm,
        head: VocabHead,
        known: Tensor | None,
        vocab_size: int,
    ) -> None:
        self.num_features = join.weight.shape[0]
        self._join, self._attention, self._embedding = join, attention, embedding
        self._embed_norm, self._hidden_norm, between = norms
        self._block = Residual(between, block)
        self._norm, self._head, self._known, self._vocab_size = norm, head, known, vocab_size

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 3Ct] -> [T, C]."""
        return self._join(hidden)

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """See DraftModel."""
        assert features is not None, "an EAGLE head takes the target's features"
        both = torch.cat([self._embed_norm(self._embedding(ids)), self._hidden_norm(features)], dim=-1)
        return self._block(features + self._attention(both, run), run)

    def logits(self, found: Tensor) -> Tensor:
        """See DraftModel."""
        return widened(self._head(self._norm(found)), self._vocab_size, known=self._known)
