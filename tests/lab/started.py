"""A Ray cluster on the hosts of a lab by `ray start`, from the environment of the tests: quicker than `ray up`."""

from __future__ import annotations

import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

from tests.lab.hosts import Lab

_START_S = 300.0
_JOIN_S = 400.0


def environment(**added: str) -> dict[str, str]:
    """That a lab needs for it; with the health checks of cluster.yaml."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_health_check_initial_delay_ms": "5000",
        "RAY_health_check_period_ms": "2000",
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_failure_threshold": "4",
        **added,
    }


class StartedRay:
    """Host 0 is the head.

    Args:
        lab: with `environment`.
        num_cpus: of every host.
        head_cpus: of host 0.
    """

    def __init__(self, lab: Lab, *, num_cpus: int, head_cpus: int) -> None:
        self._lab, self._num_cpus, self._head_cpus = lab, num_cpus, head_cpus

    def start(self) -> None:
        """Start all."""
        head = f"--head --port=6379 --num-cpus={self._head_cpus} --include-dashboard=false"
        self._lab.on(0, self._command(0, head), timeout_s=_START_S)
        with ThreadPoolExecutor(len(self._lab.hosts)) as pool:
            list(pool.map(self.join, range(1, len(self._lab.hosts))))
        self.await_nodes()

    def join(self, number: int) -> None:
        """Start, or start again, what runs on a worker."""
        head = f"--address={self._lab.address(0)}:6379 --num-cpus={self._num_cpus}"
        start = f"ray stop --force; {self._command(number, head)}"
        # Ray gives its own processes 30 s to come up, which can be too little on a busy machine.
        self._lab.on(number, f"({start}) || ({start})", timeout_s=2 * _START_S)

    def await_nodes(self) -> None:
        """Wait until all hosts are part of the cluster."""
        deadline = time.monotonic() + _JOIN_S
        while (found := self.num_nodes()) != len(self._lab.hosts):
            assert time.monotonic() < deadline, f"{found} of {len(self._lab.hosts)} hosts have joined"
            time.sleep(1.0)

    def num_nodes(self) -> int:
        """Nodes that Ray calls alive."""
        # Of the active and the idle ones; those that failed stand below, without a count.
        return len(re.findall(r"^ 1 node_", self._lab.on(0, "ray status"), re.MULTILINE))

    def _command(self, number: int, role: str) -> str:
        address = f"--node-ip-address={self._lab.address(number)}"
        return f"ray start {role} {address} --object-store-memory=100000000 --disable-usage-stats"
