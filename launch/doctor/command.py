"""`raycache doctor`: runs the checks of a launch with the same settings, without loading weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import psutil

from launch.doctor.check import CheckResult, Outcome, attempt
from launch.table import counted, human_bytes, render
from raycache.config import Config
from raycache.errors import ConfigError

_MACHINE_CHECKS = {"attention", "cache", "device", "download", "host tier", "memory", "storage"}
"""Checks whose result depends on the machine."""


def run(settings: Mapping[str, Any]) -> int:
    """Print the report; returns the exit code, 1 if a check failed.

    Args:
        settings: fields of `Config`, not yet validated.
    """
    results = list(examine(settings))
    print(render(("CHECK", "RESULT", "DETAILS"), rows=[(one.check, one.outcome, one.text) for one in results]))
    failed, warnings = (sum(one.outcome is kind for one in results) for kind in (Outcome.FAILED, Outcome.WARNING))
    if failed:
        if any(one.check == "settings" for one in results):
            print("\nthe other checks ran without the invalid settings")
        print(f"\n{failed} of {len(results)} checks failed: launch would not start")
    else:
        print(f"\nno check failed, {counted(warnings, 'warning')}" if warnings else "\nall checks passed")
    return 1 if failed else 0


def examine(settings: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Check everything that can be checked on this machine."""
    config, failures = _read_settings(settings)
    yield from failures
    yield from _versions()
    yield _cpus(config)
    try:
        from launch.doctor.hub import examine_hub
        from launch.doctor.model import examine_model
    except ImportError as cause:
        yield CheckResult("packages", Outcome.FAILED, f"{cause}; install raycache again")
    else:
        with ExitStack() as made:
            models = examine_hub(config, made)
            found = chain(models.results, examine_model(models.here) if models.here else ())
            yield from found if config.address == "local" else map(_elsewhere, found)
        yield _port(config)
        if config.address != "local" and models.pinned:
            from launch.doctor.cluster import examine_cluster

            yield from examine_cluster(models.pinned)


def _read_settings(settings: Mapping[str, Any]) -> tuple[Config, list[CheckResult]]:
    """Return the valid settings, with defaults for invalid ones, and a failure for each of these."""
    left = dict(settings)
    failures: list[CheckResult] = []
    while True:
        try:
            return Config.from_mapping(left), failures
        except ConfigError as error:
            failures.append(CheckResult("settings", Outcome.FAILED, str(error)))
            del left[_culprit(left, str(error))]


def _culprit(settings: Mapping[str, Any], failure: str) -> str:
    """Find a setting whose removal changes or resolves the failure."""
    for name in settings:
        try:
            Config.from_mapping({key: value for key, value in settings.items() if key != name})
        except ConfigError as other:
            if str(other) == failure:
                continue
        return name
    raise ConfigError(failure)


def _elsewhere(found: CheckResult) -> CheckResult:
    """Turn a failure that depends on the machine into a warning, since ranks may run on others."""
    if found.outcome is not Outcome.FAILED or found.check not in _MACHINE_CHECKS:
        return found
    return CheckResult(found.check, Outcome.WARNING, f"on this machine (ranks may run on others): {found.text}")


def _versions() -> Iterator[CheckResult]:
    yield CheckResult("python", Outcome.OK, ".".join(map(str, sys.version_info[:3])))
    for package in ("ray", "torch"):
        try:
            yield CheckResult(package, Outcome.OK, version(package))
        except PackageNotFoundError:
            yield CheckResult(package, Outcome.FAILED, f"not installed; pip install {package}")


def _cpus(config: Config) -> CheckResult:
    cpus = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else psutil.cpu_count() or 1
    memory = human_bytes(psutil.virtual_memory().available)
    text = f"{cpus} for {counted(config.world_size, 'rank')}, {memory} of memory free"
    if config.address == "local" and config.world_size > cpus:
        return CheckResult("CPUs", Outcome.WARNING, f"{text}; ranks will share cores and be slow")
    return CheckResult("CPUs", Outcome.OK, text)


def _port(config: Config) -> CheckResult:
    try:
        import_module("launch.http.serve")
        from launch.http.bind import bind
    except ImportError as cause:
        return CheckResult("packages", Outcome.FAILED, f"{cause}; install raycache again")

    def check() -> str:
        bind(config).close()
        return f"{config.host}:{config.port} is free" if config.port != "auto" else f"{config.host}, on a free port"

    return attempt("endpoint", check)
