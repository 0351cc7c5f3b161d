"""What config.json and hf_quant_config.json say of quantised weights, in the forms in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raycache.checkpoint.quantisation import Scheme, is_without_effect, read_quantisation
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.weights_form import weights_form
from raycache.errors import CheckpointError

BLOCKS = Scheme(Format.FP8_BLOCK, (128, 128))
TENSOR, CHANNEL = Scheme(Format.FP8_TENSOR, (0, 0)), Scheme(Format.FP8_CHANNEL, (1, 0))
NVFP4, MXFP4 = Scheme(Format.NVFP4, (1, 16)), Scheme(Format.MXFP4, (1, 32))
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FLOAT8, FLOAT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}
W4A16 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}


def compressed(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}


def read(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    return read_quantisation(folder)


@pytest.mark.parametrize(
    ("section", "schemes"),
    [
        (FP8, (BLOCKS,)),
        ({**FP8, "fmt": "float8_e4m3fn", "weight_block_size": [64, 32]}, (Scheme(Format.FP8_BLOCK, (64, 32)),)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (TENSOR, CHANNEL)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (TENSOR, CHANNEL)),
        ({"quant_method": "mxfp4"}, (MXFP4,)),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, (TENSOR,)),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt"}, (NVFP4, TENSOR)),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "FP8"}},
            },
            (TENSOR, NVFP4),
        ),
        (compressed("pack-quantized", **W4A16), (Scheme(Format.INT4, (1, 32)),)),
        (compressed("float-quantized", **FLOAT8, strategy="channel"), (CHANNEL,)),
        (compressed("naive-quantized", **FLOAT8, strategy="tensor"), (TENSOR,)),
        (compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[128, 128]), (BLOCKS,)),
        (compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16), (NVFP4,)),
        (compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32), (MXFP4,)),
    ],
    ids=str,
)  # fmt: skip
def test_published_sections_are_read_wherever_they_stand(
    tmp_path: Path, section: dict[str, Any], schemes: tuple[Scheme, ...]
) -> None:
    for config in (
        {"quantization_config": section},
        {"compression_config": section},
        {"text_config": {"quantization_config": section}},
    ):
        assert read(tmp_path, config).schemes == schemes


def test_the_file_of_modelopt_is_enough(tmp_path: Path) -> None:
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    found = read(tmp_path, {}, said)
    assert (found.method, found.schemes, found.excluded) == ("modelopt", (NVFP4, TENSOR), ("lm_head",))
    assert found.has_cache_scheme and found.path.name == "hf_quant_config.json"


def test_a_second_quantisation_adds_its_formats(tmp_path: Path) -> None:
    found = read(tmp_path, {"quantization_config": FP8}, {"quant_algo": "NVFP4", "exclude_modules": ["*.attn.*"]})
    assert found.schemes == (BLOCKS, NVFP4, TENSOR) and not found.excludes("model.layers.0.attn.wq")


def test_plain_models_are_not_quantised(tmp_path: Path) -> None:
    assert read(tmp_path, {"quantization_config": None}, {"kv_cache_quant_algo": "FP8"}) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"bits": 4}, "quant_method ''"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({**FP8, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of module names"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "NVFP4 with group_size=32"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "8-bit int weights per channel"),
        (compressed("pack-quantized", **{**W4A16, "num_bits": 8}), "8-bit int weights per group"),
        (compressed("pack-quantized", **{**W4A16, "symmetric": False}), "zero points"),
        (compressed("pack-quantized", **{**W4A16, "actorder": "group"}), "reordered columns"),
        ({**compressed("pack-quantized", **W4A16), "ignore": ["re:("]}, "not a valid regular expression"),
        ({**compressed("pack-quantized", **W4A16), "sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        ({**compressed("pack-quantized", **W4A16), "transform_config": {"R1": {"u": 1}}}, "transform_config"),
        ({**compressed("pack-quantized"), "config_groups": {}}, "no config_groups"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_in_one_line(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read(tmp_path, {"quantization_config": section})
    assert "\n" not in str(refusal.value)


def test_excluded_modules_are_names_parts_globs_and_regular_expressions(tmp_path: Path) -> None:
    patterns = ["gate", "lm_head", "model.layers.0*", "re:.*self_attn.*", "model.layers.*.mlp.router", "model.norm"]
    found = read(tmp_path, {"quantization_config": {**FP8, "modules_to_not_convert": patterns}})
    for module in (
        "model.layers.3.mlp.gate",
        "lm_head",
        "model.layers.0.mlp.up_proj",
        "model.layers.3.self_attn.q_proj",
        "model.layers.12.mlp.router",
        "model.norm",
    ):
        assert found.excludes(module), module
    for module in ("model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj", "model.norms", "model"):
        assert not found.excludes(module), module


def test_scales_of_activations_and_of_the_cache_have_no_effect() -> None:
    at = "model.layers.0.self_attn"
    for name in ("q_proj.input_scale", "k_scale", "v_proj.v_scale", "q_proj.weight_shape", "q_proj.input_global_scale"):
        assert is_without_effect(f"{at}.{name}")
    for name in ("q_proj.weight_scale", "q_proj.weight", "q_proj.weight_scale_2", "q_proj.weight_zero_point"):
        assert not is_without_effect(f"{at}.{name}")


def test_on_a_cpu_all_formats_are_dequantised(tmp_path: Path) -> None:
    found = read(tmp_path, {"quantization_config": FP8})
    for wish, dtype in (("auto", torch.float32), ("stored", torch.float32), ("bfloat16", torch.bfloat16)):
        form = weights_form(found, wish, dtype=torch.float32, device_type="cpu")
        assert (form.stored, form.dtype) == (frozenset(), dtype)
