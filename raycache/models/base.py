"""Models: the interface of a family, and how a model is read, checked and loaded."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from raycache.checkpoint.config_file import ConfigFile, ModelConfig
from raycache.checkpoint.config_keys import unknown_keys
from raycache.checkpoint.prefixes import PrefixedSource, prefixes_of
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.tensor_files import Checkpoint, WeightSource
from raycache.checkpoint.weights import CheckedNames, plain_dtype
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.cp_split import CpSplit
from raycache.layers.embedding import VocabHead
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.weights import ShardedWeights
from raycache.memory.component import CacheFormat, Component
from raycache.models.decoder import Progress
from raycache.models.unsupported import NEEDS
from raycache.models.wrappers import WRAPPERS, text_part
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import HeadCount, Split
from raycache.parallel.stages import bound_begin, nearest_stages

__all__ = [
    "Family",
    "Model",
    "ModelConfig",
    "check_split",
    "components",
    "family_of",
    "for_warm_up",
    "head_of",
    "load_model",
    "read_config",
]


class Model(Protocol):
    """One rank's share of a model. Run under torch.inference_mode.

    T packed new tokens of any number of sequences, N of them to sample after, C hidden size.

    Attributes:
        head: makes logits of the result of `normed`; on the last stage.
    """

    head: VocabHead | None

    def embed(self, ids: Tensor) -> Tensor:
        """[T] token ids -> [T, C]; first stage only."""
        ...

    def forward(self, hidden: Tensor, run: ForwardPass) -> Tensor:
        """Run this stage's layers: [T, C] -> new [T, C], or [K, C] of the tokens that `run.wanted` names."""
        ...

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, [N, C] -> new [N, C]; last stage only."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V], at least float32, on every tp rank; last stage only."""
        ...

    def over_cp(self, split: CpSplit) -> Model:
        """The same model for decode steps, with its weights split over cp.

        It takes all tokens on every cp rank, and its logits are on every rank of the stage. Its weights are views.

        Raises:
            NotSplitError: a layer cannot be split; the message says why.
        """
        ...

    @property
    def num_layers_needed(self) -> int:
        """First layers of this stage that launch all of its kernels, on this rank."""
        ...

    def truncated(self, num_layers: int) -> Model:
        """The same model, of which only so many layers run: outputs have the right shapes, but mean nothing."""
        ...


def for_warm_up(model: Model, ctx: ParallelContext) -> Model:
    """The model without layers that launch the same kernels as earlier ones. Collective over the ranks of a stage: they
    must skip the same layers, but may have unequal shares of them."""
    counts = ctx.stage.all_gather(torch.tensor([model.num_layers_needed], device=ctx.device))
    return model.truncated(int(counts.max()))


def head_of(model: Model) -> VocabHead:
    """The head of a model on the last stage."""
    assert model.head is not None, "only the last stage has a head"
    return model.head


class Family(Protocol):
    """All models of one `model_type`."""

    model_type: str

    def read_config(self, file: ConfigFile) -> ModelConfig:
        """Read config.json; raises CheckpointError for what the family does not support."""
        ...

    def load(self, config: Any, weights: ShardedWeights, *, on_progress: Progress) -> Model:
        """Load one rank's share."""
        ...


