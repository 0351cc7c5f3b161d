"""How large the host tier is, and how it is laid out."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from raycache.cache.catalog import Catalog
from raycache.config import Config, parse_bytes
from raycache.deployment.memory_plan import cache_format, resolve_dtype
from raycache.errors import ConfigError
from raycache.memory.arena import Arena
from raycache.memory.component import FULL, CacheFormat, Component, Reuse, window_pages
from raycache.memory.rows import EnvelopeLayout
from raycache.models.base import ModelConfig, components

_AUTO_SHARE = 0.25
"""Of a node's free memory, and at most half of what its shared memory takes."""
_TOKENS_PER_POINT = 1024
_MOST_PAGES = 2**24
_DIRECTORY = Path("/dev/shm")


def model_components(config: Config, model: ModelConfig, *, device_type: str) -> list[Component]:
    """Of the model, in the format that the device holds them; errors are those of `check_host_tier`."""
    check_host_tier(config, model)
    return list(components(model, cache_format(config, dtype=resolve_dtype(config, device_type=device_type))))


def check_host_tier(config: Config, model: ModelConfig) -> None:
    """Refuse a host tier whose pages would be empty.

    Raises:
        ConfigError: no layer keeps all tokens.
    """
    if config.has_host_tier and not any(part.space == FULL for part in components(model, CacheFormat("bfloat16"))):
        raise ConfigError(
            f"host_memory={config.host_memory} is not supported for {model.name}, none of whose layers keeps all "
            "tokens; use host_memory=none"
        )


def envelope_layout(
    config: Config, model: ModelConfig, *, device_type: str, nodes: Sequence[int] = (), node: int | None = None
) -> EnvelopeLayout:
    """Envelopes of all ranks, or of those on one node; see `EnvelopeLayout`."""
    return EnvelopeLayout(
        model_components(config, model, device_type=device_type),
        num_layers=model.num_layers,
        page_size=config.page_size,
        split=config.split,
        nodes=nodes,
        node=node,
    )


def part_widths(config: Config, model: ModelConfig, *, device_type: str) -> dict[str, int]:
    """Component space -> most units that one restore point has of it."""
    parts = model_components(config, model, device_type=device_type)
    return {
        part.space: 1 if part.reuse is Reuse.STATE_HERE else window_pages(part.window, config.page_size)
        for part in parts
        if part.space != FULL
    }


def host_sizes(
    config: Config, model: ModelConfig, *, device_type: str, budgets: Sequence[int], nodes: Sequence[int] = ()
) -> dict[str, int]:
    """Units of every component space on the host: the same on every node, as many as all of them have room for.

    Restore points get room for one per 1024 tokens, or as many as take as much memory as the pages do.

    Args:
        config: of the service.
        model: to serve.
        device_type: "cpu" or "cuda".
        budgets: bytes of each node, see `node_budget`; the first one keeps the catalog.
        nodes: node of each rank; empty when all are on one.
    Raises:
        ConfigError: a budget holds not even a page and a restore point.
    """
    whole = envelope_layout(config, model, device_type=device_type, nodes=nodes)
    widths = part_widths(config, model, device_type=device_type)

    def sizes(num_pages: int) -> dict[str, int]:
        points = 1 + int(num_pages * config.page_size / _tokens_per_point(whole, widths, config.page_size))
        return {FULL: num_pages} | {space: points * width for space, width in widths.items()}

    def num_pages(node: int, budget: int) -> int:
        layout = envelope_layout(config, model, device_type=device_type, nodes=nodes, node=node)

        def num_bytes(count: int) -> int:
            catalog = Catalog.num_bytes(sizes=sizes(count), page_size=config.page_size, part_widths=widths)
            return Arena.num_bytes(layout, sizes=sizes(count), catalog_bytes=0 if node else catalog)

        found = bisect.bisect_right(range(_MOST_PAGES), budget, lo=1, key=num_bytes) - 1
        if found < 1:
            raise ConfigError(
                f"host_memory={config.host_memory} holds no page of this model; one, with a restore point, takes "
                f"{num_bytes(1)} bytes; use host_memory={-(-num_bytes(64) // 2**20)}MiB or more"
            )
        return found

    return sizes(min(num_pages(node, budget) for node, budget in enumerate(budgets)))


def host_facts(layout: EnvelopeLayout, sizes: Mapping[str, int], *, page_size: int) -> dict[str, object]:
    """For people: tokens and bytes per component space."""
    spaces = {space: sizes[space] * layout.unit_bytes(space) for space in layout.spaces}
    return {"tokens": sizes[FULL] * page_size, "bytes": sum(spaces.values()), "components": spaces}


def node_budget(host_memory: str) -> int:
    """Bytes that this node can give to its host tier.

    Args:
        host_memory: the setting: "auto", or a size.
    Raises:
        ConfigError: it is more than the node has.
    """
    free = psutil.virtual_memory().available
    shared = shutil.disk_usage(_DIRECTORY).free
    if host_memory == "auto":
        return int(min(free * _AUTO_SHARE, shared / 2))
    wanted = parse_bytes("host_memory", host_memory)
    most = min(free, shared)
    if wanted > most:
        where = f"{_DIRECTORY} has {shared} bytes left" if shared < free else f"the node has {free} bytes free"
        raise ConfigError(
            f"host_memory={host_memory} does not fit: {where}; use host_memory={most * 9 // 10 // 2**20}MiB, "
            f"or {'mount a larger ' + str(_DIRECTORY) if shared < free else 'a node with more memory'}"
        )
    return wanted


def _tokens_per_point(layout: EnvelopeLayout, widths: Mapping[str, int], page_size: int) -> float:
    token_bytes = (layout.unit_bytes(FULL) if FULL in layout.spaces else 0) / page_size
    point_bytes = sum(layout.unit_bytes(space) * width for space, width in widths.items())
    return max(_TOKENS_PER_POINT, point_bytes / max(token_bytes, 1))
