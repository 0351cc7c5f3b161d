"""Where ranks go, against search by brute force."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.config import Config
from raycache.errors import ConfigError
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
from raycache.parallel.rank_map import brief_ranks, parse_rank_map
from raycache.parallel.sharding import Split


def gpu_node(number: int, gpus: int, *, free: int | None = None, **labels: str) -> Node:
    left = gpus if free is None else free
    marks = {f"ray.io/{name.replace('_', '-')}": value for name, value in labels.items()}
    return Node(f"id{number:02}", f"10.0.0.{number}", f"host{number}", 64, 64, gpus, left, marks)


def cpu_node(number: int, cpus: float, *, free: float | None = None) -> Node:
    return Node(f"id{number:02}", f"10.0.0.{number}", f"host{number}", cpus, cpus if free is None else free)


def gpus_of(tp: int, cp: int, pp: int) -> Need:
    return Need(Split(tp=tp, cp=cp, pp=pp), num_cpus=1, num_gpus=1)


def where(need: Need, nodes: list[Node]) -> dict[str, str] | None:
    """Ranks per node's last number."""
    ranks = plan(need, nodes)
    return None if ranks is None else {node.address.rpartition(".")[2]: its for node, its in describe(ranks)}


def fewest(nodes: list[Node], *, unit: int, wanted: int) -> int | None:
    """Least nodes that hold so many units of so many GPUs, by trying all sets."""
    for size in range(1, len(nodes) + 1):
        if any(sum(int(node.free_gpus) // unit for node in some) >= wanted for some in combinations(nodes, size)):
            return size
    return None


clusters = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(
    lambda gpus: [gpu_node(number, 9, free=free) for number, free in enumerate(gpus)]
)


@given(clusters, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.randoms())
def test_a_plan_has_whole_tp_groups_whole_stages_if_it_can_and_the_fewest_nodes(
    nodes: list[Node], tp: int, cp: int, pp: int, random: Any
) -> None:
    need = gpus_of(tp, cp, pp)
    ranks = plan(need, nodes)
    shuffled = random.sample(nodes, len(nodes))
    assert plan(need, shuffled) == ranks, "the order in which Ray names nodes says nothing"
    whole, any_way = fewest(nodes, unit=tp * cp, wanted=pp), fewest(nodes, unit=tp, wanted=cp * pp)
    if ranks is None:
        assert any_way is None
        return
    assert len({node.node_id for node in ranks}) == (any_way if whole is None else whole)
    for unit in [tp] if whole is None else [tp, tp * cp]:
        for first in range(0, len(ranks), unit):
            assert len({node.node_id for node in ranks[first : first + unit]}) == 1
    for node_id, count in Counter(node.node_id for node in ranks).items():
        assert count <= next(node.free_gpus for node in nodes if node.node_id == node_id)


def test_stages_stay_whole_rather_than_on_fewer_nodes() -> None:
    nodes = [gpu_node(1, 3), gpu_node(2, 3), gpu_node(3, 2)]
    assert where(gpus_of(1, 2, 3), nodes) == {"1": "0-1", "2": "2-3", "3": "4-5"}
    assert where(gpus_of(1, 2, 3), nodes[:2]) == {"1": "0-2", "2": "3-5"}


def test_the_last_node_is_the_smallest_that_suffices() -> None:
    assert where(gpus_of(4, 1, 1), [gpu_node(1, 8), gpu_node(2, 4), gpu_node(3, 2)]) == {"2": "0-3"}
    assert where(gpus_of(4, 1, 3), [gpu_node(1, 8), gpu_node(2, 4), gpu_node(3, 8)]) == {"1": "0-7", "2": "8-11"}


def test_a_node_that_is_about_to_leave_is_left_out() -> None:
    leaving = Node("id09", "10.0.0.9", "host9", 64, 64, 8, 8, is_draining=True)
    assert where(gpus_of(2, 1, 1), [leaving, gpu_node(1, 2)]) == {"1": "0-1"}
    assert plan(gpus_of(2, 1, 1), [leaving]) is None


def test_nodes_of_one_nvlink_domain_go_before_fewer_nodes_and_those_of_one_kind_before_mixed_ones() -> None:
    racks = [gpu_node(n, 4, gpu_domain=rack) for n, rack in enumerate("aabb")]
    assert where(gpus_of(4, 2, 1), [gpu_node(8, 8), *racks]) == {"0": "0-3", "1": "4-7"}
    assert where(gpus_of(4, 3, 1), racks) == {"0": "0-3", "1": "4-7", "2": "8-11"}, "no domain holds it"
    kinds = [gpu_node(n, 4, accelerator_type=kind) for n, kind in enumerate(["H100", "A100", "H100"])]
    assert where(gpus_of(4, 1, 2), kinds) == {"0": "0-3", "2": "4-7"}
    zones = [gpu_node(n, 4, availability_zone=zone) for n, zone in enumerate("xyy")]
    assert where(gpus_of(4, 1, 2), zones) == {"1": "0-3", "2": "4-7"}


def cpus_of(nodes: list[Node], **settings: Any) -> Need:
    config = Config(device="cpu", **settings)
    return need_of(config.split, replicas=config.replicas, device="cpu", nodes=nodes)


def test_ranks_on_cpu_get_a_core_each_before_they_share() -> None:
    nodes = [cpu_node(1, 4), cpu_node(2, 4), cpu_node(3, 2)]
    assert where(cpus_of(nodes, tp=2, cp=2), nodes) == {"1": "0-3"}
    assert where(cpus_of(nodes, tp=2, cp=2, pp=2), nodes) == {"1": "0-3", "2": "4-7"}
    small = [cpu_node(n, 1) for n in range(4)]
    assert where(cpus_of(small, tp=2, cp=2, pp=2), small) == {"0": "0-1", "1": "2-3", "2": "4-5", "3": "6-7"}
    assert where(cpus_of([cpu_node(1, 2)], tp=8, cp=4), [cpu_node(1, 2)]) == {"1": "0-31"}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))
