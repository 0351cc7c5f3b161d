"""Placement on several Ray nodes: where Ray puts what was planned, waiting, and what is left after."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from actors.placement import Placement, cluster_nodes, reserve
from launch.doctor.check import CheckResult, Outcome
from launch.doctor.cluster import examine_nodes
from raycache.config import Config
from raycache.errors import ConfigError

CONFIG = Config(address="auto", device="cpu", tp=2, cp=2, start_timeout_s=30)


class Nodes:
    """A Ray cluster of nodes of two CPUs, in the process that this is made in."""

    def __init__(self) -> None:
        # Or it would be what others on this machine find as "auto".
        self._folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rc", dir="/tmp")
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self.others = [self.cluster.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=self.cluster.address, logging_level="ERROR", log_to_driver=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


made: list[Nodes] = []
"""The one of this process."""


def run(test: Callable[[Nodes], None]) -> None:
    if not made:
        made.append(Nodes())
    test(made[0])
    deadline = time.monotonic() + 20
    while any(node.free_cpus != node.cpus for node in cluster_nodes()):
        assert time.monotonic() < deadline, f"something is still reserved: {cluster_nodes()}"
        time.sleep(0.1)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def close() -> None:
    for nodes in made:
        nodes.close()


@pytest.fixture(scope="module")
def apart() -> Iterator[Callable[[Callable[[Nodes], None]], None]]:
    """Runs a test in a process that is connected to a cluster of three nodes; this one has a cluster of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda test: pool.submit(run, test).result(200)
        pool.submit(close).result(60)


Apart = Callable[[Callable[[Nodes], None]], None]


def nothing(missing: str) -> None:
    pass


def placed(config: Config, on_wait: Callable[[str], None] = nothing) -> Placement:
    return reserve(config, device="cpu", on_wait=on_wait)


def pinned(placement: Placement) -> tuple[str, ...]:
    """Where the bundles of the ranks are, as Ray says."""
    of = placement_group_table(placement.group)["bundles_to_node_id"]
    return tuple(of[bundle] for bundle in placement.bundles)


def node_of_this_process() -> str:
    return str(ray.get_runtime_context().get_node_id())


def where_planned(nodes: Nodes) -> None:
    there = cluster_nodes()
    assert [(node.cpus, node.free_cpus, node.gpus, node.is_draining) for node in there] == [(2, 2, 0, False)] * 3
    # Four ranks are two per node at one per core; a map is taken as it stands.
    placement = placed(CONFIG)
    assert len(set(placement.nodes)) == 2 and len(set(placement.nodes[:2])) == len(set(placement.nodes[2:])) == 1
    assert pinned(placement) == placement.nodes and not placement.warnings
    first, second, third = (node.node_id for node in there)
    chosen = placed(replace(CONFIG, placement=f"0@{third};1,2@{first};3@{second}"))
    assert pinned(chosen) == chosen.nodes == (third, first, first, second)
    tasks = [ray.remote(node_of_this_process).options(**chosen.options(rank)).remote() for rank in (0, 3)]
    assert ray.get(tasks, timeout=120) == [third, second]
    assert len(chosen.warnings) == 2 and "tp group of ranks 0-1 is on 2 nodes" in chosen.warnings[0]
    placement.remove()
    chosen.remove()


def test_ranks_are_where_the_plan_or_a_map_says(apart: Apart) -> None:
    apart(where_planned)


def again_without(nodes: Nodes) -> None:
    placement = placed(CONFIG)
    leaving = placement.nodes[0]
    other = placement.again(excluding={leaving}, on_wait=nothing)
    assert leaving not in other.nodes and len(set(other.nodes)) == 2
    assert pinned(other) == other.nodes
    same = other.again(excluding=set(), on_wait=nothing)
    only = same.again(excluding=set(same.nodes[1:3]), on_wait=nothing)
    assert len(set(only.nodes)) == 1 and only.nodes[0] not in same.nodes[1:3], "on one node when no other is left"
    assert pinned(only) == only.nodes
    only.remove()


def test_places_are_found_again_without_some_nodes(apart: Apart) -> None:
    apart(again_without)