def read_config(model_dir: Path) -> ModelConfig:
    """Read and check config.json of a model directory.

    Raises:
        CheckpointError: there is no directory or readable config.json, or the model is not supported.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"model {str(model_dir)!r} is neither a directory nor a name on the Hub such as Qwen/Qwen3-8B; give the "
            "directory with its config.json"
        )
    whole = ConfigFile.read(model_dir.absolute() / "config.json")
    wrapper = WRAPPERS.get(whole.text("model_type"))
    file = whole if wrapper is None else text_part(whole, wrapper)
    file = _own_type(file)
    family = _family(file.text("model_type"), model_dir)
    quantisation = read_quantisation(model_dir)
    if file.raw("dtype") is None and file.raw("torch_dtype") is None:
        file = file.having(dtype=plain_dtype(model_dir, is_quantised=quantisation is not None))
    config = family.read_config(file)
    unknown = unknown_keys(config.model_type, whole.unread(), path=whole.path)
    if wrapper is None:
        return replace(config, unknown_keys=unknown)
    return replace(
        config,
        unknown_keys=unknown,
        part_of=whole.text("model_type"),
        prefixes=wrapper.prefixes,
        ignored_tensors=(*config.ignored_tensors, *wrapper.ignored_tensors),
    )


def components(config: ModelConfig, fmt: CacheFormat) -> tuple[Component, ...]:
    """The kinds of cached state of a model and of its draft model."""
    own = config.components(fmt)
    if config.draft is None:
        return own
    drafts = components(config.draft.model, fmt)
    return (*own, *(_behind(config.num_layers, part) for part in drafts))


def _behind(num_layers: int, part: Component) -> Component:
    """A draft model's component, with its layers numbered after the target's `num_layers`."""
    layers = tuple(num_layers + layer for layer in part.layers)
    return replace(part, name=f"draft_{part.name}", layers=layers, is_draft=True)


def check_split(config: ModelConfig, split: Split) -> None:
    """Check that a model can be split this way.

    Raises:
        ConfigError: it cannot; the message lists values that work.
    """
    counts = config.head_counts
    wrong = _obstacle(counts, split)
    if wrong:
        is_cp = not _obstacle(counts, replace(split, cp=1))
        axis, value = ("cp", split.cp) if is_cp else ("tp", split.tp)
        sizes = range(1, max(count.count for count in counts) + 1)
        others = split if is_cp else replace(split, cp=1)
        tried = ((size, replace(others, cp=size) if is_cp else replace(others, tp=size)) for size in sizes)
        served = [size for size, split in tried if not _obstacle(counts, split)]
        at = f" at tp={split.tp}" if is_cp and split.tp > 1 else ""
        raise ConfigError(f"{axis}={value}{at} {wrong} of {config.name}; use one of {served}")
    _check_stages(config, split)
    if config.draft is not None:
        check_split(config.draft.model, replace(split, pp=1, stages=()))  # all of it is on the last stage


def load_model(
    config: ModelConfig, source: WeightSource, ctx: ParallelContext, dtype: torch.dtype, *, on_progress: Progress
) -> Model:
    """Load one rank's share of a model.

    Args:
        dtype: of weights and activations.
        on_progress: called with (layers loaded, layers of this stage) after each layer.
    Raises:
        CheckpointError: a tensor is missing or has the wrong shape.
        ConfigError: the model cannot be split this way.
    """
    check_split(config, ctx.split)
    return family_of(config).load(config, own_weights(config, source, ctx, dtype), on_progress=on_progress)


def own_weights(config: ModelConfig, source: WeightSource, ctx: ParallelContext, dtype: torch.dtype) -> ShardedWeights:
    """One rank's view of a model's weights, with the tensor names of its family.

    Args:
        source: weights with the tensor names of the checkpoint.
        dtype: of weights and activations.
    """
    return ShardedWeights(PrefixedSource(source, prefixes_of(source, config.prefixes)), ctx, dtype)


def check_weights(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare the names and shapes of a checkpoint's tensors with those of the model, without reading their data.

    Raises:
        CheckpointError: a tensor is missing, has the wrong shape or type, or does not belong to the model.
    """
    names = CheckedNames(checkpoint)
    ctx = ParallelContext.single(torch.device("meta"))
    weights = own_weights(config, names, ctx, torch.float32)
    family_of(config).load(config, weights, on_progress=lambda done, total: None)
    ignored = [re.compile(pattern) for pattern in (*_ALWAYS_IGNORED, *config.ignored_tensors)]
    if config.tie_word_embeddings:
        ignored.append(re.compile(r"^lm_head\.weight$"))
    prefixes = prefixes_of(names, config.prefixes)
    unread = [(prefixes.ours(name), name) for name in names.unread()]
    drafts = _draft_layers(config, [name for name, _ in unread])
    surplus = [
        published
        for name, published in unread
        if _layer_number(name) not in drafts and not any(pattern.search(name) for pattern in ignored)
    ]
    if surplus:
        raise CheckpointError(
            f"{checkpoint.model_dir} has {len(surplus)} tensors that a {config.model_type} with this config.json does "
            f"not have: {', '.join(surplus[:5])}{', ...' if len(surplus) > 5 else ''}; config.json and weights belong "
            "to different models"
        )


