"""`raycache launch` on a remote cluster: runs the same command as a Ray job on its head, and follows it.

this machine                         head
raycache launch --address http://... -> Ray job: raycache launch --address auto ...
log, endpoint, exit status           <-
Ctrl-C                               -> stops the job cleanly
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from launch import environment
from launch.cli.signals import unwinding
from raycache import __version__
from raycache.checkpoint.hub_id import hub_id
from raycache.config import Config
from raycache.errors import ConfigError

_NOT_FOUND = 127
"""A shell's exit status if the command is not found."""


def is_remote(address: str) -> bool:
    """Whether an address is a dashboard URL."""
    return address.startswith(("http://", "https://"))


def check_client() -> None:
    """Check, inside a job, that the machine that submitted it has the same version of RayCache.

    Raises:
        ConfigError: it has another one, whose flags may differ.
    """
    if environment.client_version() not in ("", __version__):
        raise ConfigError(
            f"the cluster has RayCache {__version__}, the submitting machine {environment.client_version()}; "
            "install the same version on both"
        )


def run(values: Mapping[str, Any]) -> int:
    """Launch on the cluster at `values["address"]`; returns the exit status when the service has ended.

    Args:
        values: explicit settings, from `flags.settings`.
    Raises:
        ConfigError: the job cannot be started, or was lost.
    """
    config = Config.from_mapping(values)
    if name := environment.ray_address_variable():
        raise ConfigError(f"{name} is set, and Ray's job client would use it instead of --address; unset it")
    for path in config.directories:
        if not os.path.isabs(path) and hub_id(path) is None:
            name = "model" if path == config.model else "draft"
            raise ConfigError(
                f"{name}={path} is relative; for a remote cluster, use an absolute path on its nodes or the name of a "
                "Hub model"
            )
    from actors.job import Job  # imports Ray

    with unwinding():
        job = Job(config.address, entrypoint=_command(values), environment=_variables(config))
        print(f"job {job.job_id} at {config.address}; press Ctrl-C to stop it", file=sys.stderr, flush=True)
        try:
            job.follow(_Screen(job.node, is_loopback=config.host in ("127.0.0.1", "localhost", "::1")).show)
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr, flush=True)
            print(job.stop(), file=sys.stderr, flush=True)
            return 0
        status = job.exit_status()
    if status == _NOT_FOUND:
        raise ConfigError(f"raycache is not on the PATH of Ray at {config.address}; install this version on every node")
    if isinstance(status, str):
        raise ConfigError(f"the job {job.job_id} was lost: {' '.join(status.split())}")
    if status:
        print(f"raycache: the job {job.job_id} ended with exit status {status}", file=sys.stderr)
    return status


def _command(values: Mapping[str, Any]) -> str:
    """The command line for the head: the explicit settings, with --address auto."""
    config = Config.from_mapping(values)
    words = ["raycache", "launch", config.model, "--address", "auto"]
    for name in values:
        if name in ("model", "address", *_SECRETS):
            continue
        flag, value = name.replace("_", "-"), getattr(config, name)
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    return "exec " + shlex.join(words)


_SECRETS = ("api_key", "storage")
"""Settings that can hold passwords are passed in environment variables, since all users can see command lines."""


def _variables(config: Config) -> dict[str, str]:
    secrets = {environment.API_KEY: config.api_key, environment.STORAGE: config.storage if config.has_storage else ""}
    hub = environment.hub_variables(has_paths=False) if any(map(hub_id, config.directories)) else {}
    return {environment.CLIENT_VERSION: __version__, **hub, **{name: text for name, text in secrets.items() if text}}


class _Screen:
    """Shows the log of a job, and how to reach its endpoint from this machine."""

    def __init__(self, node: Any, *, is_loopback: bool) -> None:
        self._node, self._is_loopback = node, is_loopback
        self._line = ""

    def show(self, text: str) -> None:
        """Show the next part of the log."""
        print(text, end="", flush=True)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.startswith("endpoint ") and self._is_loopback:
                port = urlsplit(line.split()[1]).port
                node = self._node() or "HEAD"
                print(f"tunnel     ssh -N -L {port}:127.0.0.1:{port} {node}", flush=True)
