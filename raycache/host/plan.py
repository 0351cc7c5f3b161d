"""Chooses the size and layout of the host tier."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from raycache.cache.catalog import Catalog
from raycache.config import parse_bytes
from raycache.deployment.deployment import Deployment
from raycache.errors import ConfigError
from raycache.memory.arena import Arena
from raycache.memory.component import FULL, tokens_per_point
from raycache.memory.rows import EnvelopeLayout

_AUTO_SHARE = 0.25
"""Share of a node's free memory; the host tier also takes at most half of its shared memory."""
_MOST_PAGES = 2**24
_DIRECTORY = Path("/dev/shm")


def host_sizes(deployment: Deployment, *, budgets: Sequence[int], nodes: Sequence[int] = ()) -> dict[str, int]:
    """Choose the units of every component space on the host: the same on every node, as many as fit on all.

    There is space for one restore point per 1024 tokens, or for as many as take as much memory as the pages.

    Args:
        deployment: with a host tier.
        budgets: bytes available on each node (see `node_budget`); the first one also holds the catalog.
        nodes: node of each rank; empty when all are on one.
    Raises:
        ConfigError: a budget is too small for one page and one restore point.
    """
    config, widths = deployment.config, deployment.part_widths
    whole = deployment.envelope_layout(nodes=nodes)

    def sizes(num_pages: int) -> dict[str, int]:
        points = 1 + int(num_pages * config.page_size / _point_tokens(whole, widths, config.page_size))
        return {FULL: num_pages} | {space: points * width for space, width in widths.items()}

    def num_pages(node: int, budget: int) -> int:
        layout = deployment.envelope_layout(nodes=nodes, node=node)

        def num_bytes(count: int) -> int:
            catalog = Catalog.num_bytes(sizes=sizes(count), page_size=config.page_size, part_widths=widths)
            return Arena.num_bytes(layout, sizes=sizes(count), catalog_bytes=0 if node else catalog)

        found = bisect.bisect_right(range(_MOST_PAGES), budget, lo=1, key=num_bytes) - 1
        if found < 1:
            raise ConfigError(
                f"host_memory={config.host_memory} is too small for this model: a page with a restore point takes "
                f"{num_bytes(1)} bytes; use host_memory={-(-num_bytes(64) // 2**20)}MiB or more"
            )
        return found

    return sizes(min(num_pages(node, budget) for node, budget in enumerate(budgets)))


def host_facts(layout: EnvelopeLayout, sizes: Mapping[str, int], *, page_size: int) -> dict[str, object]:
    """Tokens and bytes per component space, for status output."""
    spaces = {space: sizes[space] * layout.unit_bytes(space) for space in layout.spaces}
    return {"tokens": sizes[FULL] * page_size, "bytes": sum(spaces.values()), "components": spaces}


def node_budget(host_memory: str) -> int:
    """Bytes of this node that its host tier may use.

    Args:
        host_memory: the setting: "auto", or a size.
    Raises:
        ConfigError: the size exceeds the node's memory.
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


def _point_tokens(layout: EnvelopeLayout, widths: Mapping[str, int], page_size: int) -> float:
    token_bytes = (layout.unit_bytes(FULL) if FULL in layout.spaces else 0) / page_size
    point_bytes = sum(layout.unit_bytes(space) * width for space, width in widths.items())
    return tokens_per_point(token_bytes=token_bytes, point_bytes=point_bytes)
