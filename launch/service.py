"""State files of the services on this machine: one JSON file each, written at startup and removed at exit.

A file is valid while the process that wrote it lives. Processes are identified by pid and start time, as pids are
reused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from launch.environment import state_dirs
from raycache.errors import ConfigError

_log = logging.getLogger(__name__)
_START_TIME_TOLERANCE_S = 1.0
_KILL_S = 5.0


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        pid: of `raycache launch`.
        create_time_s: start time of that process, in seconds since the epoch.
        endpoint: such as "http://127.0.0.1:8000".
        model: name that clients use.
        ray_address: HOST:PORT of the cluster, or "local".
        dashboard: URL of the Ray dashboard, or empty.
        started_at: when it was ready, ISO 8601 in UTC.
        certificate: PEM file of the server's certificate, or empty.
    """

    pid: int
    create_time_s: float
    endpoint: str
    model: str
    ray_address: str
    dashboard: str
    started_at: str
    certificate: str = ""

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        url = urlsplit(self.endpoint)
        return url.port or (443 if url.scheme == "https" else 80)


@contextmanager
def register(
    endpoint: str, *, model: str, ray_address: str, dashboard: str, certificate: str = ""
) -> Iterator[Service]:
    """Keep a state file for this process during the `with` block (arguments as in `Service`).

    Raises:
        ConfigError: other users can write to the folder.
    """
    me = psutil.Process()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    shown = os.path.abspath(certificate) if certificate else ""
    service = Service(me.pid, me.create_time(), endpoint, model, ray_address, dashboard, now, shown)
    path = _private(state_dirs()[0]) / f"{service.pid}-{service.port}.json"
    _write(path, json.dumps(dataclasses.asdict(service), indent=2))
    try:
        yield service
    finally:
        path.unlink(missing_ok=True)


def running() -> list[Service]:
    """Running services of this user on this machine, the oldest first; stale state files are removed."""
    alive: list[Service] = []
    for folder in state_dirs():
        if not folder.is_dir():
            continue
        for path in _private(folder).glob("*.json"):
            service = _read(path)
            if service is None:
                continue
            if _process(service) is None:
                path.unlink(missing_ok=True)
            else:
                alive.append(service)
    return sorted(alive, key=lambda service: service.create_time_s)


def stop(service: Service, *, grace_s: float, terminate_s: float = 5.0) -> str:
    """Stop a service with SIGINT, then SIGTERM, then SIGKILL for it and its child processes.

    Args:
        grace_s: time between SIGINT and SIGTERM.
        terminate_s: time between SIGTERM and SIGKILL.
    Returns:
        The outcome, for display.
    """
    process = _process(service)
    if process is None:
        return "had already ended"
    try:
        started = process.children(recursive=True)
        if _ended(process, signal_number=signal.SIGINT, within_s=grace_s):
            return "stopped"
        if _ended(process, signal_number=signal.SIGTERM, within_s=terminate_s):
            return _swept(started, said=f"did not stop within {grace_s:g} s, terminated")
        process.kill()
        process.wait(_KILL_S)
    except psutil.NoSuchProcess:
        return "stopped"
    return _swept(started, said=f"did not stop within {grace_s + terminate_s:g} s, killed")


def _process(service: Service) -> psutil.Process | None:
    """The service's process; None if it has ended, even if its pid was reused."""
    try:
        process = psutil.Process(service.pid)
        same = abs(process.create_time() - service.create_time_s) < _START_TIME_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _ended(process: psutil.Process, *, signal_number: int, within_s: float) -> bool:
    process.send_signal(signal_number)
    with suppress(psutil.TimeoutExpired):
        process.wait(within_s)
        return True
    return False


def _swept(started: Sequence[psutil.Process], *, said: str) -> str:
    """Kill child processes left behind; psutil checks that their pids were not reused."""
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_KILL_S)
    return f"{said}, with {len(left)} of its child processes" if left else said


def _private(folder: Path) -> Path:
    """Create the folder if missing. Its files name processes to signal, so only this user may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(f"other users can write to {folder}; remove it, or `chmod 700` it if it is yours")
    return folder


def _write(path: Path, text: str) -> None:
    """Write a file atomically, readable by this user only (mkstemp's mode)."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


def _read(path: Path) -> Service | None:
    try:
        return Service(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:  # the service ended in the meantime
        return None
    except (ValueError, TypeError) as cause:
        _log.warning("ignoring the invalid state file %s: %s", path, cause)
        return None
