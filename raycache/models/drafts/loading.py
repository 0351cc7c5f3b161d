"""Which model drafts tokens for another, as `--draft` says, and the reading of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch

from raycache.checkpoint.config_file import ConfigFile, DraftConfig, DraftKind
from raycache.checkpoint.tensor_files import Checkpoint, WeightSource, has_tensor
from raycache.checkpoint.weights import CheckedNames
from raycache.errors import ConfigError
from raycache.layers.weights import ShardedWeights
from raycache.models.base import (
    Model,
    ModelConfig,
    check_weights,
    family_of,
    load_model,
    own_weights,
    read_config,
)
from raycache.models.decoder import Decoder
from raycache.models.drafts.base import DraftModel
from raycache.models.drafts.eagle import EagleConfig, is_eagle, load_eagle, read_eagle
from raycache.models.drafts.small_model import SmallModel
from raycache.models.prediction import PredictionLayer
from raycache.parallel.context import ParallelContext


@runtime_checkable
class PredictingFamily(Protocol):
    """A family whose checkpoints have layers that say what follows the next token."""

    def prediction_layer(self, config: Any) -> ModelConfig:
        """The first of them as a model of one layer."""
        ...

    def load_prediction_layer(self, config: Any, weights: ShardedWeights, target: Decoder) -> PredictionLayer:
        """Read one rank's share of it; `target` is the model that it belongs to."""
        ...


def read_models(model_dir: Path, draft: str) -> ModelConfig:
    """Read what a model directory says about its model, and about its draft model.

    Args:
        model_dir: of the model.
        draft: "mtp" for a layer of the same checkpoint, the directory of a smaller model or EAGLE head; "none" or
            "ngram" for no model.
    Raises:
        CheckpointError: a directory is none, or holds what is not supported.
        ConfigError: the draft model cannot draft for this one.
    """
    model = read_config(model_dir)
    if draft in ("none", "ngram"):
        return model
    if draft == "mtp":
        family = family_of(model)
        if not isinstance(family, PredictingFamily):
            raise ConfigError(
                f"draft=mtp is not supported for model_type {model.model_type}; use draft=ngram or a smaller model"
            )
        if not model.num_drafts:
            raise ConfigError(f"draft=mtp: {model.name} has no prediction layers; use draft=ngram or a smaller model")
        return replace(model, draft=DraftConfig(DraftKind.LAYER, family.prediction_layer(model), model_dir))
    directory = Path(draft)
    if not directory.is_dir():
        raise ConfigError(
            f"draft={draft!r} is not a directory; use none, ngram, mtp, a directory, or ORG/NAME of the Hub"
        )
    if is_eagle(directory):
        head = read_eagle(directory, model, has_bias=has_tensor(directory, "fc.bias"))
        return replace(model, draft=DraftConfig(DraftKind.HEAD, head, directory, head.recorded))
    small = read_config(directory)
    return replace(model, draft=DraftConfig(DraftKind.MODEL, small, directory))


def _require_same_tokens(model_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft in whose vocabulary the same tokens have other numbers, as far as the directories say."""
    one, other = _token_ids(model_dir), _token_ids(draft_dir)
    shared = one.keys() & other.keys()
    moved = [token for token in shared if one[token] != other[token]]
    if one and other and (moved or not shared):
        example = f"; token {moved[0]!r} is {one[moved[0]]} here and {other[moved[0]]} there" if moved else ""
        raise ConfigError(
            f"draft={draft_dir} has another vocabulary than {model_dir}{example}; use a model of the same tokenizer"
        )


def _token_ids(directory: Path) -> dict[str, int]:
    """Token -> id as tokenizer.json has them; empty if there is none, or of a kind that is not listed there."""
    path = directory / "tokenizer.json"
    vocab = ConfigFile.read(path).section("model").raw("vocab") if path.is_file() else None
    if isinstance(vocab, list):  # of pieces with their scores
        return {str(piece[0]): i for i, piece in enumerate(vocab) if isinstance(piece, list) and piece}
    return vocab if isinstance(vocab, dict) else {}


def load_draft(
    config: ModelConfig,
    source: WeightSource,
    ctx: ParallelContext,
    dtype: torch.dtype,
    *,
    target: Model,
    target_source: WeightSource,
) -> DraftModel:
    """Read one rank's share of the draft model, on the last stage.

    Args:
        config: of the other, with a draft.
        source: of the draft's weights.
        ctx: whose share.
        dtype: of weights and activations.
        target: this rank's share of the other.
        target_source: of the other's weights.
    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    assert config.draft is not None, "there is a draft to read"
    alone, model = ctx.without_stages, config.draft.model
    if config.draft.kind is DraftKind.MODEL:
        loaded = load_model(model, source, alone, dtype, on_progress=lambda done, total: None)
        return SmallModel(loaded, vocab_size=model.vocab_size, target_vocab_size=config.vocab_size)
    own = own_weights(config, target_source, alone, dtype)
    if isinstance(model, EagleConfig):
        weights = ShardedWeights(source, alone, dtype)
        return load_eagle(config, model, weights, cast(Decoder, target), target_weights=own)
    family = cast(PredictingFamily, family_of(config))
    return family.load_prediction_layer(config, own, cast(Decoder, target))


def check_draft(config: ModelConfig, model_dir: Path) -> None:
    """Compare names and shapes of a draft's checkpoint with what it wants, and its vocabulary with the target's.

    Args:
        config: of the target.
        model_dir: its directory.
    Raises:
        CheckpointError: a tensor is missing, has another shape or type, or is not one of the model's.
        ConfigError: the vocabularies differ.
    """
    draft = config.draft
    if draft is None:
        return
    checkpoint = Checkpoint(draft.directory)
    if draft.kind is DraftKind.MODEL:
        check_weights(draft.model, checkpoint)
        _require_same_tokens(model_dir, draft.directory)
        return
    names, ctx = CheckedNames(checkpoint), ParallelContext.single(torch.device("meta"))
    own = names if draft.kind is DraftKind.LAYER else CheckedNames(Checkpoint(model_dir))
    target = load_model(replace(config, draft=None), own, ctx, torch.float32, on_progress=lambda done, total: None)
    load_draft(config, names, ctx, torch.float32, target=target, target_source=own)
