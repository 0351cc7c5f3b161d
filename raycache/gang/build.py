"""Builds an engine for ranks that are running."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from raycache.cache.catalog import Catalog, slots_hold
from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction
from raycache.cache.host_tier import HostTier, WritePolicy
from raycache.cache.kv_events import KvEvents, NoKvEvents
from raycache.cache.prefetches import Waiting
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_tier import StorageTier
from raycache.config import Config
from raycache.decider.budget import StepBudget
from raycache.decider.drafts import Drafts, PromptLookup
from raycache.decider.engine import Engine, Executor
from raycache.decider.grammar import Grammars, SameThread
from raycache.decider.scheduler import Scheduler
from raycache.deployment.decode_split import decode_obstacle
from raycache.deployment.deployment import Deployment
from raycache.deployment.weights import model_identity
from raycache.host.link import HostLink
from raycache.host.plan import host_facts
from raycache.host.service import open_arena
from raycache.memory.component import FULL
from raycache.memory.rows import EnvelopeLayout
from raycache.observe.kv_events import KvEventPublisher, Medium
from raycache.storage.lanes import NUM_LANES, StorageLanes
from raycache.types import EngineInfo
from raycache.vocabulary.base import read_settings
from raycache.vocabulary.files import open_vocabulary
from raycache.vocabulary.grammar_tokens import grammar_tokens

_log = logging.getLogger(__name__)


def build_engine(
    executor: Executor,
    deployment: Deployment,
    *,
    num_pages: int,
    ranks: Sequence[Mapping[str, Any]] = (),
    host: HostLink | None = None,
    replica: int = 0,
    compiles_at_once: bool = False,
) -> Engine:
    """Build the decider for running ranks.

    Args:
        deployment: the same as on the ranks.
        num_pages: pages per rank, the same on all ranks.
        ranks: one row per rank, for status output.
        host: the host tier, or None. Pages left there by an earlier engine are recovered.
        replica: number of the replica, for the addresses of its KV events.
        compiles_at_once: whether `Engine.add` compiles a request's grammar, instead of a thread while others run.
    """
    config, model = deployment.config, deployment.model
    sizes = {"device": deployment.pool_sizes(num_pages)}
    if host is not None:
        sizes["host"] = dict(host.sizes)
    layout = deployment.envelope_layout(nodes=() if host is None else host.nodes)
    identity = model_identity(deployment)
    info = EngineInfo(
        model=config.model_name,
        model_dir=config.model,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=min(deployment.max_model_len, num_pages * config.page_size),
        page_size=config.page_size,
        num_pages=num_pages,
        max_queue=config.max_queue,
        ranks=tuple(ranks),
        tiers={tier: host_facts(layout, units, page_size=config.page_size) for tier, units in sizes.items()},
        decode_weights=_decode_weights(deployment),
        chained_weights="" if host is None else identity.weights,
    )
    events = _kv_events(deployment, plain_root=identity.seed(), replica=replica)
    spaces = deployment.space_sizes(sizes["device"])
    _warn(deployment, sizes)
    scheduler = Scheduler(
        cache=_sequence_cache(deployment, spaces, host=host, layout=layout, events=events),
        budget=StepBudget(deployment.max_step_tokens, config.prompt_share),
        max_running=config.max_running,
        micro_batches=config.pp,
        eos_token_ids=model.eos_token_ids,
        restore_interval=0 if config.restore_interval == "none" else config.restore_interval,
        drafts=_drafts(config),
        grammars=Grammars(
            partial(_grammar_tokens, deployment),
            SameThread() if compiles_at_once else ThreadPoolExecutor(1, thread_name_prefix="grammar"),
        ),
    )
    return Engine(executor, info=info, scheduler=scheduler, identity=identity, timeout_s=config.rank_timeout_s)


def _drafts(config: Config) -> Drafts:
    return Drafts(
        PromptLookup() if config.draft == "ngram" else None,
        most=config.most_drafts,
        are_from_ranks=config.has_draft_model,
        is_adaptive=config.adaptive_drafts,
        stages=config.pp,
    )


def _decode_weights(deployment: Deployment) -> str:
    """What ranks read of their weights in decode steps; logged under cp."""
    if deployment.config.cp == 1:
        return "all"
    if obstacle := decode_obstacle(deployment):
        level = logging.WARNING if deployment.config.decode_split == "on" else logging.INFO
        _log.log(level, "decode steps: every cp rank reads all weights of its tp rank: %s", obstacle)
        return f"all: {obstacle}"
    _log.info("decode steps: weights are split over cp=%d", deployment.config.cp)
    return "split over cp"


def _grammar_tokens(deployment: Deployment) -> LLTokenizer:
    config, model = deployment.config, deployment.model
    folder = Path(config.model)
    vocabulary = open_vocabulary(folder, read_settings(folder), is_optional=config.dummy_weights)
    return grammar_tokens(vocabulary, num_logits=model.vocab_size, eos_token_ids=model.eos_token_ids)


def _warn(deployment: Deployment, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Warn of settings that have less effect than expected.

    Args:
        sizes: tier -> units per component space.
    """
    config, budget = deployment.config, deployment.max_step_tokens
    if budget <= config.max_running:
        _log.warning(
            "max_step_tokens=%d is not above max_running=%d: a full batch of decodes leaves no token for new prompts",
            budget,
            config.max_running,
        )
    room = sizes["device"][FULL] * config.page_size
    if room < deployment.max_model_len:
        _log.warning(
            "the cache has room for %d tokens, fewer than max_model_len=%d: longer requests are refused; raise "
            "kv_memory or num_pages, or use more ranks",
            room,
            deployment.max_model_len,
        )
    device, host = (sizes[tier][FULL] * config.page_size if tier in sizes else 0 for tier in ("device", "host"))
    if 0 < host <= device and config.write_policy == "write_through" and config.storage == "none":
        _log.warning(
            "the host tier has room for %d tokens and the device for %d: with write_policy=write_through it holds what "
            "the device holds, and serves only after a rank or the engine is lost. A larger host_memory adds room, as "
            "does write_policy=write_back, but then the prefixes on the device are lost with its process",
            host,
            device,
        )
    if deployment.model.doubt:
        _log.warning("%s", deployment.model.doubt)


