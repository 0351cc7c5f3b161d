"""Checks of Hub models: what a launch would download. Provides a local directory for the other checks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from launch.doctor.check import CheckResult, Outcome
from launch.table import human_bytes
from raycache.checkpoint.hub_models import Copy, copies, outlined, pinned
from raycache.config import Config
from raycache.errors import ConfigError


@dataclass(frozen=True)
class FromHub:
    """The Hub models in the settings.

    Attributes:
        results: one per model.
        pinned: settings with commits pinned; None if a model cannot be used.
        here: settings with local directories that hold config files and weight headers; None if a model cannot be used.
    """

    results: list[CheckResult]
    pinned: Config | None = None
    here: Config | None = None


def examine_hub(config: Config, made: ExitStack) -> FromHub:
    """Look up the Hub models in the settings, without downloading weights.

    Args:
        made: keeps the temporary directories until it is closed.
    """
    found: list[CheckResult] = []
    try:
        wanted = pinned(config)
        found += [_copy(one) for one in copies(wanted)]
        return FromHub(found, wanted, made.enter_context(outlined(wanted)))
    except ConfigError as error:
        return FromHub([*found, CheckResult("hub", Outcome.FAILED, str(error))])


def say(copy: Copy) -> str:
    """Describe how much of a model is on a machine, and how much has to be downloaded."""
    whole = f"{copy.model.repo} at {copy.model.revision[:7]}, {human_bytes(copy.num_bytes)}"
    if not copy.missing_bytes:
        return f"{whole}: in {copy.cache_dir}"
    text = f"{whole}: {human_bytes(copy.missing_bytes)} to download to {copy.cache_dir}"
    return f"{text}, {human_bytes(copy.free_bytes)} free there"


def _copy(copy: Copy) -> CheckResult:
    if copy.fits:
        return CheckResult("download", Outcome.OK, say(copy))
    return CheckResult("download", Outcome.FAILED, f"{say(copy)}; free space, or point HF_HOME to a larger disk")
