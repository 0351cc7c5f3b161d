"""Flags and request code shared by the commands for a running server. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from launch.environment import api_key
from launch.flags import seconds
from raycache.errors import ConfigError

if TYPE_CHECKING:
    from launch.service import Service


def add_server_flags(parser: argparse.ArgumentParser, *, timeout_s: float) -> None:
    """Add flags for the server to use and for the output format."""
    parser.add_argument("--endpoint", metavar="URL", help="server to use (default: the one on this machine)")
    parser.add_argument("--api-key", metavar="KEY", default="", help="API key of the server (or set RAYCACHE_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the response as JSON")
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="SECONDS", default=timeout_s, help="time limit (default: %(default)g s)"
    )


def send(
    options: argparse.Namespace,
    *,
    path: str,
    body: Mapping[str, Any] | None,
    show: Callable[[Mapping[str, Any]], str],
    margin_s: float = 0.0,
) -> int:
    """Send a command, print the response and return the exit code.

    Args:
        options: with the flags of `add_server_flags`.
        path: URL path.
        body: JSON body; None: GET.
        show: formats the response, unless JSON is requested.
        margin_s: added to `--timeout-s`.
    Raises:
        RayCacheError: the server cannot be reached, or rejected the command.
    """
    from launch.cli.client import ResponseError, ask

    service = None if options.endpoint else only_service()
    endpoint = service.endpoint if service else options.endpoint
    try:
        answer = ask(
            endpoint,
            path=path,
            key=options.api_key or api_key(),
            timeout_s=options.timeout_s + margin_s,
            body=body,
            certificate=service.certificate if service else "",
        )
    except ResponseError as refusal:
        raise ResponseError(f"{endpoint}: {refusal}") from refusal
    print(json.dumps(answer, indent=2, ensure_ascii=False) if options.json else show(answer))
    return 0


def only_service() -> Service:
    """Return the only service running on this machine.

    Raises:
        ConfigError: there are none or several.
    """
    from launch.service import running

    found = running()
    if len(found) != 1:
        what = (
            f"several services run on this machine: {', '.join(one.endpoint for one in found)}"
            if found
            else "no service runs on this machine"
        )
        raise ConfigError(f"{what}; name one with --endpoint http://HOST:PORT")
    return found[0]
