"""Models of the Hub in the settings: pinned to a commit once, downloaded on every machine, read from its cache.

    model="Qwen/Qwen3-8B"  -- pinned -->  "Qwen/Qwen3-8B@COMMIT"  -- fetch, located -->  "HF_HOME/hub/.../COMMIT"

A pinned name refers to the same files on all machines of a cluster, whenever they download them.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raycache.checkpoint.hub import Hub
from raycache.checkpoint.hub_download import OnProgress
from raycache.checkpoint.hub_files import descriptions
from raycache.checkpoint.hub_id import HubId, hub_id
from raycache.config import Config
from raycache.errors import CheckpointError, ConfigError

_SETTINGS = ("model", "draft")
"""Settings that name models, in the order of `Config.directories`."""


def pinned(config: Config, *, hub: Hub | None = None) -> Config:
    """The settings with the commit of each model of the Hub; asks the Hub.

    A directory wins over a model of the same name. Clients know a model of the Hub by its name there.

    Args:
        config: of the service.
        hub: by default that of the environment.
    Raises:
        CheckpointError: a model is neither a directory nor one of the Hub that can be read.
        ConfigError: `revision` goes with a directory, or with a name that has one.
    """
    model = hub_id(config.model)
    if config.revision and (model is None or model.revision):
        why = "has one in its name" if model else "is not a model of the Hub"
        raise ConfigError(
            f"revision={config.revision} goes with a model of the Hub, {config.model} {why}; leave it out"
        )
    changes: dict[str, Any] = {"revision": ""}
    for name, text in zip(_SETTINGS, config.directories, strict=False):
        wanted = hub_id(text)
        if wanted is None:
            continue
        if name == "model":
            changes["served_model_name"] = config.served_model_name or wanted.repo
            wanted = wanted.at(config.revision or wanted.revision)
        found = wanted if wanted.is_pinned else (hub or Hub()).find(wanted).model
        changes[name] = str(found)
    return replace(config, **changes)


@contextlib.contextmanager
def outlined(config: Config, *, hub: Hub | None = None) -> Iterator[Config]:
    """The settings with directories of pinned models as long as the block lasts; see `Hub.outline`.

    Raises:
        CheckpointError: see `Hub.fetch`.
    """
    hub, changes = hub or Hub(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="raycache-outline-") as scratch:
        for name, model in pinned_models(config).items():
            repository = hub.find(model)
            folder = hub.fetch(repository, has_weights=False, on_progress=_say_nothing)
            if not config.dummy_weights:
                folder = hub.outline(repository, scratch=Path(scratch, name))
            changes[name] = str(folder)
        yield replace(config, **changes)


@dataclass(frozen=True)
class Copy:
    """How much of a model is on this machine.

    Attributes:
        model: pinned.
        num_bytes: of all files that are needed.
        missing_bytes: of files that are not in the cache.
        free_bytes: on the disk of the cache.
    """

    model: HubId
    num_bytes: int
    missing_bytes: int
    cache_dir: Path
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the missing files fit on the disk."""
        return self.missing_bytes <= self.free_bytes


def copies(config: Config, *, hub: Hub | None = None) -> list[Copy]:
    """What of all pinned models is here, and what `fetch` would download; fetches what describes them.

    Raises:
        CheckpointError: see `Hub.fetch`.
    """
    hub, found = hub or Hub(), []
    for model in pinned_models(config).values():
        repository = hub.find(model)
        hub.fetch(repository, has_weights=False, on_progress=_say_nothing)
        names = [] if config.dummy_weights else hub.weight_names(repository)
        names += descriptions(repository.files)
        missing = sum(file.size or 0 for file in hub.missing(repository, names))
        num_bytes = sum(repository.files[name].size or 0 for name in names if name in repository.files)
        found.append(Copy(model, num_bytes, missing, hub.cache_dir, shutil.disk_usage(hub.cache_dir).free))
    return found


def fetch(config: Config, *, hub: Hub | None = None, on_progress: OnProgress) -> None:
    """Download the files of all pinned models that are not on this machine.

    Args:
        config: of the service, pinned.
        hub: by default that of the environment.
        on_progress: see `OnProgress`; the bytes are those of one model after the other.
    Raises:
        CheckpointError: see `Hub.fetch`.
    """
    hub = hub or Hub()
    for model in pinned_models(config).values():
        hub.fetch(hub.find(model), has_weights=not config.dummy_weights, on_progress=on_progress)


def described(config: Config, *, hub: Hub | None = None) -> Config:
    """The settings with directories of pinned models that have what describes them, for a process without weights.

    Raises:
        CheckpointError: see `Hub.fetch`.
    """
    hub = hub or Hub()
    for model in pinned_models(config).values():
        hub.fetch(hub.find(model), has_weights=False, on_progress=_say_nothing)
    return located(config, hub=hub)


def located(config: Config, *, hub: Hub | None = None) -> Config:
    """The settings with this machine's directories of pinned models that have been fetched.

    Raises:
        CheckpointError: one is not on this machine.
    """
    changes: dict[str, Any] = {name: _directory(hub or Hub(), each) for name, each in pinned_models(config).items()}
    return replace(config, **changes)


def pinned_models(config: Config) -> dict[str, HubId]:
    """Setting, "model" or "draft" -> model of the Hub at a commit."""
    found = {name: HubId.parse(text) for name, text in zip(_SETTINGS, config.directories, strict=False)}
    return {name: model for name, model in found.items() if model is not None and model.is_pinned}


def _directory(hub: Hub, model: HubId) -> str:
    folder = hub.folder(model)
    if not folder.is_dir():
        raise CheckpointError(f"{model.repo} has not been fetched to this machine: there is no {folder}")
    return str(folder)


def _say_nothing(done: int, total: int) -> None:
    pass
