"""How settings that say "auto" come out for a model on a rank: number type, pages, context length."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import torch

from raycache.config import Config, parse_bytes
from raycache.errors import ConfigError
from raycache.memory.device import page_bytes
from raycache.models.base import ModelConfig, components, read_config
from raycache.parallel.context import ParallelContext

_CPU_SHARE = 0.2
_CUDA_SHARE = 0.9
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(config: Config, *, device_type: str) -> torch.dtype:
    """Of weights and cache. Without a wish: the checkpoint's on cuda, float32 on cpu, which has no fast half types.

    Raises:
        ConfigError: the checkpoint's type is not one of ours.
    """
    name = config.dtype
    if name == "auto":
        name = read_config(Path(config.model)).dtype if device_type == "cuda" else "float32"
    if name not in _DTYPES:
        raise ConfigError(
            f"dtype {name!r} of {config.model} is not supported; use --dtype with one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def usable_cpus() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def step_tokens(config: Config, *, device_type: str) -> int:
    """Token budget of a step."""
    return config.max_step_tokens or (8192 if device_type == "cuda" else 512)


def pages_that_fit(
    config: Config, model: ModelConfig, *, ctx: ParallelContext, dtype: torch.dtype, ranks_on_node: int
) -> int:
    """Pages that a rank can hold beside its weights.

    Args:
        config: num_pages wins over kv_memory; "auto" takes a share of what is free, but not more than a full batch
            of the
            longest sequences needs.
        model: to serve.
        ctx: of the rank.
        dtype: of the cache.
        ranks_on_node: among which a node's memory is divided (cpu only).
    Raises:
        ConfigError: it holds no page.
    """
    if config.num_pages:
        return config.num_pages
    size = page_bytes(
        components(model, itemsize=dtype.itemsize), num_layers=model.num_layers, page_size=config.page_size, ctx=ctx
    )
    if config.kv_memory != "auto":
        pages = parse_bytes("kv_memory", config.kv_memory) // size
    else:
        full_batch = config.max_running * -(-context_len(config, model) // config.page_size)
        pages = min(_free_bytes(ctx.device, ranks_on_node) // size, full_batch)
    if pages < 1:
        raise ConfigError(f"kv_memory={config.kv_memory} holds no page; one takes {size} bytes on each rank")
    return int(pages)


def context_len(config: Config, model: ModelConfig) -> int:
    """Most tokens of prompt and output together, as far as the model and the setting go.

    Raises:
        ConfigError: the setting is above what the model was made for.
    """
    if config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's {model.max_position_embeddings} positions; "
            "use a smaller one, or a model with rope scaling in its config.json"
        )
    return config.max_model_len or model.max_position_embeddings


def _free_bytes(device: torch.device, ranks_on_node: int) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(psutil.virtual_memory().available * _CPU_SHARE / ranks_on_node)
