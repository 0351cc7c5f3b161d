"""`raycache stop`: stops services of this machine."""

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
    """Add the flags. Imports nothing heavy, so that --help is fast."""
    parser.add_argument(
        "service",
        metavar="SERVICE",
        nargs="?",
        default="",
        help="port, pid, model or endpoint, as shown by `raycache status`",
    )
    parser.add_argument("--all", action="store_true", help="stop all services on this machine")
    parser.add_argument(
        "--grace-s",
        type=seconds,
        metavar="SECONDS",
        default=30.0,
        help="time to stop cleanly before it is killed (default: %(default)g s)",
    )


def run(options: argparse.Namespace) -> int:
    """Stop one or all services; returns the exit code, 1 if none is running.

    Raises:
        ConfigError: the name matches no service or several.
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
    """Select the service with a name; without a name, the only one, or all."""
    if name and takes_all:
        raise ConfigError(f"name a service or use --all, not both; got {name} and --all")
    named = [one for one in running if name in ("", str(one.port), str(one.pid), one.model) or _is_at(one, name)]
    if not named and running:
        raise ConfigError(f"no service {name!r} on this machine; services:\n{_table(running)}")
    if len(named) > 1 and not takes_all:
        which = f"are named {name!r}" if name else "run on this machine"
        raise ConfigError(f"{len(named)} services {which}; name one by its port or pid, or use --all:\n{_table(named)}")
    return named


def _is_at(service: Service, name: str) -> bool:
    from launch.cli.client import base_url

    return base_url(name) == service.endpoint


def _table(services: Sequence[Service]) -> str:
    rows = [(one.port, one.pid, one.model, one.endpoint) for one in services]
    return render(("PORT", "PID", "MODEL", "ENDPOINT"), rows=rows)
