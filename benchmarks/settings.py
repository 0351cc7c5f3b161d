"""Settings of engines that a benchmark is given."""

from __future__ import annotations

import argparse
from typing import Any


def add_settings(parser: argparse.ArgumentParser, *, whose: str) -> None:
    """Add `--set NAME=VALUE`, which may be repeated; `dict(options.set)` are the settings."""
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help=f"of {whose}")


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.isdigit() else value
