"""The doctor's look at models of the Hub: what a launch would download, and a directory for the other checks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from launch.doctor.finding import Finding, Verdict
from launch.table import human_bytes
from raycache.checkpoint.hub_models import Copy, copies, outlined, pinned
from raycache.config import Config
from raycache.errors import ConfigError


@dataclass(frozen=True)
class FromHub:
    """What came of looking up the models of the Hub among the settings.

    Attributes:
        findings: a line for each of them.
        pinned: the settings with their commits; None if a model is refused.
        here: the settings with directories on this machine, which have the headers of weights; None likewise.
    """

    findings: list[Finding]
    pinned: Config | None = None
    here: Config | None = None


def examine_hub(config: Config, made: ExitStack) -> FromHub:
    """Look up the models of the Hub among the settings, without their weights.

    Args:
        config: of the service.
        made: what is entered into it lasts as long as the directories are needed.
    """
    found: list[Finding] = []
    try:
        wanted = pinned(config)
        found += [_copy(one) for one in copies(wanted)]
        return FromHub(found, wanted, made.enter_context(outlined(wanted)))
    except ConfigError as refusal:
        return FromHub([*found, Finding("hub", Verdict.REFUSED, str(refusal))])


def say(copy: Copy) -> str:
    """What of a model is on a machine, and what is not."""
    whole = f"{copy.model.repo} at {copy.model.revision[:7]}, {human_bytes(copy.num_bytes)}"
    if not copy.missing_bytes:
        return f"{whole}: in {copy.cache_dir}"
    text = f"{whole}: {human_bytes(copy.missing_bytes)} to download to {copy.cache_dir}"
    return f"{text}, {human_bytes(copy.free_bytes)} are free there"


def _copy(copy: Copy) -> Finding:
    if copy.fits:
        return Finding("download", Verdict.OK, say(copy))
    return Finding("download", Verdict.REFUSED, f"{say(copy)}; free some, or set HF_HOME to a larger disk")
