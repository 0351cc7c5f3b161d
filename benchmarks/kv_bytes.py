"""Bytes of cache per rank for the published shapes of some models, as the device pool lays them out.

    python -m benchmarks.kv_bytes
    python -m benchmarks.kv_bytes --tp 1 2 4 8 --cp 1 8 --page-size 128

What every token leaves behind falls as 1/cp, and as 1/tp where it has heads; a recurrent state is split by heads over
tp x cp. Needs no weights: transformers writes a config.json of each shape, which is read like any other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.figures import write_json
from raycache.errors import ConfigError
from raycache.memory.component import CacheFormat, Component, Reuse, window_pages
from raycache.memory.device import unit_bytes
from raycache.models.base import ModelConfig, check_split, components, read_config
from raycache.parallel.sharding import Coords, Split


@dataclass(frozen=True)
class Shape:
    """A published model.

    Attributes:
        title: its name.
        model_type: of Hugging Face.
        settings: keys of config.json that decide what the cache holds and how it is split, as published; the rest are
            transformers' defaults.
        has_fp8_latent: see CacheFormat.
    """

    title: str
    model_type: str
    settings: Mapping[str, Any]
    has_fp8_latent: bool = False


_DEEPSEEK = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
_NEMOTRON_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
_NEMOTRON_PATTERN = "M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-"
_KIMI_FULL = (*range(3, 26, 4), 26)

SHAPES = (
    Shape("DeepSeek-V3.2", "deepseek_v32", {**_DEEPSEEK, "index_n_heads": 64, "index_head_dim": 128}),
    Shape("DeepSeek-V3", "deepseek_v3", _DEEPSEEK),
    Shape("DeepSeek-V3, fp8 latents", "deepseek_v3", _DEEPSEEK, has_fp8_latent=True),
    Shape(
        "Kimi-Linear-48B",
        "kimi_linear",
        {
            "num_hidden_layers": 27,
            "layer_types": ["full_attention" if i in _KIMI_FULL else "linear_attention" for i in range(27)],
            "num_attention_heads": 32,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    Shape(
        "Nemotron-H-8B",
        "nemotron_h",
        {
            "layers_block_type": [_NEMOTRON_KINDS[kind] for kind in _NEMOTRON_PATTERN],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
    ),
    Shape(
        "gpt-oss-20b",
        "gpt_oss",
        {
            "num_hidden_layers": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
        },
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table, in Markdown."""
    options = _options(argv)
    splits = [Split(tp=tp, cp=cp) for tp in options.tp for cp in options.cp]
    figures = []
    print(f"| model | layers | bytes of | {' | '.join(f'tp={split.tp} cp={split.cp}' for split in splits)} |")
    print(f"|---|--:|---|{'--:|' * len(splits)}")
    for shape in SHAPES:
        model = _read(shape)
        refusals = [_refusal(model, split) for split in splits]
        for part in components(model, CacheFormat(options.dtype, has_fp8_latent=shape.has_fp8_latent)):
            sizes = [
                None if refusal else _bytes(part, model, split=split, page_size=options.page_size)
                for split, refusal in zip(splits, refusals, strict=True)
            ]
            what = _what(part, page_size=options.page_size)
            cells = [refusal or f"{size:,}" for size, refusal in zip(sizes, refusals, strict=True)]
            print(f"| {shape.title} | {len(part.layers)} of {model.num_layers} | {what} | {' | '.join(cells)} |")
            figures.append({"model": shape.title, "component": part.name, "bytes_of": what, "bytes": sizes})
    if options.json:
        write_json(options.json, {"splits": [vars(split) for split in splits], "lines": figures})
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_bytes", description="Bytes of cache per rank.")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="(default: %(default)s)")
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of rows (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


def _read(shape: Shape) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / shape.title
        AutoConfig.for_model(shape.model_type, **shape.settings).save_pretrained(model_dir)
        return read_config(model_dir)


def _refusal(model: ModelConfig, split: Split) -> str:
    """Why a split is refused, or nothing."""
    try:
        check_split(model, split)
    except ConfigError as refusal:
        return f"refused: {refusal}"
    return ""


def _bytes(part: Component, model: ModelConfig, *, split: Split, page_size: int) -> int:
    """On one rank, for a token, a sequence's state or the pages of its window; heads divide, so all ranks are alike."""
    at = Coords(pp=0, cp=0, tp=0)
    size = unit_bytes(part, num_layers=model.num_layers, page_size=page_size, split=split, at=at)
    match part.reuse:
        case Reuse.EVERY_PAGE:
            return size // page_size
        case Reuse.LAST_WINDOW:
            return size * window_pages(part.window, page_size)
        case Reuse.STATE_HERE:
            return size


def _what(part: Component, *, page_size: int) -> str:
    match part.reuse:
        case Reuse.EVERY_PAGE:
            return f"a token, {part.name}"
        case Reuse.LAST_WINDOW:
            return f"a sequence, window of {part.window} in {window_pages(part.window, page_size)} pages"
        case Reuse.STATE_HERE:
            return "a sequence, recurrent state"


if __name__ == "__main__":
    sys.exit(main())
