"""Reads how the weights of a model directory are quantised.

    config.json            quantization_config or compression_config, also inside text_config
    hf_quant_config.json   written by ModelOpt

A method (quant_method) allows one or more formats; which of them a tensor has is determined by how it is stored
(layout.py). Names of modules are those of the published tensors, without ".weight".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.stored_slice import Format
from raycache.errors import CheckpointError

SUPPORTED = "FP8 (block, per tensor, per channel), MXFP4, NVFP4 and INT4 in groups"
"""For messages."""


@dataclass(frozen=True)
class Scheme:
    """A format; `block` are the rows and columns that share a scale, 0 for all of them."""

    format: Format
    block: tuple[int, int]


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a model.

    Attributes:
        path: of the file that describes it.
        method: its quant_method.
        schemes: formats that tensors can have.
        excluded: patterns of modules that are not quantised: names, globs, or regular expressions after "re:".
        has_cache_scheme: whether the file also describes a quantised KV cache.
    """

    path: Path
    method: str
    schemes: tuple[Scheme, ...]
    excluded: tuple[str, ...] = ()
    has_cache_scheme: bool = False

    def excludes(self, module: str) -> bool:
        """Whether a module, or one that contains it, is excluded from quantisation."""
        parts = module.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(_matches(pattern, modules, parts) for pattern in self.excluded)


def _matches(pattern: str, modules: Sequence[str], parts: Sequence[str]) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], module) for module in modules)
    if "*" in pattern:
        return any(fnmatchcase(module, pattern) for module in modules)
    return pattern in modules or ("." not in pattern and pattern in parts)


def read_quantisation(model_dir: Path) -> Quantisation | None:
    """Read the quantisation of a model directory; None for plain weights.

    Raises:
        CheckpointError: the method is unknown or not supported.
    """
    found = [_read_method(section) for section in _sections(model_dir)]
    if not found:
        return None
    schemes = tuple(dict.fromkeys(scheme for one in found for scheme in one.schemes))
    # A checkpoint that was quantised twice has both files; the second method did not change what it excludes.
    excluded = found[0].excluded if len(found) == 1 or found[0].method == found[1].method else ()
    return Quantisation(
        found[0].path, found[0].method, schemes, excluded, has_cache_scheme=any(one.has_cache_scheme for one in found)
    )


def _sections(model_dir: Path) -> list[ConfigFile]:
    config = ConfigFile.read(model_dir / "config.json")
    places = [config, config.section("text_config")] if isinstance(config.raw("text_config"), dict) else [config]
    for place in places:
        for key in ("quantization_config", "compression_config"):
            section = place.section(key)
            if section.values():
                section = section.having(expert_dtype=place.raw("expert_dtype"))
                return [section, *_modelopt_file(model_dir)]
    return _modelopt_file(model_dir)


def _modelopt_file(model_dir: Path) -> list[ConfigFile]:
    path = model_dir / "hf_quant_config.json"
    section = ConfigFile.read(path).section("quantization") if path.is_file() else None
    if section is None or section.raw("quant_algo") is None:
        return []
    return [section.having(quant_method="modelopt")]


