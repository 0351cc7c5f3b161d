"""All environment variables that RayCache reads."""

from __future__ import annotations

import os
from pathlib import Path

from raycache.errors import ConfigError

API_KEY = "RAYCACHE_API_KEY"
CA_FILE = "RAYCACHE_CA_FILE"
STORAGE = "RAYCACHE_STORAGE"
CLIENT_VERSION = "RAYCACHE_CLIENT_VERSION"
_THREADS = "OMP_NUM_THREADS"
_HUB_PATHS = ("HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH")


def api_key() -> str:
    """API key, for the server and for commands to it; empty: none."""
    return os.environ.get(API_KEY, "")


def ca_file() -> str:
    """PEM file of CA certificates that commands trust; empty: those of this machine."""
    return os.environ.get(CA_FILE, "")


def storage() -> str:
    """URL of the storage tier, which can hold a password, while flags are visible to other users; empty: none."""
    return os.environ.get(STORAGE, "")


def cpu_threads() -> int | None:
    """CPU threads of a process that computes, by OMP_NUM_THREADS; None: not set.

    Read where the service is launched: Ray sets the variable in its workers itself.

    Raises:
        ConfigError: it is not a number.
    """
    text = os.environ.get(_THREADS, "").partition(",")[0].strip()  # further ones are of nested regions
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{_THREADS}={os.environ[_THREADS]!r} must be a number of threads, such as 4; or unset it")
    return int(text)


def hub_variables(*, has_paths: bool = True) -> dict[str, str]:
    """Variables of huggingface_hub, such as HF_TOKEN, to set for processes on other machines too.

    Args:
        has_paths: whether to include those that name paths on this machine.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("HF_")}
    return found if has_paths else {name: value for name, value in found.items() if name not in _HUB_PATHS}


def keep_job_variables() -> None:
    """Allow a job's driver to set the job's environment variables again, which Ray rejects even for equal values."""
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")


def client_version() -> str:
    """In a job, version of RayCache on the machine that submitted it; else empty."""
    return os.environ.get(CLIENT_VERSION, "")


def ray_address_variable() -> str:
    """Name of a set variable that overrides the address given to Ray's job client; empty: none."""
    set_here = [name for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if os.environ.get(name)]
    return set_here[0] if set_here else ""


def keep_ray_on_loopback() -> None:
    """Make a Ray cluster started by this process listen on 127.0.0.1 only; call it before importing Ray.

    Ray listens on all interfaces unless the node's address is a loopback address, and it accepts no such address as an
    argument. It chooses one itself on platforms without multi-node support, which this variable imitates.
    """
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def state_dirs() -> list[Path]:
    """Folders with state files of running services; new files go into the first.

    Two, since $XDG_RUNTIME_DIR is set in a login shell but not in a cron job, and both must find all services.
    """
    home = Path.home() / ".raycache" / "run"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and os.access(runtime, os.W_OK):
        return [runtime / "raycache", home]
    return [home]


def kernel_caches() -> dict[str, Path]:
    """Library -> folder in which it keeps the kernels that it compiles."""
    home = Path.home()
    triton = Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache"
    return {
        "flashinfer": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or triton),
    }
