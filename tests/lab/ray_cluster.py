"""A Ray cluster on the hosts of a lab, by `ray up` and the cluster.yaml of this repository."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.lab.hosts import Lab
from tests.lab.space import REPOSITORY

_UP_S = 300.0
_JOIN_S = 400.0

ENVIRONMENT = {
    # Hosts have no way out: pip installs the wheel alone, and finds what it depends on in the environment of the tests.
    "PIP_NO_INDEX": "1",
    "PIP_NO_DEPS": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PYTHONPATH": sysconfig.get_path("purelib"),
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # `ray down` ends the head alone; workers end so long after it
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",  # it starts workers in one round, and marks them as joined in a later one
    "RAY_UP_enable_autoscaler_v2": "1",  # as it is by default, without the note
}
"""Of a lab on which `ray up` is to work."""


class RayCluster:
    """Host 0 is the head, all others are workers.

    Args:
        lab: with `ENVIRONMENT`.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.file = lab.folder / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(self._filled_in()), encoding="utf-8")
        token = lab.control.folder / "home" / ".ray" / "auth_token"
        token.parent.mkdir(parents=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        _make_wheel(lab.folder / "dist")

    def up(self) -> str:
        """`ray up`; returns what it said, when the head runs."""
        return self._ray("up", "-y", "--no-config-cache", str(self.file), timeout_s=_UP_S)

    def await_nodes(self) -> None:
        """Wait until all hosts have joined."""
        wanted = f"{len(self._lab.hosts)} local.cluster.node"
        deadline = time.monotonic() + _JOIN_S
        for number in range(len(self._lab.hosts)):  # asking Ray starts two programs that take seconds
            while "raylet" not in self._lab.on(number, "ps -eo comm"):
                assert time.monotonic() < deadline, f"Ray did not start on host {number} within {_JOIN_S:.0f} s"
                time.sleep(0.5)
        while wanted not in (said := self.execute("ray status")):
            assert time.monotonic() < deadline, f"not all hosts joined within {_JOIN_S:.0f} s:\n{said}"
            time.sleep(1.0)

    def execute(self, command: str, *, timeout_s: float = 120.0) -> str:
        """`ray exec` of a shell command on the head."""
        return self._ray("exec", str(self.file), command, timeout_s=timeout_s)

    def down(self) -> str:
        """`ray down`."""
        return self._ray("down", "-y", str(self.file), timeout_s=_UP_S)

    @contextmanager
    def forwarded(self, port: int) -> Iterator[None]:
        """The head's loopback port as the same port of the control space, over ssh as `ray dashboard` does it."""
        lab = self._lab
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        forward = ["ssh", "-N", "-L", f"{port}:127.0.0.1:{port}", "-i", str(lab.key), *options]
        process = subprocess.Popen(
            lab.control.command([*forward, "-o", "ExitOnForwardFailure=yes", f"root@{lab.address(0)}"]),
            stdin=subprocess.DEVNULL,
        )
        try:
            lab.await_port(port)
            yield
        finally:
            process.terminate()
            process.wait(20)

    def _ray(self, *arguments: str, timeout_s: float) -> str:
        return self._lab.run(["ray", *arguments], timeout_s=timeout_s, RAY_AUTH_MODE="token")

    def _filled_in(self) -> dict[str, Any]:
        """The repository's file with what it asks to be filled in, and nothing else."""
        cluster: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"))
        addresses = [self._lab.address(number) for number in range(len(self._lab.hosts))]
        cluster["provider"] |= {"head_ip": addresses[0], "worker_ips": addresses[1:]}
        cluster["auth"] |= {"ssh_user": "root", "ssh_private_key": str(self._lab.key)}
        cluster["file_mounts"]["~/raycache-dist"] = str(self._lab.folder / "dist")
        return cluster


def _make_wheel(folder: Path) -> None:
    """The file's second step, without asking an index, from a copy: a build leaves files beside its source."""
    source = folder.parent / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for package in ("raycache", "actors", "launch"):
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, timeout=120)
    shutil.rmtree(source)
