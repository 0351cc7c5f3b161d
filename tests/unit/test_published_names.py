"""Checkpoints under the names, types and shapes that vendors publish, each also with one of its names damaged."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import tests.published
from raycache.checkpoint.tensor_files import SINGLE, Checkpoint
from raycache.errors import CheckpointError
from raycache.models.base import check_weights, read_config
from raycache.models.drafts.loading import check_draft, read_models
from tests.published.tensors import Tensors

MODULES = {
    name: module
    for _, name, _ in pkgutil.iter_modules(tests.published.__path__)
    if "CONFIG" in vars(module := importlib.import_module(f"tests.published.{name}"))
}
IGNORED = r"layers\.3\.(embed_tokens|shared_head\.head)\."
"""Copies of the model's own in the layer behind the last one."""
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}


def write_config(model_dir: Path, config: dict[str, Any]) -> Path:
    model_dir.mkdir(exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(config))
    return model_dir


def write_headers(model_dir: Path, tensors: Tensors) -> Checkpoint:
    """A checkpoint whose numbers are a hole in the file."""
    end, rows = 0, {}
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + BYTES[dtype] * math.prod(shape)
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(rows).encode()
    with (model_dir / SINGLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return Checkpoint(model_dir)


@pytest.fixture(params=list(MODULES))
def published(request: pytest.FixtureRequest) -> Any:
    return MODULES[request.param]


def test_a_published_checkpoint_is_taken_as_it_is(tmp_path: Path, published: Any) -> None:
    config = read_config(write_config(tmp_path, published.CONFIG))
    check_weights(config, write_headers(tmp_path, published.tensors(published.CONFIG)))
    assert config.unknown_keys == ()


def test_a_tensor_of_another_name_is_missed_by_its_own(tmp_path: Path, published: Any) -> None:
    config = read_config(write_config(tmp_path, published.CONFIG))
    tensors = published.tensors(published.CONFIG)
    kinds = {re.sub(r"\d+", "N", name): name for name in tensors}
    for name in kinds.values():
        if any(re.search(pattern, name) for pattern in (*config.ignored_tensors, IGNORED)):
            continue
        write_headers(tmp_path, {f"{key}x" if key == name else key: value for key, value in tensors.items()})
        with pytest.raises(CheckpointError, match=re.escape(name.removesuffix("_packed"))):
            check_weights(config, Checkpoint(tmp_path))
            check_draft(read_models(tmp_path, "mtp"), tmp_path)


def test_a_tensor_that_no_model_of_the_family_has_is_named(tmp_path: Path, published: Any) -> None:
    config = read_config(write_config(tmp_path, published.CONFIG))
    surplus = {"model.layers.0.some_gate.weight": ("BF16", (4, 4))}
    with pytest.raises(CheckpointError, match="model.layers.0.some_gate.weight"):
        check_weights(config, write_headers(tmp_path, published.tensors(published.CONFIG) | surplus))


def test_a_key_that_is_not_known_is_named_in_a_warning(tmp_path: Path, published: Any) -> None:
    config = read_config(write_config(tmp_path, {**published.CONFIG, "some_new_trick": True}))
    assert config.unknown_keys == ("some_new_trick",) and "some_new_trick" in config.doubt


@pytest.mark.parametrize("key", ["hc_mult", "clip_qkv", "logit_scale", "attention_value_scale"])
def test_a_key_that_changes_the_model_is_refused_but_for_its_neutral_value(
    tmp_path: Path, published: Any, key: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{key}=4, which changes what the model computes"):
        read_config(write_config(tmp_path, {**published.CONFIG, key: 4}))
    neutral = {"logit_scale": 1.0, "attention_value_scale": 1}.get(key, 0)
    for value in (neutral, None):
        assert not read_config(write_config(tmp_path, {**published.CONFIG, key: value})).unknown_keys
