"""The Ray cluster that a service starts for itself."""

from __future__ import annotations

import os

import ray

from actors.cluster import Cluster


def niceness() -> int:
    return os.nice(0)


def test_processes_of_a_cluster_of_our_own_do_not_wait_for_all_others(cluster: Cluster) -> None:
    assert ray.get(ray.remote(num_cpus=0)(niceness).remote(), timeout=120) == os.nice(0)