def _kv_events(deployment: Deployment, *, plain_root: bytes, replica: int) -> KvEvents | NoKvEvents:
    address = deployment.config.event_address
    if address is None:
        return NoKvEvents()
    return KvEvents(KvEventPublisher(address.of_replica(replica), rank=replica), plain_root=plain_root)


def _sequence_cache(
    deployment: Deployment,
    spaces: SpaceSizes,
    *,
    host: HostLink | None,
    layout: EnvelopeLayout,
    events: KvEvents | NoKvEvents,
) -> SequenceCache:
    config = deployment.config
    eviction = Eviction(config.eviction)
    if host is None:
        return SequenceCache(spaces, is_kept=config.prefix_cache, eviction=eviction, events=events)
    arena = open_arena(host.path)
    host_spaces = deployment.space_sizes(host.sizes)
    tier = HostTier(
        host_spaces,
        catalog=Catalog(
            arena.catalog, sizes=host.sizes, page_size=config.page_size, part_widths=deployment.part_widths
        ),
        policy=WritePolicy(config.write_policy),
        eviction=eviction,
        unit_bytes={space: layout.unit_bytes(space) for space in layout.spaces},
        listener=events.tier(Medium.CPU, host_spaces),
    )
    tier.recover(slots_hold(arena))
    costs = Costs()
    storage = StorageTier(
        tier,
        StorageLanes(host.work, num_lanes=NUM_LANES, name="storage"),
        waiting=Waiting(config.prefetch),
        timeout_s=config.prefetch_timeout_s,
        share=config.prefetch_share,
        costs=costs,
        epoch=host.epoch,
        events=events.storage(config.page_size),
    )
    storage.is_attached = host.has_storage
    return SequenceCache(
        spaces,
        is_kept=config.prefix_cache,
        eviction=eviction,
        host=tier,
        storage=storage,
        costs=costs,
        events=events,
    )
