"""The environment variables that RayCache reads, all of them."""

from __future__ import annotations

import os
from pathlib import Path

API_KEY = "RAYCACHE_API_KEY"


def api_key() -> str:
    """Bearer token of the server, for the server and for the commands that ask it; empty for none."""
    return os.environ.get(API_KEY, "")


def state_dirs() -> list[Path]:
    """Folders that can hold the state of running services; new state goes into the first.

    A login shell has $XDG_RUNTIME_DIR, a cron job of the same user has not, and each must find what the other started.
    """
    home = Path.home() / ".raycache" / "run"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and os.access(runtime, os.W_OK):
        return [runtime / "raycache", home]
    return [home]
