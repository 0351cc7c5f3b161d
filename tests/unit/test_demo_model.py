"""The demo model: conversion of the weights that a Python package carries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.demo.model import make_demo_model
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import ConfigError
from raycache.models.base import read_config


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    return make_demo_model(tmp_path_factory.mktemp("demo") / "smollm2", dtype="bfloat16")


@pytest.mark.real_model
def test_the_demo_model_speaks(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.real_model
def test_the_demo_model_is_a_normal_directory(demo: Path) -> None:
    config = read_config(demo)
    assert (config.model_type, config.attention.num_heads, config.attention.num_kv_heads) == ("llama", 9, 3)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", 1, (2,))
    assert len(Checkpoint(demo).unread()) == 272
    assert [path.name for path in demo.parent.iterdir()] == [demo.name]  # nothing half-made is left beside it


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text", ["12 times 3456.7!", "  indented\n\tcode()", "émoji 😀 日本語 ١٢٣", "<|im_start|>user\n"]
)
def test_its_tokenizer_gives_any_text_back_and_splits_digits(demo: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(sum(char.isdigit() for char in tokenizer.decode([token])) <= 1 for token in ids)


@pytest.mark.real_model
def test_a_made_directory_is_used_again_and_another_is_refused(demo: Path, tmp_path: Path) -> None:
    before = (demo / "model.safetensors").stat().st_mtime_ns
    assert make_demo_model(demo, dtype="bfloat16") == demo
    assert (demo / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"in bfloat16, not .* in float32; give a new directory"):
        make_demo_model(demo, dtype="float32")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        make_demo_model(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='int8' is unknown; use one of float32"):
        make_demo_model(tmp_path / "demo", dtype="int8")
