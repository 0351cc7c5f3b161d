"""The part of an operator's cache command that the owner of the host tier executes; the decider does the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raycache.host.service import HostService
from raycache.types import TIERS, CacheAction, CacheCommand

STORAGE_FIRST = (CacheAction.ATTACH, CacheAction.RESIZE, CacheAction.SCRUB)
"""Commands that the owner executes before the decider, which must not change anything if the storage refuses."""


def is_for_storage(command: CacheCommand) -> bool:
    """Whether the owner has a part in a command."""
    if command.kind is CacheAction.CLEAR:
        return "storage" in (command.tiers or TIERS)
    return command.kind in (*STORAGE_FIRST, CacheAction.DETACH)


def carry_out(command: CacheCommand, host: HostService) -> dict[str, Any]:
    """Execute the owner's part of a command for which `is_for_storage`.

    Returns:
        The result (see `AsyncEngine.admin`).
    Raises:
        ConfigError: the command is not possible.
    """
    match command.kind:
        case CacheAction.ATTACH:
            return {"storage": host.attach(command.url)}
        case CacheAction.DETACH:
            return {"detached": host.detach()}
        case CacheAction.RESIZE:
            host.resize(command.size)
            return {"bytes_limit": command.size}
        case CacheAction.SCRUB:
            return host.scrub(timeout_s=command.timeout_s or math.inf)
    host.clear()
    return {}


def with_storage(tiers: Mapping[str, Any], figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the storage's own counters (`HostService.status`) to those of the tiers."""
    if not figures:
        return tiers
    numbers = {name: float(value) for name, value in figures.items() if name != "name"}
    return {**tiers, "storage": {**tiers.get("storage", {}), **numbers}}
