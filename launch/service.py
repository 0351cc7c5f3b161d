"""Services that run on this machine: one small JSON file each, written at start and removed at exit.

A file counts as long as the process that wrote it lives. A process is known by its id *and* its start time, because ids
are used again.
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
        pid: of the process that a person started.
        create_time_s: when that process started, seconds since the epoch.
        endpoint: such as "http://127.0.0.1:8000".
        model: name that clients use.
        ray_address: of the cluster, HOST:PORT, or "local".
        dashboard: URL of the Ray dashboard, or empty.
        started_at: when it was ready to serve, ISO 8601 in UTC.
        certificate: PEM file that it shows to its clients, or empty.
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
    """Keep the state file of this process's service while the block runs.

    Args:
        endpoint: such as "http://127.0.0.1:8000".
        model: name that clients use.
        ray_address: of the cluster, HOST:PORT, or "local".
        dashboard: URL of the Ray dashboard, or empty.
        certificate: PEM file that the server shows to its clients, or empty.
    Raises:
        ConfigError: others may write to the folder for it.
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
    """Services of this user that run on this machine, the oldest first; files of dead ones are removed."""
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
    """Stop a service: interrupt it as Ctrl-C does, then terminate it, then kill it and what it started.

    Args:
        service: as `running` reports it.
        grace_s: seconds that it may take to finish cleanly.
        terminate_s: seconds after that, before it is killed.
    Returns:
        What happened, for people.
    """
    process = _process(service)
    if process is None:
        return "had ended already"
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
    """The service's process, or None when it is gone (its id may be somebody else's by now)."""
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
    """Kill what an unclean end left behind; psutil checks that an id was not used again."""
    left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_KILL_S)
    return f"{said}, with {len(left)} processes that it had started" if left else said


def _private(folder: Path) -> Path:
    """The folder, made if missing. Signals are sent to what its files name, so only this user may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ConfigError(f"others than you may write to {folder}; remove it, or `chmod 700` it if it is yours")
    return folder


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read (mkstemp's mode), whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


def _read(path: Path) -> Service | None:
    try:
        return Service(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:  # it ended between the listing and now
        return None
    except (ValueError, TypeError) as cause:
        _log.warning("ignoring %s, it does not describe a service: %s", path, cause)
        return None
