"""Collects facts about nodes for `raycache doctor`, by a light task on each node."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycache import __version__
from raycache.checkpoint.hub_models import Copy, copies, pinned_models
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.parallel.interfaces import Link, link
from raycache.parallel.placement import Node


@dataclass(frozen=True)
class Survey:
    """Facts about a node.

    Attributes:
        link: network interface of its ranks.
        memory_bytes: available memory.
        shared_bytes: free in /dev/shm, which holds the host tier; 0 if there is none.
        missing: model directories that do not exist there.
        copies: local copies of Hub models.
        versions: of raycache and Python.
    """

    link: Link
    memory_bytes: int
    shared_bytes: int
    missing: tuple[str, ...]
    copies: tuple[Copy, ...]
    versions: tuple[str, str]


def survey(config: Config, nodes: Sequence[Node], *, timeout_s: float) -> Mapping[str, Survey | str]:
    """Survey nodes in parallel.

    Args:
        config: names the interface and models to look for; Hub models must be pinned.
        timeout_s: for all nodes together; Ray starts a process on each.
    Returns:
        By node id: the survey, or the reason why there is none.
    """
    refs = {}
    for node in nodes:
        options: dict[str, Any] = {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}
        asked = ray.remote(num_cpus=0, max_retries=0, **options)(_look_around)
        refs[node.node_id] = asked.remote(config)
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    found: dict[str, Survey | str] = {}
    for node_id, ref in refs.items():
        try:
            found[node_id] = ray.get(ref, timeout=0)
        except GetTimeoutError:
            ray.cancel(ref, force=True)
            found[node_id] = f"it has not replied within {timeout_s:.0f} s"
        except RayTaskError as cause:
            found[node_id] = str(cause.cause) if isinstance(cause.cause, ConfigError) else _not_ours(cause)
        except RayError as cause:  # its node or its worker is gone
            found[node_id] = str(cause).splitlines()[0]
    return found


def _look_around(config: Config) -> Survey:
    shared = Path("/dev/shm")
    of_hub = {str(model) for model in pinned_models(config).values()}
    directories = [path for path in config.directories if path not in of_hub]
    return Survey(
        link=link(config.interface, node_address=ray.util.get_node_ip_address()),
        memory_bytes=psutil.virtual_memory().available,
        shared_bytes=psutil.disk_usage(str(shared)).free if shared.is_dir() else 0,
        missing=tuple(path for path in directories if not (Path(path) / "config.json").is_file()),
        copies=tuple(copies(config)),
        versions=(__version__, platform.python_version()),
    )


def _not_ours(error: RayTaskError) -> str:
    last = str(error).strip().splitlines()[-1]
    return f"raycache does not run there: {last}"
