"""Vision models whose text part is a model of a family: only that part is read, and vision tensors are ignored.

`config.json` says what it says about text in `text_config`; the tensors of the text part begin with other prefixes than
those of a checkpoint that has nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.prefixes import Prefixes
from raycache.errors import CheckpointError

ARCHITECTURE = "ForConditionalGeneration"
"""What names of vision models that write text end with."""

INNER = Prefixes((("model.", "model.language_model."),))
"""The text part's layers are inside of `model`, its head is not."""

WHOLE = Prefixes((("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")))
"""The text part is a model of its own."""

TOWER = (r"^(model\.)?(vision_tower|multi_modal_projector|mm_projector)\.",)
"""Tensors of vision parts beside it."""

VISUAL = (r"^model\.visual\.",)
"""Tensors of Qwen's vision parts."""

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
"""What published text parts of Gemma 3 leave to the classes that read them; the rest is in the family."""


@dataclass(frozen=True)
class Wrapper:
    """A vision model, as far as its text part is concerned.

    Attributes:
        families: model_type of `text_config` -> the family that it is; the first one where it does not say.
        prefixes: of the text part's tensors, in each layout that is published.
        ignored_tensors: regular expressions of the names of all others.
        defaults: values of keys that `text_config` may leave out.
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
"""model_type of the vision model -> what its text part is."""

_INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")
"""Keys that the text part takes from the whole model where it does not have them."""


def text_part(file: ConfigFile, wrapper: Wrapper) -> ConfigFile:
    """What config.json of a vision model says about its text part, as the config.json of a model of its own.

    Args:
        file: config.json.
        wrapper: the vision model.
    Raises:
        CheckpointError: there is no `text_config`, or it is of a family that this vision model does not go with.
    """
    text = file.section("text_config")
    if not text.values():
        raise CheckpointError(f"{file.path} has no text_config; is the file complete? Download it again")
    architectures = file.raw("architectures")
    if isinstance(architectures, list) and not any(str(name).endswith(ARCHITECTURE) for name in architectures):
        raise CheckpointError(f"{file.path} is of {architectures}, which does not generate text (...{ARCHITECTURE})")
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
    """`tie_word_embeddings` of either, if any says so; where they differ, the head has a tensor of its own."""
    said = [part.flag("tie_word_embeddings") for part in (file, text) if part.raw("tie_word_embeddings") is not None]
    return {"tie_word_embeddings": all(said)} if said else {}
