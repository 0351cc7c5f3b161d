"""What can be wrong with a model directory, and what is said about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raycache.checkpoint.tensor_files import INDEX, SINGLE, Checkpoint, weights_fingerprint
from raycache.errors import CheckpointError
from raycache.models.base import read_config
from tests.oracle.tiny import make_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "sharded", max_shard_size="200KB")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def copy_sharded(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def test_slices_are_those_of_the_whole_tensor(whole: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(whole / SINGLE)[name]
    checkpoint = Checkpoint(whole)
    assert torch.equal(checkpoint.read(name, shape=(64, 96)), stored)
    assert torch.equal(checkpoint.read(name, shape=(64, 96), axis=0, start=16, stop=32), stored[16:32])
    assert torch.equal(checkpoint.read(name, shape=(64, 96), axis=1, start=48), stored[:, 48:])
    assert checkpoint.read(name, shape=(64, 96), axis=0, start=64, stop=64).shape == (0, 96)


def test_shards_hold_the_same_as_one_file(whole: Path, sharded: Path) -> None:
    stored = load_file(whole / SINGLE)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    checkpoint = Checkpoint(sharded)
    assert checkpoint.unread() == sorted(stored)
    for name, tensor in stored.items():
        assert torch.equal(checkpoint.read(name, shape=tensor.shape), tensor)
    assert checkpoint.unread() == []


def test_a_missing_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint(tmp_path / "nowhere")


def test_a_missing_tensor_or_another_shape_is_named(whole: Path) -> None:
    checkpoint = Checkpoint(whole)
    with pytest.raises(CheckpointError, match=r"has no tensor model\.norm\.bias"):
        checkpoint.read("model.norm.bias", shape=(64,))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* has shape \[64\], config\.json wants \[65\]"):
        checkpoint.read("model.norm.weight", shape=(65,))


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_cut_short_is_refused_at_open(copy: Path, kept: int) -> None:
    file = copy / SINGLE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has {file.stat().st_size} bytes, .* incomplete"):
        Checkpoint(copy)


def test_a_file_that_is_too_long_is_refused(copy: Path) -> None:
    with (copy / SINGLE).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match="incomplete or damaged"):
        Checkpoint(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs pointer.*git lfs pull"),
        (b"<!DOCTYPE html>" * 99, "is not a safetensors file"),
        ((3).to_bytes(8, "little") + b"{,}", "damaged header"),
        ((13).to_bytes(8, "little") + b'{"a":{"b":1}}', "damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "damaged header"),
    ],
)
def test_a_file_of_another_kind_is_refused(copy: Path, content: bytes, message: str) -> None:
    (copy / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(copy)


def with_header(path: Path, rows: dict[str, Any] | str, num_bytes: int) -> Path:
    """A safetensors file of zeros."""
    header = (rows if isinstance(rows, str) else json.dumps(rows)).encode()
    path.mkdir(exist_ok=True)
    (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return path


def row(shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": row([4], 0, 16), "b": row([4], 8, 24)}, "data_offsets of b are 8 and 24, .* ends at 16"),
        ({"a": row([4], 0, 16), "b": row([1], 20, 24)}, "data_offsets of b are 20 and 24"),
        ({"a": row([4], -16, 0), "b": row([6], 0, 24)}, "data_offsets of a must be positive integers or zero"),
        ({"a": row([-6], 0, 24)}, "shape and data_offsets of a must be"),
        ({"a": row([6.0], 0, 24)}, "shape and data_offsets of a must be"),
        ({"a": row([5], 0, 24)}, "a has 24 bytes, its shape says 20"),
        ({"a": row([10**9, 10**9], 0, 24)}, "a has 24 bytes, its shape says 4000000000000000000"),
        ({"a": row([6], "0", "24")}, "damaged header"),
        ("[" * 100_000, "damaged header"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(with_header(tmp_path / "model", rows, 24))


def test_tensors_without_numbers_have_a_place(tmp_path: Path) -> None:
    rows = {"none": row([0, 3], 4, 4), "one": row([1], 0, 4), "two": row([2], 4, 12)}
    assert Checkpoint(with_header(tmp_path / "model", rows, 12)).names() == ["none", "one", "two"]


def test_missing_shards_are_all_named(copy_sharded: Path) -> None:
    first, second, *_ = sorted(copy_sharded.glob("*.safetensors"))
    first.unlink()
    second.unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 2 of \d+ weight files: {first.name}, {second.name}"):
        Checkpoint(copy_sharded)


def test_a_half_downloaded_shard_is_named_with_its_sizes(copy_sharded: Path) -> None:
    last = sorted(copy_sharded.glob("*.safetensors"))[-1]
    size = last.stat().st_size
    last.write_bytes(last.read_bytes()[: size // 2])
    with pytest.raises(CheckpointError, match=rf"{last.name} has {size // 2} bytes, its header says {size};"):
        Checkpoint(copy_sharded)


def test_an_index_that_lies_is_refused(copy_sharded: Path) -> None:
    index = copy_sharded / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**weight_map, "model.norm.bias": weight_map["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"holds tensor model\.norm\.bias, it does not"):
        Checkpoint(copy_sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ("[" * 100_000, "not a safetensors index"),
        ('{"weight_map": 3}', "not a safetensors index"),
        ('{"weight_map": {}}', "must name files beside it"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "must name files beside it"),
    ],
)
def test_a_bad_index_is_refused(copy_sharded: Path, text: str, message: str) -> None:
    (copy_sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(copy_sharded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "only pickled PyTorch weights .*convert"),
        ("model.Q4_1.gguf", "only GGUF weights"),
        ("model-00001-of-00002.safetensors", f"download {INDEX}"),
        ("README.md", "has no weights; expected"),
    ],
)
def test_a_directory_without_safetensors_says_what_is_wrong(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_codes_that_the_config_does_not_explain_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(
        CheckpointError, match=r"tensor w .* is F8_E4M3, which config.json and hf_quant_config.json do not explain"
    ):
        Checkpoint(tmp_path).read("w", shape=(2, 2))


def test_config_of_a_real_directory(whole: Path) -> None:
    config = read_config(whole)
    assert (config.name, config.model_type, config.dtype) == ("whole", "llama", "float32")
    assert (
        config.num_layers,
        config.attention.num_heads,
        config.attention.num_kv_heads,
        config.attention.head_dim,
    ) == (4, 8, 2, 16)
    assert (config.bos_token_id, config.eos_token_ids, config.max_position_embeddings) == (0, (1,), 4096)


def test_end_tokens_come_from_both_files(copy: Path) -> None:
    edit(copy / "config.json", eos_token_id=[5, 7], torch_dtype="bfloat16", dtype=...)
    edit(copy / "generation_config.json", eos_token_id=[9, 5])
    config = read_config(copy)
    assert config.eos_token_ids == (9, 5, 7)
    assert config.dtype == "bfloat16"
    (copy / "generation_config.json").unlink()
    assert read_config(copy).eos_token_ids == (5, 7)


def test_an_early_llama_has_as_many_kv_heads_and_divides_its_hidden_size(copy: Path) -> None:
    edit(copy / "config.json", num_key_value_heads=..., head_dim=...)
    config = read_config(copy)
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "foo"}, "model_type 'foo' of .* is not supported; known are .*llama"),
        ({"model_type": "mamba"}, "is not supported: it needs Mamba layers of the first version; known are .*llama"),
        ({"model_type": ...}, "does not say model_type"),
        ({"hidden_size": ...}, "does not say hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported; only 'silu' is"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method 'awq', which is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*no causal"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(copy)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}, (2, 3)),
        ({"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 4}, ()),
        ({"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 24, "layer_types": [FULL, SLIDING] * 2}, (1, 3)),
        ({"layer_types": [FULL] * 4}, ()),
    ],
)
def test_qwen3_has_windows_where_the_file_says_so(
    copy: Path, changes: dict[str, Any], windowed: tuple[int, ...]
) -> None:
    edit(copy / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"], **changes)
    config: Any = read_config(copy)
    assert (config.attention.windowed, config.attention.window) == (windowed, 24 if windowed else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": False, "sliding_window": 24, "layer_types": [FULL, SLIDING] * 2}, "use_sliding_window"),
        (
            {"use_sliding_window": True, "sliding_window": None, "layer_types": [FULL, SLIDING] * 2},
            "sliding_window=None",
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"head_dim": ...}, "does not say head_dim"),
    ],
)
def test_a_qwen3_that_contradicts_itself_is_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    edit(copy / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"], **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '"llama"'])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json .*download it again"):
        read_config(copy)


def test_no_directory_and_no_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'no/such/model' is neither a directory nor a name on the Hub"):
        read_config(Path("no/such/model"))
    with pytest.raises(CheckpointError, match=r"config\.json is missing; is .* a Hugging Face model directory"):
        read_config(tmp_path)


def test_a_fingerprint_tells_trained_weights_apart_and_not_their_place(whole: Path, copy: Path) -> None:
    first = weights_fingerprint(whole)
    assert weights_fingerprint(copy) == first
    tensors = load_file(copy / SINGLE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1e-3
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    assert weights_fingerprint(copy) != first


def test_a_fingerprint_knows_the_config(copy: Path) -> None:
    first = weights_fingerprint(copy)
    edit(copy / "config.json", rms_norm_eps=1e-3)
    assert weights_fingerprint(copy) != first
