"""`raycache stop`: end services of this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.flags import seconds
from launch.table import render
from raycache.errors import ConfigError

if TYPE_CHECKING:
    from launch.service import Service


def add_stop_flags(parser: argparse.ArgumentParser) -> None:
    """Add which service to stop, and how patiently. Imports nothing heavy: --help has to answer at once."""
    parser.add_argument(
        "service", metavar="SERVICE", nargs="?", default="", help="port, pid, model or endpoint, as `status` shows them"
    )
    parser.add_argument("--all", action="store_true", help="stop all services of this machine")
    parser.add_argument(
        "--grace-s",
        type=seconds,
        metavar="SECONDS",
        default=30.0,
        help="time to end cleanly before it is killed (default: %(default)g s)",
    )


def run(options: argparse.Namespace) -> int:
    """Stop a service, or all.

    Returns:
        Exit code: 1 if none runs.
    Raises:
        ConfigError: it is not clear which one.
    """
    from launch import service

    chosen = _chosen(service.running(), options.service, takes_all=options.all)
    if not chosen:
        print("no service runs on this machine", file=sys.stderr)
        return 1
    for one in chosen:
        print(f"{one.model} at {one.endpoint} (pid {one.pid}): {service.stop(one, grace_s=options.grace_s)}")
    return 0


def _chosen(running: Sequence[Service], name: str, *, takes_all: bool) -> Sequence[Service]:
    """The service of that name; without one, the only one, or all."""
    if name and takes_all:
        raise ConfigError(f"name a service or use --all, not both; got {name} and --all")
    named = [one for one in running if name in ("", str(one.port), str(one.pid), one.model, one.endpoint)]
    if not named and running:
        raise ConfigError(f"no service {name!r} on this machine; name one of these:\n{_table(running)}")
    if len(named) > 1 and not takes_all:
        which = f"are named {name!r}" if name else "run on this machine"
        raise ConfigError(f"{len(named)} services {which}; name one by its port or pid, or use --all:\n{_table(named)}")
    return named


def _table(services: Sequence[Service]) -> str:
    rows = [(one.port, one.pid, one.model, one.endpoint) for one in services]
    return render(("PORT", "PID", "MODEL", "ENDPOINT"), rows=rows)
