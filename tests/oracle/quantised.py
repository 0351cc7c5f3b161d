"""Checkpoints of `save_pretrained` rewritten into the forms in which vendors publish quantised ones.

A form changes the matrices of a checkpoint into codes and scales under the published names, and says what they stand
for. `write_quantised` writes both: the published form, and a plain float32 checkpoint of the same numbers, which is
what an oracle loads.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle.number_formats import (
    E2M1,
    E4M3,
    INT4,
    Codes,
    Numbers,
    block_max,
    encode,
    pack_nibbles,
    spread,
)

Tensors = dict[str, Tensor]

PLAIN = "plain"
"""Folder inside a quantised model's directory with the same numbers in float32, for oracles."""


@dataclass(frozen=True)
class Form:
    """One published form.

    Attributes:
        quantise: (name without ".weight", [O, I] matrix) -> (its tensors, what they stand for).
        config: quantization_config, or what hf_quant_config.json says.
        file: that `config` goes to.
        plain: names of matrices that stay as they are.
    """

    quantise: Callable[[str, Numbers], tuple[Tensors, Numbers]]
    config: Mapping[str, Any]
    file: str = "config.json"
    plain: str = r"embed|lm_head|norm|\.gate\.|conv1d"


def write_quantised(source: Path, quantised: Path, plain: Path, form: Form) -> None:
    """Rewrite the matrices of a checkpoint.

    Args:
        source: that save_pretrained wrote, float32.
        quantised: new directory in published form.
        plain: new directory of the same numbers in float32.
        form: to write.
    """
    for folder in (quantised, plain):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    published, numbers = Tensors(), Tensors()
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() < 2 or re.search(form.plain, name) or name.endswith("_bias"):
            published[name] = numbers[name] = tensor
            continue
        made, stand_for = form.quantise(name.removesuffix(".weight"), tensor.double().numpy())
        published |= {part: one.contiguous() for part, one in made.items()}
        numbers[name] = torch.from_numpy(stand_for).float().contiguous()
    for folder, tensors in ((quantised, published), (plain, numbers)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _say(quantised, form)


def _say(folder: Path, form: Form) -> None:
    config = json.loads((folder / "config.json").read_text())
    if form.file == "config.json":
        config["quantization_config"] = dict(form.config)
    else:
        (folder / form.file).write_text(json.dumps(form.config))
    (folder / "config.json").write_text(json.dumps(config))


def fp8_blocks(block: tuple[int, int] = (128, 128), *, scale_dtype: torch.dtype = torch.float32) -> Form:
    """DeepSeek-V3, Qwen3-FP8 and others."""

    def quantise(name: str, matrix: Numbers) -> tuple[Tensors, Numbers]:
        scales = torch.from_numpy(block_max(matrix, block) / 448).to(scale_dtype)
        each = spread(scales.double().numpy(), matrix.shape, block)
        codes = encode(matrix / each, E4M3)
        return {f"{name}.weight": _fp8(codes), f"{name}.weight_scale_inv": scales}, E4M3[codes] * each

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Form(quantise, config)


def fp8_tensor(*, shape: tuple[int, ...] = ()) -> Form:
    """One scale for a matrix, as ModelOpt and Qwen3-32B-FP8-Static-PerTensor have it, with the scale of its inputs."""

    def quantise(name: str, matrix: Numbers) -> tuple[Tensors, Numbers]:
        scale = torch.tensor(np.abs(matrix).max() / 448, dtype=torch.float32)
        codes = encode(matrix / scale.item(), E4M3)
        made = {
            f"{name}.weight": _fp8(codes),
            f"{name}.weight_scale": scale.reshape(shape),
            f"{name}.input_scale": torch.tensor(0.5),
        }
        return made, E4M3[codes] * scale.item()

    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return Form(quantise, {"producer": {"name": "modelopt"}, "quantization": said}, "hf_quant_config.json")


def fp8_channels() -> Form:
    """A scale per row, as compressed-tensors' FP8_DYNAMIC."""

    def quantise(name: str, matrix: Numbers) -> tuple[Tensors, Numbers]:
        scales = torch.from_numpy(np.abs(matrix).max(1, keepdims=True) / 448).to(torch.bfloat16)
        each = scales.double().numpy()
        codes = encode(matrix / each, E4M3)
        return {f"{name}.weight": _fp8(codes), f"{name}.weight_scale": scales}, E4M3[codes] * each

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    return Form(quantise, _compressed("float-quantized", weights))


def int4_groups(group: int = 32) -> Form:
    """compressed-tensors' W4A16, as Kimi-K2.5."""

    def quantise(name: str, matrix: Numbers) -> tuple[Tensors, Numbers]:
        scales = torch.from_numpy(block_max(matrix, (1, group)) / 7.5).to(torch.bfloat16)
        each = spread(scales.double().numpy(), matrix.shape, (1, group))
        codes = encode(matrix / each, INT4)
        packed = torch.from_numpy(pack_nibbles(codes)).view(torch.int32)
        made = {
            f"{name}.weight_packed": packed,
            f"{name}.weight_scale": scales,
            f"{name}.weight_shape": torch.tensor(matrix.shape),
        }
        return made, INT4[codes] * each

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "actorder": None}
    return Form(quantise, _compressed("pack-quantized", {**weights, "group_size": group}))


def nvfp4(*, by: str = "modelopt") -> Form:
    """16 numbers share an E4M3 scale, a tensor another one; ModelOpt multiplies by it, compressed-tensors divides."""

    def quantise(name: str, matrix: Numbers) -> tuple[Tensors, Numbers]:
        most = np.abs(matrix).max()
        whole = torch.tensor([448 * 6 / most] if by == "compressed-tensors" else most / (448 * 6), dtype=torch.float32)
        factor = 1 / whole.item() if by == "compressed-tensors" else whole.item()
        scale_codes = encode(block_max(matrix, (1, 16)) / 6 / factor, E4M3)
        each = spread(E4M3[scale_codes] * factor, matrix.shape, (1, 16))
        codes = encode(matrix / np.where(each == 0, 1, each), E2M1)
        packed, scales = torch.from_numpy(pack_nibbles(codes)), _fp8(scale_codes)
        if by == "compressed-tensors":
            made = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        else:
            made = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
        made["input_scale"] = torch.tensor(0.5)
        return {f"{name}.{part}": tensor for part, tensor in made.items()}, E2M1[codes] * each

    if by == "compressed-tensors":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        return Form(quantise, _compressed("nvfp4-pack-quantized", weights))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    return Form(quantise, {"producer": {"name": "modelopt"}, "quantization": said}, "hf_quant_config.json")


def mxfp4_experts() -> Form:
    """gpt-oss: experts [E, I, O] as blocks of their transposes; all else is plain."""

    def quantise(name: str, experts: Numbers) -> tuple[Tensors, Numbers]:
        count, inputs, outputs = experts.shape
        groups = experts.transpose(0, 2, 1).reshape(count, outputs, inputs // 32, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(-1) + 1e-30)) - 2
        each = 2.0 ** exponents[..., None]
        codes = encode(groups / each, E2M1)
        made = {
            f"{name}_blocks": torch.from_numpy(pack_nibbles(codes)),
            f"{name}_scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
        }
        return made, (E2M1[codes] * each).reshape(count, outputs, inputs).transpose(0, 2, 1)

    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    return Form(quantise, config, plain="self_attn|router|embed|lm_head|norm")


def _fp8(codes: Codes) -> Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def _compressed(name: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": dict(weights)}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