def _read_method(section: ConfigFile) -> Quantisation:
    method = section.text("quant_method", "modelopt" if section.raw("quant_algo") is not None else "")
    read = _METHODS.get(method)
    if read is None:
        raise CheckpointError(_refusal(section, f"quant_method {method!r}"))
    schemes, excluded = read(section)
    cache = [section.raw(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    return Quantisation(section.path, method, schemes, excluded, has_cache_scheme=any(cache))


_Found = tuple[tuple[Scheme, ...], tuple[str, ...]]
_FP8_SCALED = (Scheme(Format.FP8_TENSOR, (0, 0)), Scheme(Format.FP8_CHANNEL, (1, 0)))
_MXFP4 = Scheme(Format.MXFP4, (1, 32))
_NVFP4 = Scheme(Format.NVFP4, (1, 16))
_ALGORITHMS = {
    "FP8": _FP8_SCALED[:1],
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_SCALED[1:],
    "NVFP4": (_NVFP4, _FP8_SCALED[0]),  # exports can keep some layers in FP8
    "W4A16_NVFP4": (_NVFP4, _FP8_SCALED[0]),
}
"""quant_algo of ModelOpt -> its schemes."""


def _read_fp8(section: ConfigFile) -> _Found:
    if section.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(_refusal(section, f"fmt {section.raw('fmt')!r}"))
    block = section.raw("weight_block_size")
    schemes = _FP8_SCALED if block is None else (Scheme(Format.FP8_BLOCK, _block(section, "weight_block_size", block)),)
    if section.raw("expert_dtype") == "fp4":  # DeepSeek-V4
        schemes = (*schemes, _MXFP4)
    if section.raw("quant_algo") is not None:
        schemes = (*schemes, *_read_modelopt(section)[0])  # ModelOpt on top: the experts only
        return schemes, ()
    return schemes, _names(section, "modules_to_not_convert", "ignored_layers")


def _read_mxfp4(section: ConfigFile) -> _Found:
    return (_MXFP4,), _names(section, "modules_to_not_convert")


def _read_modelopt(section: ConfigFile) -> _Found:
    algorithm = section.text("quant_algo", "")
    algorithms = {algorithm}
    if algorithm == "MIXED_PRECISION":
        layers = section.section("quantized_layers")
        algorithms = {str(layer.get("quant_algo")) for layer in layers.values() if isinstance(layer, dict)}
    unknown = sorted(algorithms - _ALGORITHMS.keys())
    if unknown or not algorithms:
        raise CheckpointError(_refusal(section, f"quant_algo {unknown[0] if unknown else algorithm!r}"))
    schemes = tuple(dict.fromkeys(scheme for one in sorted(algorithms) for scheme in _ALGORITHMS[one]))
    if _NVFP4 in schemes and section.integer("group_size", 16) != 16:
        raise CheckpointError(_refusal(section, f"NVFP4 with group_size={section.raw('group_size')}"))
    return schemes, _names(section, "exclude_modules", "ignore")


def _read_compressed(section: ConfigFile) -> _Found:
    if any(value for value in section.section("transform_config").values()):
        raise CheckpointError(_refusal(section, "transform_config"))
    sparsity = section.section("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise CheckpointError(_refusal(section, f"sparse weights ({sparsity})"))
    groups = section.section("config_groups")
    schemes = tuple(
        _compressed_scheme(section, ConfigFile(section.path, group), section.text("format", ""))
        for group in groups.values()
        if isinstance(group, dict)
    )
    if not schemes:
        raise CheckpointError(_refusal(section, "no config_groups"))
    return schemes, _names(section, "ignore")


def _compressed_scheme(section: ConfigFile, group: ConfigFile, outer: str) -> Scheme:
    weights, name = group.section("weights"), group.text("format", outer)
    bits, kind, strategy = weights.integer("num_bits", 8), weights.text("type", "int"), weights.text("strategy", "")
    if not weights.flag("symmetric", True):
        raise CheckpointError(_refusal(section, "weights with zero points (symmetric=false)"))
    if weights.raw("actorder") not in (None, "static", "weight"):
        raise CheckpointError(_refusal(section, f"reordered columns (actorder={weights.raw('actorder')!r})"))
    match (kind, bits, strategy):
        case ("float", 8, "tensor"):
            return _FP8_SCALED[0]
        case ("float", 8, "channel"):
            return _FP8_SCALED[1]
        case ("float", 8, "block"):
            return Scheme(Format.FP8_BLOCK, _block(weights, "block_structure", weights.raw("block_structure")))
        case ("float", 4, "tensor_group") if name == "nvfp4-pack-quantized":
            return _NVFP4
        case ("float", 4, "group") if name == "mxfp4-pack-quantized" and weights.integer("group_size", 32) == 32:
            return _MXFP4
        case ("int", 4, "group") if name == "pack-quantized":
            return Scheme(Format.INT4, (1, weights.integer("group_size")))
        case ("int", 4, "channel") if name == "pack-quantized":
            return Scheme(Format.INT4, (1, 0))
    raise CheckpointError(
        _refusal(section, f"format {name!r} with {bits}-bit {kind} weights per {strategy or 'tensor'}")
    )


_METHODS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "compressed-tensors": _read_compressed,
}
"""quant_method -> its reader."""


def _block(section: ConfigFile, key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise CheckpointError(f"{section.path}: {key} must be two positive integers, got {value!r}")
    return value[0], value[1]


def _names(section: ConfigFile, *keys: str) -> tuple[str, ...]:
    """The list under the first of the keys that there is."""
    for key in keys:
        value = section.raw(key)
        if value is None:
            continue
        if not isinstance(value, list) or any(type(name) is not str for name in value):
            raise CheckpointError(f"{section.path}: {key} must be a list of module names, got {value!r}")
        for pattern in value:
            _check_pattern(section, key, pattern)
        return tuple(value)
    return ()


def _check_pattern(section: ConfigFile, key: str, pattern: str) -> None:
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as cause:
        raise CheckpointError(
            f"{section.path}: {key} has {pattern!r}, which is not a valid regular expression ({cause})"
        ) from cause


_SUFFIX = re.compile(
    r"[-_.](awq|gptq|int4|int8|w4a16|w8a8|bnb|4bit|8bit|gguf|autoround|hqq|quark|nvfp4|mxfp4)\b.*$", re.I
)


def _refusal(section: ConfigFile, what: str) -> str:
    name = section.path.parent.name
    plain = _SUFFIX.sub("", name)
    variant = f"{plain}, the same model without that suffix," if plain != name else "the variant of this model"
    return (
        f"{section.path} has {what}, which is not supported; supported are {SUPPORTED}: "
        f"use {variant} in bfloat16 or in one of these"
    )


_WITHOUT_EFFECT = re.compile(
    r"\.(input_scale|input_global_scale|output_scale|activation_scale_ub|[kvq]_scale|kv_scale|prob_scale|weight_shape)$"
)


def is_without_effect(name: str) -> bool:
    """Whether a tensor of a quantised checkpoint is not needed to dequantise: of activations, the KV cache, a shape."""
    return _WITHOUT_EFFECT.search(name) is not None
