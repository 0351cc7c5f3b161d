"""Putting an engine together: what is checked before weights load, and what is decided after."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raycache.cache.catalog import Catalog, slots_hold
from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction
from raycache.cache.host_moves import WritePolicy
from raycache.cache.host_tier import HostTier
from raycache.cache.keys import Identity
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_tier import StorageTier, Waiting
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.tensor_files import Checkpoint, weights_fingerprint
from raycache.checkpoint.weights_form import weights_form, why_dequantised
from raycache.config import Config
from raycache.decider.drafts import Drafts, PromptLookup
from raycache.decider.engine import Engine, Executor
from raycache.decider.scheduler import Scheduler
from raycache.deployment.memory_plan import (
    cache_format,
    context_len,
    pool_sizes,
    resolve_dtype,
    served_model,
    step_tokens,
)
from raycache.errors import ConfigError
from raycache.host.link import HostLink
from raycache.host.plan import check_host_tier, envelope_layout, host_facts, model_components, part_widths
from raycache.host.service import open_arena
from raycache.memory.component import FULL, CacheFormat, Reuse
from raycache.models.base import ModelConfig, check_split, check_weights, components
from raycache.models.drafts.loading import check_draft
from raycache.storage.lanes import StorageLanes
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
    model = served_model(config)
    check_split(model, config.split)
    context_len(config, model)
    _check_kv_dtype(config, model)
    check_host_tier(config, model)
    if not config.dummy_weights:
        check_weights(model, Checkpoint(Path(config.model)))
        check_draft(model, Path(config.model))
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
    host: HostLink | None = None,
) -> Engine:
    """The decider for ranks that run.

    Args:
        executor: the ranks.
        config: of the service.
        model: as `check_model` read it.
        device_type: "cpu" or "cuda".
        num_pages: that every rank holds.
        ranks: one row per rank, for people.
        host: the host tier, or None. What an earlier engine has left there is taken over.
    """
    max_model_len = min(context_len(config, model), num_pages * config.page_size)
    info = EngineInfo(
        model=config.model_name,
        model_dir=config.model,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        max_queue=config.max_queue,
        ranks=tuple(ranks),
        tiers=_tier_facts(config, model, device_type=device_type, num_pages=num_pages, host=host),
    )
    budget = step_tokens(config, device_type=device_type)
    if budget <= config.max_running:
        _log.warning(
            "max_step_tokens=%d is not above max_running=%d: a full batch of decodes leaves no token for new prompts",
            budget,
            config.max_running,
        )
    sizes = space_sizes(
        config, model, device_type=device_type, sizes=_device_sizes(config, model, device_type, num_pages)
    )
    if config.overlap == "on" and (sizes.windows or sizes.states):
        _log.warning(
            "overlap=on has no effect for %s: its prefixes are continued at restore points, which only steps that are "
            "done can leave",
            info.model,
        )
    scheduler = Scheduler(
        cache=_sequence_cache(config, model, device_type=device_type, sizes=sizes, host=host),
        max_step_tokens=budget,
        max_running=config.max_running,
        micro_batches=config.pp,
        eos_token_ids=model.eos_token_ids,
        restore_interval=0 if config.restore_interval == "none" else config.restore_interval,
        drafts=Drafts(
            PromptLookup() if config.draft == "ngram" else None,
            most=config.most_drafts,
            are_from_ranks=config.has_draft_model,
            is_adaptive=config.adaptive_drafts,
            stages=config.pp,
        ),
    )
    if model.doubt:
        _log.warning("%s", model.doubt)
    identity = model_identity(config, model, device_type=device_type)
    return Engine(executor, info=info, scheduler=scheduler, identity=identity, timeout_s=config.rank_timeout_s)


def model_identity(config: Config, model: ModelConfig, *, device_type: str) -> Identity:
    """What stored state depends on beside the tokens.

    Args:
        config: of the service.
        model: as `check_model` read it.
        device_type: "cpu" or "cuda".
    """
    directory = Path(config.model)
    weights = weights_fingerprint(directory) + _form(config, directory, device_type=device_type)
    if model.draft is not None:  # its rows lie beside the model's
        weights += f" {model.draft.kind.value} {weights_fingerprint(model.draft.directory)}"
        weights += _form(config, model.draft.directory, device_type=device_type)
    if config.dummy_weights:  # what they leave behind must not pass for that of a checkpoint in the same directory
        weights = f"drawn on {device_type} {weights}"
    return Identity(weights, config.page_size)


def _form(config: Config, directory: Path, *, device_type: str) -> str:
    """What the form of quantised weights adds to the identity: nothing where they are plain, or drawn as such."""
    quantisation = read_quantisation(directory)
    if quantisation is None:
        return ""
    dtype = resolve_dtype(config, device_type=device_type)
    form = weights_form(quantisation, config.weights, dtype=dtype, device_type=device_type)
    if config.dummy_weights and not form.stored:
        return ""
    for reason in why_dequantised(quantisation, config.weights, dtype=dtype, device_type=device_type):
        level = logging.WARNING if config.weights == "stored" else logging.INFO
        _log.log(level, "%s; %s is dequantised to %s", reason, directory.name, form.dtype)
    if quantisation.has_cache_scheme:
        _log.warning("KV cache settings in %s are ignored; use kv_dtype", quantisation.path)
    return f" weights {form}"


def _sequence_cache(
    config: Config, model: ModelConfig, *, device_type: str, sizes: SpaceSizes, host: HostLink | None
) -> SequenceCache:
    eviction = Eviction(config.eviction)
    if host is None:
        return SequenceCache(sizes, is_kept=config.prefix_cache, eviction=eviction)
    arena, layout = open_arena(host.path), envelope_layout(config, model, device_type=device_type, nodes=host.nodes)
    tier = HostTier(
        space_sizes(config, model, device_type=device_type, sizes=host.sizes),
        catalog=Catalog(
            arena.catalog,
            sizes=host.sizes,
            page_size=config.page_size,
            part_widths=part_widths(config, model, device_type=device_type),
        ),
        policy=WritePolicy(config.write_policy),
        eviction=eviction,
        unit_bytes={space: layout.unit_bytes(space) for space in layout.spaces},
    )
    tier.recover(slots_hold(arena))
    costs = Costs()
    storage = StorageTier(
        tier,
        StorageLanes(host.work, num_lanes=config.storage_lanes, name="storage"),
        waiting=Waiting(config.prefetch),
        timeout_s=config.prefetch_timeout_s,
        share=config.prefetch_share,
        costs=costs,
        epoch=host.epoch,
    )
    storage.is_attached = host.has_storage
    return SequenceCache(sizes, is_kept=config.prefix_cache, eviction=eviction, host=tier, storage=storage, costs=costs)


def _tier_facts(
    config: Config, model: ModelConfig, *, device_type: str, num_pages: int, host: HostLink | None
) -> dict[str, Mapping[str, Any]]:
    layout = envelope_layout(config, model, device_type=device_type, nodes=() if host is None else host.nodes)
    sizes = {"device": _device_sizes(config, model, device_type, num_pages)}
    if host is not None:
        sizes["host"] = dict(host.sizes)
    return {tier: host_facts(layout, units, page_size=config.page_size) for tier, units in sizes.items()}


def _device_sizes(config: Config, model: ModelConfig, device_type: str, num_pages: int) -> dict[str, int]:
    fmt = cache_format(config, dtype=resolve_dtype(config, device_type=device_type))
    return pool_sizes(config, model, num_pages=num_pages, fmt=fmt)


def space_sizes(config: Config, model: ModelConfig, *, device_type: str, sizes: Mapping[str, int]) -> SpaceSizes:
    """What the decider must know of the pools of a tier."""
    parts = model_components(config, model, device_type=device_type)
    return SpaceSizes(
        num_pages=sizes[FULL],
        page_size=config.page_size,
        windows={p.space: (p.window, sizes[p.space]) for p in parts if p.reuse is Reuse.LAST_WINDOW},
        states={p.space: sizes[p.space] for p in parts if p.reuse is Reuse.STATE_HERE},
    )
