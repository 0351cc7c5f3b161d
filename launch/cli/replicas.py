"""`raycache replicas`: changes the replicas of a running server, over the API in launch/http/replicas.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from launch.cli.server import add_server_flags, send
from launch.table import render

_EXAMPLES = """\
examples:
  raycache replicas status
  raycache replicas scale 3
  raycache replicas restart                one by one, each replaced before it is drained
  raycache replicas restart --drain-first  if the cluster cannot hold one more
"""


def add_replicas_flags(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands. Imports nothing heavy, so that --help is fast."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_server_flags(added, timeout_s=1800.0)
        return added

    add("status", "show the replicas, with their requests and the tokens left to compute")
    add("scale", "start or drain replicas").add_argument(
        "count", metavar="N", type=int, help="number of replicas to have"
    )
    restart = add("restart", "replace all replicas one by one, while the others serve")
    restart.add_argument(
        "--drain-first",
        action="store_true",
        help="drain each before its successor starts, if the cluster cannot hold one more",
    )


def run(options: argparse.Namespace) -> int:
    """Send a command, print the response and return the exit code.

    Raises:
        RayCacheError: the server cannot be reached, or rejected the command.
    """
    is_status = options.action == "status"
    path = "/replicas" if is_status else f"/replicas/{options.action}"
    return send(options, path=path, body=None if is_status else _body(options), show=_show)


def _body(options: argparse.Namespace) -> dict[str, Any]:
    return {"count": options.count} if options.action == "scale" else {"drain_first": options.drain_first}


def _show(answer: Mapping[str, Any]) -> str:
    rows = [[row[name] for name in ("name", "state", "requests", "work_tokens")] for row in answer["replicas"]]
    lines = [render(("REPLICA", "STATE", "REQUESTS", "TOKENS TO COMPUTE"), rows=rows)]
    if started := answer.get("started"):
        lines.append(f"started {', '.join(started)}")
    lines += [_drained(one) for one in answer.get("drained", ())]
    return "\n".join(lines)


def _drained(one: Mapping[str, Any]) -> str:
    saved = one["saved"]
    told = ", ".join(f"{name} {value}" for name, value in saved.items()) if saved else "no storage to save pages to"
    return f"drained {one['name']}: {one['moved_requests']} requests moved, {told}"
