"""The doctor's look at models of the Hub: what a launch would download, and a directory for the other checks."""

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
    """The models of the Hub among the settings.

    Attributes:
        results: a line for each of them.
        pinned: the settings with their commits; None if a model is refused.
        here: the settings with directories on this machine, which have the headers of weights; None likewise.
    """

    results: list[CheckResult]
    pinned: Config | None = None
    here: Config | None = None


def examine_hub(config: Config, made: ExitStack) -> FromHub:
    """Look up the models of the Hub among the settings, without downloading weights.

    Args:
        config: of the service.
        made: what is entered into it lasts as long as the directories are needed.
    """
    found: list[CheckResult] = []
    try:
        wanted = pinned(config)
        found += [_copy(one) for one in copies(wanted)]
        return FromHub(found, wanted, made.enter_context(outlined(wanted)))
    except ConfigError as error:
        return FromHub([*found, CheckResult("hub", Outcome.FAILED, str(error))])


def say(copy: Copy) -> str:
    """What of a model is on a machine, and what is not."""
    whole = f"{copy.model.repo} at {copy.model.revision[:7]}, {human_bytes(copy.num_bytes)}"
    if not copy.missing_bytes:
        return f"{whole}: in {copy.cache_dir}"
    text = f"{whole}: {human_bytes(copy.missing_bytes)} to download to {copy.cache_dir}"
    return f"{text}, {human_bytes(copy.free_bytes)} free there"


def _copy(copy: Copy) -> CheckResult:
    if copy.fits:
        return CheckResult("download", Outcome.OK, say(copy))
    return CheckResult("download", Outcome.FAILED, f"{say(copy)}; free space, or point HF_HOME to a larger disk")
