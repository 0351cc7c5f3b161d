"""Checks of a running cluster: the resources of each node, and where ranks would be placed."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence

from actors.cluster import connect, device_type, disconnect
from actors.placement import cluster_nodes
from actors.survey import Survey, survey
from launch.doctor.check import CheckResult, Outcome, attempt
from launch.doctor.hub import say
from launch.environment import hub_variables, keep_job_variables
from launch.table import human_bytes
from raycache import __version__
from raycache.checkpoint.hub_models import pinned_models
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.parallel.interfaces import Link, require_reachable
from raycache.parallel.placement import (
    Need,
    Node,
    chosen,
    describe,
    has_room,
    missing,
    need_of,
    plan,
    refuse_impossible,
    split_groups,
    without,
)

_ASK_S = 60.0
"""For nodes to reply; Ray starts a process on each."""


def examine_cluster(config: Config) -> Iterator[CheckResult]:
    """Connect to the configured cluster and check it, without changing it.

    Args:
        config: with pinned Hub models.
    """
    if config.address.startswith(("http://", "https://")):
        yield CheckResult(
            "cluster", Outcome.WARNING, "remote clusters are not checked; run `raycache doctor` on the head"
        )
        return
    try:
        keep_job_variables()
        cluster = connect(config, variables=hub_variables() if pinned_models(config) else {})
    except ConfigError as error:
        yield CheckResult("cluster", Outcome.FAILED, str(error))
        return
    try:
        yield CheckResult("cluster", Outcome.OK, f"at {cluster.address}")
        yield from examine_nodes(config, device=device_type(config))
    finally:
        disconnect(cluster.temp_dir)


def examine_nodes(config: Config, *, device: str) -> Iterator[CheckResult]:
    """Check the nodes of the cluster that this process is connected to.

    Args:
        device: "cpu" or "cuda".
    """
    nodes = cluster_nodes()
    need = need_of(config.split, replicas=config.replicas, device=device, nodes=nodes)
    placing, ranks = _place(config, need, nodes)
    said = survey(config, nodes, timeout_s=_ASK_S)
    used = {node.node_id: those for node, those in ranks}
    for node in sorted(nodes, key=lambda one: (one.address, one.node_id)):
        yield _node(node, said[node.node_id], ranks=used.get(node.node_id, ""), config=config)
    yield from placing
    links = {f"node {node.address}": one.link for node, _ in ranks if isinstance(one := said[node.node_id], Survey)}
    if len(used) > 1:
        yield attempt("network", lambda: _network(links))


def _place(config: Config, need: Need, nodes: Sequence[Node]) -> tuple[list[CheckResult], list[tuple[Node, str]]]:
    """Plan the placement; returns the results, and the used nodes with their ranks."""
    name, results, used = "placement", [], list[tuple[Node, str]]()
    left = list(nodes)
    for number in range(config.replicas):
        of = f"replica {number}: " if config.replicas > 1 else ""
        try:
            if config.placement == "auto":
                refuse_impossible(need, nodes)
                ranks = plan(need, left)
            else:
                ranks = chosen(config.placement, need=need, nodes=left)
                results += [CheckResult(name, Outcome.WARNING, line) for line in split_groups(need.split, ranks)]
        except ConfigError as error:
            results.append(_impossible(name, error, config))
            return results, used
        if ranks is None or not has_room(need, ranks):
            lacks = missing(need, left, ranks=ranks or ())
            text = f"{of}not enough free resources: {lacks}; launch would wait up to {config.start_timeout_s:.0f} s"
            results.append(CheckResult(name, Outcome.WARNING, text))
            return results, used
        layout = describe(ranks)
        text = "; ".join(f"ranks {those} on {node.address}" for node, those in layout)
        results.append(CheckResult(name, Outcome.OK, of + text))
        used += [(node, of + those) for node, those in layout]
        left = without(left, need, ranks)
    return results, used


def _impossible(name: str, error: ConfigError, config: Config) -> CheckResult:
    if config.placement != "auto":
        return CheckResult(name, Outcome.FAILED, str(error))
    text = f"{error}; launch would wait up to {config.start_timeout_s:.0f} s for nodes to join"
    return CheckResult(name, Outcome.WARNING, text)


def _node(node: Node, said: Survey | str, *, ranks: str, config: Config) -> CheckResult:
    """Result for one node; FAILED if ranks are placed there but could not start."""
    has = f"{node.hostname}, {node.cpus:g} CPU ({node.free_cpus:g} free), {node.gpus:g} GPU ({node.free_gpus:g} free)"
    hints, copied, failures = ["draining"] if node.is_draining else [], list[str](), []
    if isinstance(said, str):
        failures.append(said)
    else:
        has += f", {human_bytes(said.memory_bytes)} of memory free, address {said.link.host}"
        has += f" ({said.link.interface})" if said.link.interface else ""
        has += f", {human_bytes(said.shared_bytes)} free for a host tier" if config.has_host_tier else ""
        hints += _other_versions(said)
        copied = [say(copy) for copy in said.copies]
        failures += [f"{copy.model.repo} does not fit on its disk" for copy in said.copies if not copy.fits]
        failures += [f"{path} is missing; every node needs it at the same path" for path in said.missing]
    outcome = Outcome.WARNING if hints or failures else Outcome.OK
    text = "; ".join([has, *([f"ranks {ranks}"] if ranks else []), *copied, *hints, *failures])
    return CheckResult(f"node {node.address}", Outcome.FAILED if ranks and failures else outcome, text)


def _other_versions(said: Survey) -> list[str]:
    here = (__version__, platform.python_version())
    if said.versions == here:
        return []
    theirs, ours = (f"raycache {found[0]} with Python {found[1]}" for found in (said.versions, here))
    return [f"has {theirs}, but this machine has {ours}; install the same versions"]


def _network(links: Mapping[str, Link]) -> str:
    require_reachable(links)
    return ", ".join(sorted({one.host for one in links.values()}))
