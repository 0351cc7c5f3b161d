"""Tiny random vision models whose text part is served, as data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.oracle.families import KNOWN, draw_weights


@dataclass(frozen=True)
class Wrapped:
    """A tiny configuration.

    Attributes:
        text: key of `KNOWN` whose settings the text part has.
        vision: keys of `vision_config`.
        text_type: model_type of `text_config`, if it is not that of the family.
        text_settings: keys of `text_config` that differ from the family's.
    """

    text: str
    vision: Mapping[str, Any]
    text_type: str = ""
    text_settings: Mapping[str, Any] = field(default_factory=dict)


def make_wrapper(model_dir: Path, name: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write config.json and the float32 weights of a random vision model, under the names of published checkpoints.

    Args:
        model_dir: made if needed.
        name: a key of `WRAPPERS`, and a model_type of Hugging Face.
        seed: of the weights.
        settings: other keys of config.json.
    Returns:
        The model, to compare with.
    """
    wrapped = WRAPPERS[name]
    family = KNOWN[wrapped.text]
    text = {**family.settings, **wrapped.text_settings, "model_type": wrapped.text_type or family.model_type}
    config = AutoConfig.for_model(
        name, text_config=copy.deepcopy(text), vision_config=copy.deepcopy(dict(wrapped.vision)), **settings
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw_weights(model, seed=seed)
    model.save_pretrained(model_dir)
    if name == "kimi_k25":  # save_pretrained turns a new name of vision layers back in the text part as well
        path = model_dir / "model.safetensors"
        save_file(
            {key.replace(".model.blocks.", ".model.layers."): value for key, value in load_file(path).items()}, path
        )
    return model.eval()


_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
    }
}
"""Positions of text are alike on the three axes."""

WRAPPERS: dict[str, Wrapped] = {
    "gemma3": Wrapped("gemma3", {"model_type": "siglip_vision_model", **_TOWER}),
    "gemma4": Wrapped("gemma4", {"model_type": "gemma4_vision", **_TOWER}),
    "kimi_k25": Wrapped("deepseek_v3", {"model_type": "kimi_k25_vision", **_TOWER}),
    "mistral3": Wrapped("mistral", {"model_type": "pixtral", **_TOWER, "head_dim": 16}),
    "qwen3_5": Wrapped("qwen3_5", _QWEN_VISION),
    "qwen3_5_moe": Wrapped("qwen3_5_moe", _QWEN_VISION),
    "qwen3_vl": Wrapped("qwen3", {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, "qwen3_vl_text", _MROPE),
    "qwen3_vl_moe": Wrapped(
        "qwen3_moe", {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, "qwen3_vl_moe_text", _MROPE
    ),
}
"""By model_type."""
