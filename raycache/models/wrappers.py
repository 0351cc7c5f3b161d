"""Vision models whose text model belongs to a supported family: only the text model is read, other tensors are ignored.

The text model is described by `text_config` in config.json, and its tensors have other prefixes than in text-only
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.prefixes import Prefixes
from raycache.errors import CheckpointError

ARCHITECTURE = "ForConditionalGeneration"
"""Suffix of the architectures of vision models that generate text."""

INNER = Prefixes((("model.", "model.language_model."),))
"""The layers of the text model are inside `model`, its head is not."""

WHOLE = Prefixes((("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")))
"""The text model is nested as a whole."""

TOWER = (r"^(model\.)?(vision_tower|multi_modal_projector|mm_projector)\.",)
"""Vision tensors of most models."""

VISUAL = (r"^model\.visual\.",)
"""Vision tensors of Qwen."""

GEMMA_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 4096,
}
"""Defaults of transformers that published config files of Gemma 3 rely on; the family has the others."""


@dataclass(frozen=True)
class Wrapper:
    """The text model of a vision model.

    Attributes:
        families: model_type of `text_config` -> model_type of the family; the first one is the default.
        prefixes: of the text model's tensors, for each published layout.
        ignored_tensors: regular expressions matching the names of all other tensors.
        defaults: values of keys that may be missing in `text_config`.
    """

    families: Mapping[str, str]
    prefixes: tuple[Prefixes, ...]
    ignored_tensors: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper({"gemma3_text": "gemma3_text"}, (WHOLE, INNER), TOWER, GEMMA_DEFAULTS),
    "gemma4": Wrapper(
        {"gemma4_text": "gemma4_text"}, (INNER,), (r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",)
    ),
    "kimi_k25": Wrapper({"kimi_k2": "kimi_k2", "deepseek_v3": "deepseek_v3"}, (WHOLE, INNER), TOWER),
    "kimi_k3": Wrapper({"kimi_linear": "kimi_k3_text"}, (WHOLE,), TOWER),
    "mistral3": Wrapper({"mistral": "mistral", "ministral3": "ministral3"}, (WHOLE, INNER), TOWER),
    "qwen3_5": Wrapper({"qwen3_5_text": "qwen3_5_text"}, (INNER,), VISUAL),
    "qwen3_5_moe": Wrapper({"qwen3_5_moe_text": "qwen3_5_moe_text"}, (INNER,), VISUAL),
    "qwen3_vl": Wrapper({"qwen3_vl_text": "qwen3"}, (INNER,), VISUAL),
    "qwen3_vl_moe": Wrapper({"qwen3_vl_moe_text": "qwen3_vl_moe_text"}, (INNER,), VISUAL),
}
"""model_type of the vision model -> its text model."""

_INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""Keys that are taken from the top level if `text_config` does not have them."""


def text_part(file: ConfigFile, wrapper: Wrapper) -> ConfigFile:
    """Convert config.json of a vision model to that of its text model.

    Raises:
        CheckpointError: there is no `text_config`, or it belongs to a family that is not supported here.
    """
    text = file.section("text_config")
    if not text.values():
        raise CheckpointError(f"{file.path} has no text_config; is the file complete? Download it again")
    architectures = file.raw("architectures")
    if isinstance(architectures, list) and not any(str(name).endswith(ARCHITECTURE) for name in architectures):
        raise CheckpointError(f"{file.path}: {architectures} does not generate text (...{ARCHITECTURE} does)")
    kind = text.text("model_type", next(iter(wrapper.families)))
    if kind not in wrapper.families:
        raise CheckpointError(
            f"{file.path}: text_config has model_type {kind!r}, which is not supported inside a "
            f"{file.text('model_type')}; known are {', '.join(wrapper.families)}"
        )
    outer = {key: file.raw(key) for key in _INHERITED if file.raw(key) is not None}
    absent = {key: value for key, value in {**wrapper.defaults, **outer}.items() if text.raw(key) is None}
    ends = list(dict.fromkeys((*file.token_ids("eos_token_id"), *text.having(**absent).token_ids("eos_token_id"))))
    given = {**absent, **_tied(file, text), "eos_token_id": ends}
    return text.having(**given, model_type=wrapper.families[kind], architectures=None)


def _tied(file: ConfigFile, text: ConfigFile) -> dict[str, bool]:
    """`tie_word_embeddings` of either file, if present; embeddings are tied only if both agree."""
    given = [part.flag("tie_word_embeddings") for part in (file, text) if part.raw("tie_word_embeddings") is not None]
    return {"tie_word_embeddings": all(given)} if given else {}
