"""Models: what a family must offer, and the door through which the rest of the project reaches them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raycache.config import divisors
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.self_attention import Attend
from raycache.memory.component import Component
from raycache.models.checkpoint import WeightSource
from raycache.models.config import ConfigFile, ModelConfig
from raycache.models.dense import Progress
from raycache.models.llama import Llama
from raycache.models.qwen3 import Qwen3
from raycache.models.weights import ShardedWeights

if TYPE_CHECKING:
    from raycache.parallel.context import ParallelContext

__all__ = ["Attend", "Family", "Model", "ModelConfig", "check_split", "components", "load_model", "read_config"]


class Model(Protocol):
    """One rank's share of a model. Run under torch.inference_mode.

    T are packed new tokens of any number of sequences, N those after which a token is wanted, C the hidden size.
    """

    def embed(self, ids: Tensor) -> Tensor:
        """[T] token ids -> [T, C]; first stage only."""
        ...

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[T, C] through this stage's layers -> new [T, C]; positions [T] are those in the sequences."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V] float32 on every tp rank; last stage only."""
        ...


class Family(Protocol):
    """All models of one `model_type`."""

    model_type: str

    def read_config(self, file: ConfigFile) -> ModelConfig:
        """Check and read config.json; raises CheckpointError for what the family cannot do."""
        ...

    def components(self, config: ModelConfig, *, itemsize: int) -> tuple[Component, ...]:
        """The kinds of state that a token leaves behind."""
        ...

    def load(
        self, config: ModelConfig, weights: ShardedWeights, ctx: ParallelContext, *, on_progress: Progress
    ) -> Model:
        """Read one rank's share."""
        ...


def read_config(model_dir: Path) -> ModelConfig:
    """Read and check what a model directory says about its model.

    Raises:
        CheckpointError: no directory, no readable config.json, an unknown model_type, or what is not supported.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"model {str(model_dir)!r} is not a directory; download the model, give the directory with its config.json"
        )
    file = ConfigFile.read(model_dir.absolute() / "config.json")
    family = _family(file.text("model_type"), model_dir)
    for key in ("quantization_config", "compression_config"):
        if file.raw(key) is not None:
            raise CheckpointError(
                f"{file.path} has a {key}; quantised checkpoints are not supported, use one in bfloat16"
            )
    return family.read_config(file)


def components(config: ModelConfig, *, itemsize: int) -> tuple[Component, ...]:
    """The kinds of state that a token of this model leaves behind.

    Args:
        config: the model.
        itemsize: bytes per number of the cache.
    """
    return _family(config.model_type, config.name).components(config, itemsize=itemsize)


def check_split(config: ModelConfig, *, tp: int, pp: int) -> None:
    """Refuse a split that cannot work, before weights are loaded.

    Raises:
        ConfigError: says which values would work.
    """
    wrong = _tp_obstacle(config, tp)
    if wrong:
        served = [size for size in divisors(config.num_heads) if not _tp_obstacle(config, size)]
        raise ConfigError(f"tp={tp} {wrong} of {config.name}; use one of {served}")
    if pp > config.num_layers:
        raise ConfigError(f"pp={pp} exceeds num_hidden_layers={config.num_layers} of {config.name}; use at most that")


def load_model(
    config: ModelConfig, source: WeightSource, ctx: ParallelContext, dtype: torch.dtype, *, on_progress: Progress
) -> Model:
    """Read one rank's share of a model.

    Args:
        config: the model.
        source: of its weights.
        ctx: whose share.
        dtype: of weights and activations.
        on_progress: told (layers loaded, layers of this stage) after each layer.
    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigError: the split cannot work.
    """
    check_split(config, tp=ctx.tp.size, pp=ctx.pp.size)
    weights = ShardedWeights(source, ctx, dtype)
    return _family(config.model_type, config.name).load(config, weights, ctx, on_progress=on_progress)


def _family(model_type: str, model: object) -> Family:
    families: tuple[Family, ...] = (Llama(), Qwen3())
    for family in families:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in families)
    raise CheckpointError(f"model_type {model_type!r} of {model} is not supported; known are {known}")


def _tp_obstacle(config: ModelConfig, tp: int) -> str:
    if config.num_heads % tp:
        return f"does not divide num_attention_heads={config.num_heads}"
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        return f"neither divides nor is a multiple of num_key_value_heads={config.num_kv_heads}"
    if config.intermediate_size % tp:
        return f"does not divide intermediate_size={config.intermediate_size}"
    return ""