def test_on_cpu_one_gang_more_than_the_replicas_has_room(cpus: list[int], tp: int, cp: int, replicas: int) -> None:
    nodes = [cpu_node(n, count) for n, count in enumerate(cpus)]
    need = cpus_of(nodes, tp=tp, cp=cp, replicas=replicas)
    for _ in range(replicas + 1):
        ranks = plan(need, nodes)
        assert ranks is not None
        nodes = without(nodes, need, ranks)
    assert all(node.free_cpus >= -1e-9 for node in nodes)


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 6, 8]), st.integers(1, 6), st.integers(1, 5))
def test_ranks_fit_into_what_is_reserved_for_their_group_as_ray_counts(cpus: int, tp: int, cp: int, n: int) -> None:
    need = cpus_of([cpu_node(1, cpus)], tp=tp, cp=cp, page_size=cp * 16, replicas=n)
    assert need.num_cpus == round(need.num_cpus, 4) > 0, "whole ten-thousandths"
    assert need.num_cpus <= need.bundle(1)["CPU"]
    assert round(need.num_cpus * 10_000) * tp <= round(need.bundle(tp)["CPU"] * 10_000)


def test_replicas_go_to_different_nodes_of_one_size() -> None:
    nodes = [cpu_node(1, 8), cpu_node(2, 8)]
    need = cpus_of(nodes, tp=4, replicas=2)
    assert where(need, nodes) == {"1": "0-3"}
    assert where(need, without(nodes, need, plan(need, nodes) or ())) == {"2": "0-3"}


@pytest.mark.parametrize(
    ("split", "nodes", "said"),
    [
        ({"tp": 4, "cp": 2}, [gpu_node(1, 4)], "needs 8 GPUs, the cluster has 4; use a smaller split"),
        ({"tp": 1}, [cpu_node(1, 4)], "needs 1 GPUs, the cluster has 0; use --device cpu"),
        (
            {"tp": 4},
            [gpu_node(1, 2), gpu_node(2, 2)],
            "the largest has 2 GPUs; use a smaller tp, or say with placement=",
        ),
        ({"tp": 2, "cp": 2}, [gpu_node(1, 3), gpu_node(2, 1)], "room for 1 of these groups.*10.0.0.1 has 3 GPU"),
    ],
)
def test_what_can_never_be_is_refused_with_what_there_is(split: dict[str, int], nodes: list[Node], said: str) -> None:
    need = need_of(Split(**split), replicas=1, device="cuda", nodes=nodes)
    with pytest.raises(ConfigError, match=said):
        refuse_impossible(need, nodes)
    assert plan(need, nodes) is None


