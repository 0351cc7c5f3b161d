"""Reads and loads the draft model selected by `--draft`."""

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
    """A family whose checkpoints have prediction layers (multi-token prediction)."""

    def prediction_layer(self, config: Any) -> ModelConfig:
        """The first prediction layer as a model of one layer."""
        ...

    def load_prediction_layer(self, config: Any, weights: ShardedWeights, target: Decoder) -> PredictionLayer:
        """Load one rank's share of it; `target` is the model that it belongs to."""
        ...


def read_models(model_dir: Path, draft: str) -> ModelConfig:
    """Read the configuration of a model and of its draft model.

    Args:
        draft: "mtp" for a prediction layer of the same checkpoint, the directory of a smaller model or EAGLE head, or
            "none" or "ngram" for no draft model.
    Raises:
        CheckpointError: a directory does not hold a supported model.
        ConfigError: the draft model cannot draft for this model.
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
    """Check that tokens have the same ids in both vocabularies, if both directories have a tokenizer.json."""
    one, other = _token_ids(model_dir), _token_ids(draft_dir)
    shared = one.keys() & other.keys()
    moved = [token for token in shared if one[token] != other[token]]
    if one and other and (moved or not shared):
        example = f"; token {moved[0]!r} is {one[moved[0]]} here and {other[moved[0]]} there" if moved else ""
        raise ConfigError(
            f"draft={draft_dir} has another vocabulary than {model_dir}{example}; use a model with the same tokenizer"
        )


def _token_ids(directory: Path) -> dict[str, int]:
    """Token -> id from tokenizer.json; empty if there is no such file or it has no vocabulary."""
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
    """Load one rank's share of the draft model, on the last stage.

    Args:
        config: of the target; must have a draft model.
        source: weights of the draft model.
        dtype: of weights and activations.
        target: this rank's share of the target.
        target_source: weights of the target.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
    """
    assert config.draft is not None, "the model has no draft model"
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
    """Check the names and shapes of a draft model's tensors, and its vocabulary.

    Args:
        config: of the target.
        model_dir: of the target.
    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or type, or does not belong to the model.
        ConfigError: its vocabulary differs from the target's.
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
