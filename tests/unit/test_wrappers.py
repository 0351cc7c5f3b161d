"""Vision models whose text part is served, against transformers' whole model on the same weights and text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.models.base import check_weights, read_config
from raycache.models.wrappers import WRAPPERS
from raycache.parallel.sharding import Split
from tests.oracle import wrappers
from tests.oracle.gang import gang_logits
from tests.oracle.single import single_rank_logits

IDS = np.random.default_rng(5).integers(3, 515, 60).tolist()

Tiny = Callable[[str], tuple[Path, np.ndarray]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A vision model's directory, and the logits [T, V] of transformers after each of `IDS`."""
    root, made = tmp_path_factory.mktemp("tiny"), dict[str, tuple[Path, np.ndarray]]()

    def make(name: str) -> tuple[Path, np.ndarray]:
        if name not in made:
            is_tied = {} if name == "gemma3" else {"tie_word_embeddings": False}
            model = wrappers.make_wrapper(root / name, name, **is_tied)
            with torch.no_grad():
                made[name] = root / name, model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
        return made[name]

    return make


def rewritten(model_dir: Path, copy: Path, *, rename: Callable[[str], str] = str, **values: Any) -> Path:
    """A copy with other names of tensors, and other values in config.json; None drops a key."""
    copy.mkdir()
    tensors = load_file(model_dir / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, copy / "model.safetensors")
    config = {**json.loads((model_dir / "config.json").read_text()), **values}
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


def test_every_wrapper_is_compared() -> None:
    elsewhere = {"kimi_k3"}  # which transformers does not have: test_families_kimi_k3.py
    assert set(wrappers.WRAPPERS) | elsewhere == set(WRAPPERS)


@pytest.mark.parametrize("name", wrappers.WRAPPERS)
def test_logits_of_text_are_those_of_the_whole_model(tiny: Tiny, name: str) -> None:
    model_dir, theirs = tiny(name)
    for cuts in ((), (1, 30, 31)):
        assert np.abs(single_rank_logits(model_dir, IDS, cuts=cuts) - theirs).max() < 1e-4
    check_weights(read_config(model_dir), Checkpoint(model_dir))


@pytest.mark.parametrize("name", ["gemma3", "kimi_k25", "mistral3"])
def test_tensors_may_be_named_as_transformers_names_its_modules(tiny: Tiny, tmp_path: Path, name: str) -> None:
    def rename(name: str) -> str:
        inner = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
        return inner if inner.startswith("lm_head.") else f"model.{inner.removeprefix('model.')}"

    model_dir, theirs = tiny(name)
    copy = rewritten(model_dir, tmp_path / "copy", rename=rename)
    assert Checkpoint(copy).has("model.language_model.norm.weight")
    check_weights(read_config(copy), Checkpoint(copy))
    assert np.abs(single_rank_logits(copy, IDS) - theirs).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_experts_may_be_stored_one_by_one_or_all_at_once(tiny: Tiny, tmp_path: Path, name: str) -> None:
    def in_one(tensors: dict[str, Tensor], at: str, kind: str) -> Tensor:
        found = tensors.pop(f"{at}.{kind}", None)
        if found is not None:
            return found
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        each = [torch.cat([tensors.pop(f"{at}.{expert}.{part}.weight") for part in parts]) for expert in range(8)]
        return torch.stack(each)

    model_dir, theirs = tiny(name)
    for form in ("one by one", "all at once", "transposed")[: 3 if name == "qwen3_vl_moe" else 2]:
        copy = rewritten(model_dir, tmp_path / form)
        tensors = load_file(copy / "model.safetensors")
        for layer in range(4):
            at = f"model.language_model.layers.{layer}.mlp.experts"
            up, down = in_one(tensors, at, "gate_up_proj"), in_one(tensors, at, "down_proj")
            if form == "one by one":
                for expert in range(8):
                    gate_up = zip(("gate_proj", "up_proj"), up[expert].chunk(2), strict=True)
                    for kind, rows in (*gate_up, ("down_proj", down[expert])):
                        tensors[f"{at}.{expert}.{kind}.weight"] = rows.clone()
            else:
                both = {f"{at}.gate_up_proj": up, f"{at}.down_proj": down}
                tensors |= {key: rows.mT if form == "transposed" else rows for key, rows in both.items()}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, copy / "model.safetensors")
        check_weights(read_config(copy), Checkpoint(copy))
        (ours,) = gang_logits(copy, [IDS], [[(0, 0, 60)]], split=Split(tp=2))
        assert np.abs(ours - theirs).max() < 1e-4


