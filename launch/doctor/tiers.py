"""Checks of the host and storage tiers. Writes nothing: a storage directory is only inspected, not opened."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import psutil

from launch.doctor.check import CheckResult, Outcome, attempt
from launch.table import human_bytes
from raycache.config import Config, parse_bytes
from raycache.deployment.deployment import Deployment, check_host_tier
from raycache.errors import ConfigError
from raycache.memory.component import FULL
from raycache.storage.open import open_storage, storage_name

_SHARED_MEMORY = Path("/dev/shm")


def examine_tiers(deployment: Deployment, *, taken: int) -> Iterator[CheckResult]:
    """Check host memory and storage.

    Args:
        taken: bytes of this machine's memory that weights and device tier will need.
    """
    config = deployment.config
    if config.has_host_tier:
        yield attempt("host tier", lambda: _host(config, _page_bytes(deployment), taken))
    if config.has_storage:
        yield _storage(config)


def _page_bytes(deployment: Deployment) -> int:
    """Size of one page over all ranks together, each row counted once."""
    check_host_tier(deployment.config, deployment.model)
    return deployment.envelope_layout().unit_bytes(FULL)


def _host(config: Config, page_bytes: int, taken: int) -> str:
    free = max(0, psutil.virtual_memory().available - taken)
    if _SHARED_MEMORY.is_dir():
        free = min(free, shutil.disk_usage(_SHARED_MEMORY).free)
    each = f"{human_bytes(page_bytes / config.page_size)} per token"
    if config.host_memory == "auto":
        return f"a fraction of the {human_bytes(free)} available, {each}"
    wanted = parse_bytes("host_memory", config.host_memory)
    if wanted > free:
        raise ConfigError(
            f"host_memory={config.host_memory} is more than the {human_bytes(free)} available beside weights and "
            f"device tier, in memory and in {_SHARED_MEMORY}; use host_memory=auto"
        )
    if wanted < page_bytes:
        raise ConfigError(f"host_memory of {human_bytes(wanted)} holds no page; one takes {human_bytes(page_bytes)}")
    return f"at most {wanted // page_bytes * config.page_size} tokens, {each}"


def _storage(config: Config) -> CheckResult:
    name = storage_name(config.storage)
    try:
        if urlsplit(config.storage).scheme == "file":
            return _directory(config.storage, name)
        opened = open_storage(config.storage, timeout_s=config.prefetch_timeout_s)
    except ConfigError as error:
        return CheckResult("storage", Outcome.FAILED, str(error))
    is_up = opened.is_up
    opened.close()
    if is_up:
        return CheckResult("storage", Outcome.OK, f"{name} responds")
    return CheckResult("storage", Outcome.WARNING, f"{name} is unreachable; it will be used once it responds")


def _directory(url: str, name: str) -> CheckResult:
    parts = urlsplit(url)
    size, directory = dict(parse_qsl(parts.query)).get("size"), Path(unquote(parts.path))
    if size is None or not directory.is_absolute():
        raise ConfigError(f"storage {name} needs an absolute path and a size, such as file:///DIRECTORY?size=50GiB")
    wanted = parse_bytes(f"size of storage {name}", size)
    near = next(place for place in (directory, *directory.parents) if place.is_dir())
    held = sum(file.stat().st_size for file in directory.glob("*.segment"))
    free = shutil.disk_usage(near).free + held
    text = f"{name}: up to {human_bytes(wanted)}, {human_bytes(free)} free on its disk"
    return CheckResult("storage", Outcome.WARNING if wanted > free else Outcome.OK, text)
