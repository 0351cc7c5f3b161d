"""`raycache replicas`: an operator's orders to the replicas of a running server, over HTTP (http_replicas.py)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from launch.cli.orders import add_order_flags, give_order
from launch.table import render

_EXAMPLES = """\
examples:
  raycache replicas status
  raycache replicas scale 3
  raycache replicas restart                one after the other, each replaced before it is drained
  raycache replicas restart --drain-first  where there is no room for one more
"""


def add_replicas_flags(parser: argparse.ArgumentParser) -> None:
    """Add the orders. Imports nothing heavy: --help has to answer at once."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    orders = parser.add_subparsers(title="orders", metavar="ORDER", required=True, dest="order")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = orders.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_order_flags(added, timeout_s=1800.0)
        return added

    add("status", "show the replicas, their requests, and the tokens that each has to compute")
    add("scale", "start or drain replicas").add_argument("count", metavar="N", type=int, help="that there shall be")
    restart = add("restart", "replace all replicas, one after the other, while the others serve")
    restart.add_argument(
        "--drain-first", action="store_true", help="drain each before its successor starts; without room for one more"
    )


def run(options: argparse.Namespace) -> int:
    """Give one order and print the answer.

    Returns:
        Exit code.
    Raises:
        RayCacheError: it cannot be given, or was refused.
    """
    is_status = options.order == "status"
    path = "/replicas" if is_status else f"/replicas/{options.order}"
    return give_order(options, path=path, body=None if is_status else _body(options), show=_show)


def _body(options: argparse.Namespace) -> dict[str, Any]:
    return {"count": options.count} if options.order == "scale" else {"drain_first": options.drain_first}


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