def test_every_rank_of_a_split_finds_its_tensors(tiny: Tiny) -> None:
    model_dir, theirs = tiny("gemma3")
    (ours,) = gang_logits(model_dir, [IDS], [[(0, 0, 60)]], split=Split(tp=2, cp=2))
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "language_model.model.norm.weight",
            "language_model.model.norn.weight",
            "no tensor language_model.model.norm.",
        ),
        ("vision_tower.", "audio_tower.", r"tensors that a gemma3_text .* audio_tower\."),
        ("language_model.model.", "text.model.", "has no tensor language_model.model.embed_tokens.weight"),
    ],
)
def test_other_names_are_refused_as_published(tiny: Tiny, tmp_path: Path, old: str, new: str, message: str) -> None:
    copy = rewritten(tiny("gemma3")[0], tmp_path / "copy", rename=lambda name: name.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        check_weights(read_config(copy), Checkpoint(copy))


# config.json ----------------------------------------------------------------------------------------------------------


def written(model_dir: Path, **values: Any) -> Path:
    (model_dir / "config.json").write_text(json.dumps(values))
    return model_dir


GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""As gemma-3-4b says it."""


def test_what_a_published_gemma_leaves_out_is_that_of_its_class(tmp_path: Path) -> None:
    config: Any = read_config(written(tmp_path, **GEMMA))
    own = config.attention
    assert (own.num_heads, own.num_kv_heads, own.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (own.window, own.windowed[:6]) == (1024, (0, 1, 2, 3, 4, 6))
    assert (own.rope.theta, own.rope.factor, config.window_rope.theta) == (1e6, 8.0, 1e4)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == ("bfloat16", (1, 106), True)
    assert (own.scale, config.part_of) == (1 / 16, "gemma3")


def test_end_tokens_of_the_whole_model_and_of_its_text_part_both_end_an_output(tmp_path: Path) -> None:
    text = {**GEMMA["text_config"], "eos_token_id": 5}  # type: ignore[dict-item]
    assert read_config(written(tmp_path, **{**GEMMA, "text_config": text})).eos_token_ids == (1, 106, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "has no text_config"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama', which is not supported inside a gemma3"),
        ({"text_config": {**GEMMA["text_config"], "hidden_size": None}}, "does not say hidden_size"),  # type: ignore[dict-item]
        ({"architectures": ["Gemma3ForSequenceClassification"]}, "does not generate text"),
    ],
    ids=str,
)
def test_a_vision_model_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(written(tmp_path, **{**GEMMA, **change}))


@pytest.mark.parametrize(
    ("outer", "inner", "is_tied"),
    [({}, {}, True), ({"tie_word_embeddings": False}, {}, False), ({}, {"tie_word_embeddings": False}, False),
     ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, False)],
)  # fmt: skip
def test_a_head_is_tied_unless_either_part_says_that_it_is_not(
    tmp_path: Path, outer: dict[str, Any], inner: dict[str, Any], is_tied: bool
) -> None:
    text: Any = GEMMA["text_config"]
    config = read_config(written(tmp_path, **{**GEMMA, **outer, "text_config": {**text, **inner}}))
    assert config.tie_word_embeddings == is_tied
