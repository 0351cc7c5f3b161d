"""Putting an engine together: what is checked before weights load, and what is decided after."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycache.cache.sequences import SequenceCache, SpaceSizes
from raycache.config import Config
from raycache.engine.engine import Engine, Executor
from raycache.engine.memory_plan import cache_format, context_len, pool_sizes, resolve_dtype, step_tokens
from raycache.engine.scheduler import Scheduler
from raycache.errors import ConfigError
from raycache.memory.component import CacheFormat, Reuse
from raycache.models.base import ModelConfig, check_split, check_weights, components, read_config
from raycache.models.checkpoint import Checkpoint
from raycache.parallel.sharding import Split
from raycache.types import EngineInfo

_log = logging.getLogger(__name__)


def check_model(config: Config) -> ModelConfig:
    """Refuse what cannot work, before a weight is read.

    Raises:
        CheckpointError: the model's directory is missing something, is damaged or of an unknown kind.
        ConfigError: the split or the context length does not suit the model.
    """
    if not config.model:
        raise ConfigError("no model given; name the directory of a Hugging Face model")
    model = read_config(Path(config.model))
    check_split(model, Split(tp=config.tp, pp=config.pp, cp=config.cp))
    context_len(config, model)
    _check_kv_dtype(config, model)
    check_weights(model, Checkpoint(Path(config.model)))
    return model


def _check_kv_dtype(config: Config, model: ModelConfig) -> None:
    if config.kv_dtype == "fp8":
        parts = components(model, CacheFormat("bfloat16", has_fp8_latent=True))  # refuses latents of a wrong size
        if not any(field.dtype.startswith("float8") for part in parts for field in part.fields):
            raise ConfigError(f"kv_dtype=fp8 is for latents (MLA), {model.name} has none; use kv_dtype=auto")


def build_engine(
    executor: Executor,
    config: Config,
    *,
    model: ModelConfig,
    device_type: str,
    num_pages: int,
    ranks: Sequence[Mapping[str, Any]] = (),
) -> Engine:
    """The decider for ranks that run.

    Args:
        executor: the ranks.
        config: of the service.
        model: as `check_model` read it.
        device_type: "cpu" or "cuda".
        num_pages: that every rank holds.
        ranks: one row per rank, for people.
    """
    max_model_len = min(context_len(config, model), num_pages * config.page_size)
    info = EngineInfo(
        model=config.served_model_name or Path(config.model).resolve().name,
        model_dir=config.model,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        max_queue=config.max_queue,
        ranks=tuple(ranks),
    )
    budget = step_tokens(config, device_type=device_type)
    if budget <= config.max_running:
        _log.warning(
            "max_step_tokens=%d is not above max_running=%d: a full batch of decodes leaves no token for new prompts",
            budget,
            config.max_running,
        )
    scheduler = Scheduler(
        cache=SequenceCache(
            space_sizes(config, model, device_type=device_type, num_pages=num_pages), is_kept=config.prefix_cache
        ),
        max_step_tokens=budget,
        max_running=config.max_running,
        micro_batches=executor.depth,
        eos_token_ids=model.eos_token_ids,
        restore_interval=config.restore_interval,
    )
    return Engine(executor, info=info, scheduler=scheduler)


def space_sizes(config: Config, model: ModelConfig, *, device_type: str, num_pages: int) -> SpaceSizes:
    """What the decider must know of the ranks' pools."""
    fmt = cache_format(config, dtype=resolve_dtype(config, device_type=device_type))
    sizes = pool_sizes(config, model, num_pages=num_pages, fmt=fmt)
    parts = components(model, fmt)
    return SpaceSizes(
        num_pages=num_pages,
        page_size=config.page_size,
        windows={p.space: (p.window, sizes[p.space]) for p in parts if p.reuse is Reuse.LAST_WINDOW},
        states={p.space: sizes[p.space] for p in parts if p.reuse is Reuse.STATE_HERE},
    )