def test_what_is_missing_is_told_per_node() -> None:
    nodes = [gpu_node(1, 4, free=1), gpu_node(2, 4, free=2)]
    text = missing(gpus_of(2, 2, 1), nodes)
    assert text.startswith("needs 2 x 2 ranks (2 CPU, 2 GPU), there is room for 1: 10.0.0.2 has 4 GPU (2 free)")
    assert "10.0.0.1 has 4 GPU (1 free)" in text
    assert "and 12 more" in missing(gpus_of(2, 1, 1), [gpu_node(n, 1) for n in range(20)])


# --- maps that people write

PAIR = [gpu_node(1, 4), gpu_node(2, 4)]


def test_a_map_names_nodes_by_address_host_name_or_id() -> None:
    for second in ("10.0.0.2", "host2", "id02"):
        ranks = chosen(f"0-1@10.0.0.1; 2,3@{second}", need=gpus_of(2, 2, 1), nodes=PAIR)
        assert [node.address for node in ranks] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-1@10.0.0.1", "says nothing of ranks 2-3"),
        ("0-2@10.0.0.1", "says nothing of rank 3"),
        ("0-3@a;3@b", "rank 3 is named twice"),
        ("0-4@a", "there is no rank 4, the split has 4"),
        ("0-3", "'0-3' is not RANKS@NODE"),
        ("0-3@", "is not RANKS@NODE"),
        ("3-0@a", "'3-0' is neither a rank nor a run"),
        ("x@a", "'x' is neither"),
        ("0-99999999999@a", "more ranks than a split can have"),
        ("packed", "write auto, or a map such as"),
    ],
)
def test_a_map_that_is_none_is_refused_with_the_settings(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config(tp=2, cp=2, placement=text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-3@10.0.0.3", "there is no node '10.0.0.3' in the cluster; there are 10.0.0.1 (host1, id01)"),
        ("0-3@twin", "2 nodes are called 'twin'; use the id of one: 10.0.0.7"),
        ("0-3@10.0.0.9", "puts 4 ranks on 10.0.0.9, they need 4 CPU, 4 GPU, and it has 64 CPU, 1 GPU"),
    ],
)
def test_a_map_that_does_not_suit_the_cluster_is_refused_with_what_there_is(text: str, said: str) -> None:
    twins = [Node(f"id{n}", f"10.0.0.{n}", "twin", 64, 64, 4, 4) for n in (7, 8)]
    with pytest.raises(ConfigError) as refusal:
        chosen(text, need=gpus_of(2, 2, 1), nodes=[*PAIR, gpu_node(9, 1), *twins])
    assert said in str(refusal.value)


def test_a_map_waits_for_its_own_nodes_only() -> None:
    need = gpus_of(2, 2, 1)
    busy = [gpu_node(1, 4, free=1), gpu_node(2, 4)]
    ranks = chosen("0-1@10.0.0.1;2-3@10.0.0.2", need=need, nodes=busy)
    assert not has_room(need, ranks)
    assert missing(need, busy, ranks=ranks) == "10.0.0.1 needs 2 CPU, 2 GPU for 2 ranks, free are 64 CPU, 1 GPU"
    assert has_room(need, chosen("0-1@10.0.0.2;2-3@10.0.0.2", need=need, nodes=busy))


def test_a_tp_group_over_two_nodes_is_warned_of() -> None:
    one, two = PAIR
    assert split_groups(Split(tp=2, cp=2), [one, one, two, two]) == []
    (line,) = split_groups(Split(tp=2, cp=2), [one, one, two, one])
    assert "the tp group of ranks 2-3 is on 2 nodes (10.0.0.2, 10.0.0.1)" in line


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_they_are_read(ranks: set[int]) -> None:
    others = set(range(max(ranks) + 1)) - ranks
    text = f"{brief_ranks(sorted(ranks))}@a" + (f";{brief_ranks(sorted(others))}@b" if others else "")
    names = parse_rank_map(text, world_size=max(ranks) + 1)
    assert {rank for rank, name in enumerate(names) if name == "a"} == ranks
