"""The environment variables that RayCache reads, all of them."""

from __future__ import annotations

import os
from pathlib import Path

API_KEY = "RAYCACHE_API_KEY"
CA_FILE = "RAYCACHE_CA_FILE"
STORAGE = "RAYCACHE_STORAGE"
CLIENT_VERSION = "RAYCACHE_CLIENT_VERSION"
_HUB_PATHS = ("HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH")


def api_key() -> str:
    """Bearer token of the server, for the server and for the commands that ask it; empty for none."""
    return os.environ.get(API_KEY, "")


def ca_file() -> str:
    """PEM file of certificates by which the commands know a server; empty for those that this machine trusts."""
    return os.environ.get(CA_FILE, "")


def storage() -> str:
    """URL of the storage tier: it can hold a password, and other users of a machine see flags. Empty for none."""
    return os.environ.get(STORAGE, "")


def hub_variables(*, has_paths: bool = True) -> dict[str, str]:
    """What is set for huggingface_hub, such as HF_TOKEN, to be set for processes on other machines as well.

    Args:
        has_paths: with those that name files or folders of this machine.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
    return found if has_paths else {name: value for name, value in found.items() if name not in _HUB_PATHS}


def keep_job_variables() -> None:
    """Let variables of a job be set once more by its driver; Ray refuses that otherwise, though they are the same."""
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")


def client_version() -> str:
    """Version of the RayCache on whose behalf this process launches, as a job of a cluster; empty for its own."""
    return os.environ.get(CLIENT_VERSION, "")


def ray_address_variable() -> str:
    """Name of a variable that tells Ray's job client another cluster than the one it is asked for; empty for none."""
    set_here = [name for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if os.environ.get(name)]
    return set_here[0] if set_here else ""


def keep_ray_on_loopback() -> None:
    """Have a Ray cluster of this process listen on 127.0.0.1 only; call it before Ray is imported.

    Ray's processes listen on all interfaces unless the node's address is a loopback one. Ray asks for that itself on
    systems where it makes no clusters, and this is how to ask for it here; it takes no such address as an argument.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def state_dirs() -> list[Path]:
    """Folders that can hold the state of running services; new state goes into the first.

    A login shell has $XDG_RUNTIME_DIR, a cron job of the same user has not, and each must find what the other started.
    """
    home = Path.home() / ".raycache" / "run"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and os.access(runtime, os.W_OK):
        return [runtime / "raycache", home]
    return [home]
