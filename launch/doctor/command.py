"""What `launch` would do with the same settings, without loading weights: each check on a line, all refusals shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import psutil

from launch.doctor.finding import Finding, Verdict, attempt
from launch.table import human_bytes, render
from raycache.config import Config
from raycache.errors import ConfigError

_OF_A_MACHINE = {"attention", "cache", "device", "download", "host tier", "memory", "storage"}
"""Checks whose outcome is another one on another machine."""


def run(settings: Mapping[str, Any]) -> int:
    """Print the report.

    Args:
        settings: fields of `Config`, not checked yet.
    Returns:
        Exit code: 1 when something is refused.
    """
    findings = list(examine(settings))
    print(render(("CHECK", "VERDICT", "FOUND"), rows=[(one.subject, one.verdict, one.text) for one in findings]))
    refused = sum(one.verdict is Verdict.REFUSED for one in findings)
    print(f"\n{refused} refused: launch would not start" if refused else "\nnothing refused")
    return 1 if refused else 0


def examine(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Check everything that can be checked on this machine."""
    config, refusals = _read_settings(settings)
    yield from refusals
    yield from _versions()
    yield _cpus(config)
    try:
        from launch.doctor.hub import examine_hub
        from launch.doctor.model import examine_model
    except ImportError as cause:
        yield Finding("packages", Verdict.REFUSED, f"{cause}; install raycache again")
    else:
        with ExitStack() as made:
            models = examine_hub(config, made)
            found = chain(models.findings, examine_model(models.here) if models.here else ())
            yield from found if config.address == "local" else map(_elsewhere, found)
        yield _port(config)
        if config.address != "local" and models.pinned:
            from launch.doctor.cluster import examine_cluster

            yield from examine_cluster(models.pinned)


def _read_settings(settings: Mapping[str, Any]) -> tuple[Config, list[Finding]]:
    """The settings that can work, and a refusal for each of the others, which count as not given."""
    left = dict(settings)
    refusals: list[Finding] = []
    while True:
        try:
            return Config.from_mapping(left), refusals
        except ConfigError as refusal:
            refusals.append(Finding("settings", Verdict.REFUSED, str(refusal)))
            del left[_culprit(left, str(refusal))]


def _culprit(settings: Mapping[str, Any], refusal: str) -> str:
    """A setting without which the refusal is another one, or none."""
    for name in settings:
        try:
            Config.from_mapping({key: value for key, value in settings.items() if key != name})
        except ConfigError as other:
            if str(other) == refusal:
                continue
        return name
    raise ConfigError(refusal)


def _elsewhere(found: Finding) -> Finding:
    """What is known of this machine only, while ranks are on others."""
    if found.verdict is not Verdict.REFUSED or found.subject not in _OF_A_MACHINE:
        return found
    return Finding(found.subject, Verdict.WARNING, f"on this machine, which need not be where ranks go: {found.text}")


def _versions() -> Iterator[Finding]:
    yield Finding("python", Verdict.OK, ".".join(map(str, sys.version_info[:3])))
    for package in ("ray", "torch"):
        try:
            yield Finding(package, Verdict.OK, version(package))
        except PackageNotFoundError:
            yield Finding(package, Verdict.REFUSED, f"not installed; pip install {package}")


def _cpus(config: Config) -> Finding:
    cpus = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count() or 1
    text = f"{cpus} for {config.world_size} ranks, {human_bytes(psutil.virtual_memory().available)} of memory free"
    if config.address == "local" and config.world_size > cpus:
        return Finding("cpus", Verdict.WARNING, f"{text}; ranks will share cores and be slow")
    return Finding("cpus", Verdict.OK, text)


def _port(config: Config) -> Finding:
    try:
        from launch.http.serve import bind
    except ImportError as cause:
        return Finding("packages", Verdict.REFUSED, f"{cause}; install raycache again")

    def check() -> str:
        bind(config).close()
        return f"{config.host}:{config.port} is free" if config.port != "auto" else f"{config.host}, a free port"

    return attempt("endpoint", check)