_ALWAYS_IGNORED = (r"\.rotary_emb\.inv_freq$",)
"""Tensors in old checkpoints that can be computed from config.json."""

_DRAFT_ONLY = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\b")
"""Tensors that only prediction layers have."""


def _draft_layers(config: ModelConfig, names: Sequence[str]) -> set[int]:
    """Prediction layers among those of `names`: they come after the model's layers and have tensors of their own."""
    after = range(config.num_layers, config.num_layers + config.num_drafts)
    return {layer for layer in map(_layer_number, filter(_DRAFT_ONLY.search, names)) if layer in after}


def _layer_number(name: str) -> int:
    """The layer of a tensor, -1 for none."""
    found = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(found[1]) if found else -1


_FAMILIES = {
    "bailing_hybrid": "BailingHybrid",
    "bailing_moe_v2_5": "BailingMoeV25",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "falcon_h1": "FalconH1",
    "gemma3_text": "Gemma3Text",
    "glm4_moe": "Glm4Moe",
    "gemma4_text": "Gemma4Text",
    "glm_moe_dsa": "GlmMoeDsa",
    "gpt_oss": "GptOss",
    "granitemoehybrid": "GraniteMoeHybrid",
    "kimi_k2": "KimiK2",
    "kimi_k3_text": "KimiK3Text",
    "kimi_linear": "KimiLinear",
    "llama": "Llama",
    "mimo": "MiMo",
    "minimax": "MiniMax",
    "minimax_m1": "MiniMaxM1",
    "minimax_m2": "MiniMaxM2",
    "minimax_text_01": "MiniMaxText01",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron_h": "NemotronH",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen35MoeText",
    "qwen3_5_text": "Qwen35Text",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_vl_moe_text": "Qwen3VlMoeText",
    "smollm3": "SmolLM3",
}
"""model_type, which is also the name of the family's file in this folder -> name of its class."""


_ARCHITECTURES = {"BailingMoeV2_5ForCausalLM": "bailing_moe_v2_5"}
"""Architectures published under the model_type of another family -> their own family."""


def _own_type(file: ConfigFile) -> ConfigFile:
    """The same file, with the model_type replaced if its architecture is one of `_ARCHITECTURES`."""
    architectures = file.raw("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    own = next((_ARCHITECTURES[name] for name in named if name in _ARCHITECTURES), None)
    return file if own is None else file.having(model_type=own)


def _family(model_type: str, model: object) -> Family:
    if model_type not in _FAMILIES:
        known = ", ".join(sorted({*_FAMILIES, *WRAPPERS}))
        need = f": it needs {NEEDS[model_type]}" if model_type in NEEDS else ""
        raise CheckpointError(f"model_type {model_type!r} of {model} is not supported{need}; known are {known}")
    family: Family = getattr(importlib.import_module(f"raycache.models.{model_type}"), _FAMILIES[model_type])()
    return family


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model."""
    return _family(config.model_type, config.name)


def _obstacle(counts: Sequence[HeadCount], split: Split) -> str:
    return next(filter(None, (count.obstacle(split) for count in counts)), "")


def _check_stages(config: ModelConfig, split: Split) -> None:
    """Check the number of stages, and `pp_layers` if given."""
    bound = [layer for layer in config.bound_layers if 0 < layer < config.num_layers]
    most = config.num_layers - len(bound)
    if split.pp > most:
        rest = f" minus {len(bound)} that must be on the stage of the layer before them" if bound else ""
        raise ConfigError(
            f"pp={split.pp} exceeds num_hidden_layers={config.num_layers}{rest} of {config.name}; use at most {most}"
        )
    if not split.stages:
        return
    total, begin = sum(split.stages), bound_begin(split.stages, bound)
    if total != config.num_layers:
        wrong = f"adds up to {total} layers, but {config.name} has {config.num_layers}"
    elif begin is not None:
        wrong = f"starts a stage at layer {begin} of {config.name}, which shares the indexer of the layer before it"
    else:
        return
    given, near = (
        ",".join(map(str, stages))
        for stages in (split.stages, nearest_stages(split.stages, num_layers=config.num_layers, bound=bound))
    )
    raise ConfigError(f"pp_layers={given} {wrong}; use auto, or {near}")
