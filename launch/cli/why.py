"""`raycache why`: why a running server computed prompts again, from GET /cache/why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from launch.cli.server import add_server_flags, send
from launch.table import render

_HEADS = ("TENANT", "CAUSE", "PLACE", "REQUESTS", "TOKENS LOST", "OF PREFILL", "SECONDS")


def add_why_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Imports nothing heavy, so that --help is fast."""
    add_server_flags(parser, timeout_s=10.0)


def run(options: argparse.Namespace) -> int:
    """Print the sums and return the exit code.

    Raises:
        RayCacheError: the server cannot be reached, or refused.
    """
    return send(options, path="/cache/why", body=None, show=show)


def show(answer: Mapping[str, Any]) -> str:
    """Format the sums as a table, each tenant's most expensive cause first."""
    tenants: Mapping[str, Mapping[str, Any]] = answer.get("tenants", {})
    rows = [_row(tenant, cause) for tenant, sums in tenants.items() for cause in sums.get("causes", ())]
    return render(_HEADS, rows=rows) if rows else "no prompt has left a known one yet"


def _row(tenant: str, cause: Mapping[str, Any]) -> tuple[str, ...]:
    kind = f"/{cause['kind']}" if cause["kind"] else ""
    return (
        tenant or "-",
        f"{cause['cause']}{kind}",
        "".join(char if char.isprintable() else "?" for char in cause["place"]) or "-",  # clients name tools
        f"{cause['requests']:,}",
        f"{cause['lost_tokens']:,}",
        f"{100 * cause['lost_share']:.1f} %",
        f"{cause['lost_s']:,.1f}",
    )