def gives_up(nodes: Nodes) -> None:
    told: list[str] = []
    blockers = [
        ray.remote(num_cpus=2, scheduling_strategy="SPREAD")(type("Blocker", (), {})).remote() for _ in range(3)
    ]
    while any(node.free_cpus for node in cluster_nodes()):
        time.sleep(0.05)
    with pytest.raises(ConfigError, match=r"could not place the ranks within 1 s: needs 2 x 2 ranks .* room for 0"):
        placed(replace(CONFIG, start_timeout_s=1), told.append)
    assert told and "has 0 GPU (0 free), 2 CPU (0 free)" in told[0]

    def stop(missing: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        placed(CONFIG, stop)
    first = cluster_nodes()[0]
    with pytest.raises(ConfigError, match=rf"{first.address} needs .* CPU for 4 ranks, free are 0 CPU"):
        placed(replace(CONFIG, start_timeout_s=1, placement=f"0-3@{first.node_id}"))
    for blocker in blockers:
        ray.kill(blocker)


def test_a_wait_without_end_says_what_is_missing_and_leaves_nothing(apart: Apart) -> None:
    apart(gives_up)


def joins(nodes: Nodes) -> None:
    config = replace(CONFIG, tp=64, cp=1)  # no node of two CPUs takes so many, so one that does is waited for
    came: list[Any] = []

    def add(missing: str) -> None:
        if not came:
            came.append(nodes.cluster.add_node(num_cpus=4))

    assert "room for 0" in missing_of(config)
    placement = placed(config, add)
    assert len(came) == 1 and set(placement.nodes) == {came[0].node_id}
    assert set(pinned(placement)) == {came[0].node_id}
    placement.remove()
    nodes.cluster.remove_node(came[0])


def missing_of(config: Config) -> str:
    try:
        placed(replace(config, start_timeout_s=1)).remove()
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_a_node_that_joins_is_taken(apart: Apart) -> None:
    apart(joins)


def examined(nodes: Nodes) -> None:
    there = cluster_nodes()

    def doctor(**settings: Any) -> tuple[dict[str, CheckResult], set[Outcome]]:
        config = replace(CONFIG, model=tempfile.gettempdir(), **settings)
        found = list(examine_nodes(config, device="cpu"))
        rows = [one for one in found if one.check.startswith("node ")]
        return {one.check: one for one in found}, {one.outcome for one in rows}

    def with_model(**settings: Any) -> dict[str, CheckResult]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").touch()
            rows = list(examine_nodes(replace(CONFIG, model=folder, **settings), device="cpu"))
        assert [one.check for one in rows[:3]] == [f"node {there[0].address}"] * 3
        assert all("2 CPU (2 free), 0 GPU (0 free)" in one.text for one in rows[:3])
        assert all(f"address {there[0].address}" in one.text for one in rows[:3])
        return {"\n".join(one.text for one in rows[:3]): rows[0], **{one.check: one for one in rows[3:]}}

    found, outcomes = doctor()
    assert outcomes == {Outcome.FAILED, Outcome.WARNING}, "two nodes with ranks lack the model, another one does too"
    assert found["placement"].text == "; ".join(f"ranks {those} on {there[0].address}" for those in ("0-1", "2-3"))
    calm = with_model()
    assert {one.outcome for one in calm.values()} == {Outcome.OK}
    assert "ranks 0-1" in next(iter(calm)) and calm["network"].text == there[0].address
    wide = with_model(tp=64)["placement"]
    assert wide.outcome is Outcome.WARNING and "too much for 6 CPUs" in wide.text and "nodes to join" in wide.text
    strange = with_model(placement="0-3@nowhere")["placement"]
    assert strange.outcome is Outcome.FAILED and "there is no node 'nowhere'" in strange.text
    several = [one.text for one in examine_nodes(replace(CONFIG, replicas=2), device="cpu") if one.check == "placement"]
    assert [text.split(":")[0] for text in several] == ["replica 0", "replica 1"]
    nothing_there = next(iter(examine_nodes(replace(CONFIG, interface="eth77"), device="cpu")))
    assert "interface='eth77' matches no address of the node" in nothing_there.text


@pytest.mark.long
def test_the_doctor_says_what_nodes_have_and_where_ranks_would_go(apart: Apart) -> None:
    apart(examined)


def lost(nodes: Nodes) -> None:
    gone = nodes.others[1]
    ids = [node.node_id for node in cluster_nodes() if node.node_id != gone.node_id]
    text = f"0-1@{gone.node_id};2-3@{ids[0]}"
    placement = placed(replace(CONFIG, placement=text))
    with pytest.raises(ConfigError, match="there is no node 'nowhere' in the cluster; there are"):
        placed(replace(CONFIG, placement="0-3@nowhere"))
    nodes.cluster.remove_node(gone)
    deadline = time.monotonic() + 30
    while gone.node_id in {node.node_id for node in cluster_nodes()} and time.monotonic() < deadline:
        time.sleep(0.1)
    other = placement.again(excluding={gone.node_id}, on_wait=nothing)
    assert set(other.nodes) == set(ids) and pinned(other) == other.nodes
    (line,) = other.warnings
    assert f"there is no node '{gone.node_id}'" in line and line.endswith("ranks are placed automatically")
    other.remove()


def test_a_lost_node_that_a_map_names_does_not_keep_the_service_down(apart: Apart) -> None:
    apart(lost)
