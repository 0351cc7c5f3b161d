"""Starts or connects to a Ray cluster, and inspects it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import ray
from ray.job_config import JobConfig

from actors.actor_logs import ActorWarnings
from actors.authentication import keep_token_private, require_token
from raycache.config import Config
from raycache.errors import ConfigError

_LOOK_TIMEOUT_S = 20.0
_SETTINGS = {"worker_niceness": 0}
"""Environment of a local cluster. Ray's default niceness of 15 would let any other process delay ranks; on an existing
cluster, set RAY_worker_niceness=0 for `ray start`."""
_WATCH = 'exec 3<&0; (read _ <&3; while [ -e "$1" ]; do rm -rf "$1"; sleep 2; done) &'
"""Shell script: when its input ends, remove a folder."""


@dataclass(frozen=True)
class Cluster:
    """A connection to a cluster.

    Attributes:
        address: HOST:PORT of its GCS.
        dashboard_url: "" without a dashboard.
        temp_dir: folder of a cluster started by this process, removed at its end; None for an existing cluster.
    """

    address: str
    dashboard_url: str
    temp_dir: Path | None


def connect(config: Config, *, variables: Mapping[str, str] = MappingProxyType({})) -> Cluster:
    """Start a local cluster (address "local") or connect to one.

    Args:
        variables: environment variables for processes on an existing cluster, overriding those set there. In a local
            cluster all processes inherit this process's environment.
    Raises:
        ConfigError: no cluster is at that address, it runs another version of Ray, or it cannot be started.
    """
    if ray.is_initialized():
        raise ConfigError("this process is connected to Ray already; disconnect with ray.shutdown() first")
    is_local = config.address == "local"
    if not is_local:
        _look(config.address)
    temp_dir = _temp_dir() if is_local else None
    options: dict[str, Any] = {"address": config.address}
    if temp_dir is not None:
        keep_token_private()
        options.update(include_dashboard=config.dashboard, dashboard_host="127.0.0.1", _temp_dir=str(temp_dir))
        options.update(_system_config=_SETTINGS)
    before = _descendants()
    try:
        with _sigterm_blocked() if is_local else contextlib.nullcontext():
            context = ray.init(
                **options,
                namespace="raycache",
                logging_level=logging.ERROR,
                log_to_driver=True,
                job_config=JobConfig(_py_driver_sys_path=_code_paths()),
                runtime_env={"env_vars": dict(variables)} if variables and not is_local else None,
            )
    except Exception as cause:  # of no other class when Ray's processes take longer than the 30 s that it gives them
        _end(_descendants() - before)
        disconnect(temp_dir)
        raise ConfigError(_explain(config.address, f"{type(cause).__name__}: {cause}")) from cause
    except (KeyboardInterrupt, SystemExit):  # the latter from Ray's handler of SIGTERM
        _end(_descendants() - before)
        disconnect(temp_dir)
        raise
    ActorWarnings(config.log_format).show()
    address: dict[str, Any] = context.address_info  # type: ignore[attr-defined]  # a base class lacks it
    if not is_local:
        _require_token(str(address["gcs_address"]), config)
    url = address.get("webui_url") or ""
    return Cluster(address=str(address["gcs_address"]), dashboard_url=f"http://{url}" if url else "", temp_dir=temp_dir)


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in processes started meanwhile, and in theirs.

    systemd and `timeout` send it to Ray's processes and actors too, but this process stops them: without the cluster's
    head that would fail after a minute, and without the actors nothing could be flushed. Ray kills what does not end
    within a second.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes of a half-started Ray: it would do so at exit, but not to agents that have not registered."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _require_token(address: str, config: Config) -> None:
    try:
        require_token(address, is_insecure_allowed=config.insecure_cluster)
    except ConfigError:
        disconnect(None)
        raise


def _temp_dir() -> Path:
    # Ray's sockets lie up to 64 characters below it, and a socket's path may have 107.
    folder = tempfile.gettempdir()
    made = Path(tempfile.mkdtemp(prefix="raycache-", dir=folder if len(folder) < 25 else "/tmp"))
    # When its start is interrupted, Ray ends its processes at exit and no sooner, and until then they write there.
    # Exit handlers run in reverse: this one, registered before Ray's, comes after them.
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _watch(made)
    return made


def _watch(folder: Path) -> None:
    """Have a folder removed even if this process is killed: Ray's processes would end but leave their files."""
    end, _ = os.pipe()  # the other end stays open, and this one unread, as long as this process lives
    command = ["sh", "-c", _WATCH, "sh", str(folder)]
    quiet = subprocess.DEVNULL
    subprocess.run(command, stdin=end, stdout=quiet, stderr=quiet, start_new_session=True, check=True)
    os.close(end)


def _look(address: str) -> None:
    """Check that a cluster accepts this process: `ray.init` takes a quarter of an hour to fail."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    if address != "auto":
        command += ["--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as cause:
        raise ConfigError(_explain(address, f"no answer within {_LOOK_TIMEOUT_S:.0f} s")) from cause
    if done.returncode:
        raise ConfigError(_explain(address, (done.stderr.strip() or "`ray status` fails").splitlines()[-1]))


def disconnect(temp_dir: Path | None) -> None:
    """Disconnect; a cluster started by this process is stopped and its files are removed."""
    ray.shutdown()
    if temp_dir is not None:
        shutil.rmtree(temp_dir, ignore_errors=True)


def device_type(config: Config) -> str:
    """ "cuda" or "cpu", from the setting or by what the cluster has."""
    if config.device != "auto":
        return config.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def _code_paths() -> list[str]:
    """Import paths for workers: those of this process, also for a checkout that is not installed.

    Not PYTHONPATH in a runtime_env: with any, Ray starts each worker through another Python, which takes a second of
    CPU per rank.
    """
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(__file__).resolve().parent.parent), *filter(None, known)]


def _explain(address: str, reason: str) -> str:
    text = " ".join(reason.split()).rstrip(".")
    for name in ("ValueError: ", "RuntimeError: ", "Exception: "):
        text = text.removeprefix(name)
    if address == "local":
        advice = "; if this machine is busy, try again" if "timed out" in text else ""
        return f"a local Ray cluster did not start: {text}{advice}"
    if "ersion mismatch" in text:
        return f"the Ray cluster at {address} does not run this Ray {ray.__version__}; install the same there: {text}"
    if "AuthToken" in text:
        return (
            f"the Ray cluster at {address} wants its token; set RAY_AUTH_MODE=token and put the token that "
            "`ray get-auth-token` prints there into ~/.ray/auth_token here"
        )
    return f"no Ray cluster at {address}: {text}; start one with `ray start --head` or use --address local"
