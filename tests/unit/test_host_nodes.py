"""The host tiers of several nodes as one: what all have is there, and what one has lost is gone."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycache.cache.keys import DIGEST_BYTES
from raycache.cache.storage_commands import (
    CommandKind,
    Fetch,
    Found,
    Outcome,
    StorageCommand,
    StorageResult,
    StoredUnit,
    StoredUnits,
)
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.errors import ConfigError, RankLostError
from raycache.host.directory import Lease
from raycache.host.nodes import are_all_gone, open_all, work_on_all
from raycache.host.service import HostService, Opened, open_arena
from raycache.parallel.sharding import Split
from raycache.storage.file import FileStorage
from tests.oracle.spread import host_services
from tests.oracle.tiny import make_tiny
from tests.unit.stored import MIB
from tests.unit.test_storage_worker import CHAIN, PAGE, UNITS, Node

UNIT = StoredUnit("full", 0, CHAIN[0])

Work = Callable[[StorageCommand], StorageResult]


def order(kind: CommandKind, *, units: Sequence[StoredUnit] = (), digests: Sequence[bytes] = ()) -> StorageCommand:
    return StorageCommand(kind, 7, "somebody", units=StoredUnits.of(units), digests=b"".join(digests))


def done(asked: StorageCommand, **more: object) -> StorageResult:
    return replace(StorageResult(asked.number, asked.kind, asked.owner, Outcome.DONE), **more)  # type: ignore[arg-type]


# --- answers of several are one answer --------------------------------------------------------------------------------


def finder(num_pages: int, points: set[int], is_foreign: bool = False) -> Work:
    """A node that has so many pages of every prefix, and can continue from some lengths."""

    def work(asked: StorageCommand) -> StorageResult:
        num_asked = len(asked.digests) // DIGEST_BYTES
        limit = min(num_pages, num_asked)
        point = max((length for length in points if length <= limit), default=0)
        return done(asked, found=Found(limit, point, is_foreign and limit < num_asked))

    return work


@given(
    st.lists(st.tuples(st.integers(0, UNITS), st.sets(st.integers(1, UNITS)), st.booleans()), min_size=1, max_size=4),
    st.integers(1, UNITS),
)
def test_what_is_found_is_what_all_nodes_have(nodes: list[tuple[int, set[int], bool]], num_digests: int) -> None:
    # The slow way: try every length on every node.
    pages = [length for length in range(num_digests + 1) if all(length <= has for has, _, _ in nodes)]
    points = [length for length in pages if all(length in there for _, there, _ in nodes)]
    next_is_foreign = any(has == max(pages) and foreign for has, _, foreign in nodes) and max(pages) < num_digests
    found = work_on_all([finder(*node) for node in nodes])(order(CommandKind.FIND, digests=CHAIN[:num_digests]))
    assert found.found == Found(max(pages), max(points, default=0), next_is_foreign)


def test_a_prefix_is_not_searched_for_longer_than_its_deadline() -> None:
    rounds = []

    def slow(asked: StorageCommand) -> StorageResult:
        rounds.append(asked)
        time.sleep(0.05)
        return finder(UNITS, {length for length in range(1, UNITS + 1) if length % 2})(asked)

    even = finder(UNITS, {length for length in range(1, UNITS + 1) if length % 2 == 0})
    asked = replace(order(CommandKind.FIND, digests=CHAIN), deadline_s=time.monotonic() + 0.12)
    assert work_on_all([slow, even])(asked).found == Found(UNITS, 0)
    assert len(rounds) < 6, "it takes 24 rounds to find out that they have nothing in common"


@given(st.lists(st.lists(st.sampled_from(list(Fetch)), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_unit_is_fetched_when_all_nodes_have_fetched_it(nodes: list[list[Fetch]]) -> None:
    works = [lambda asked, node=node: done(asked, fetches=tuple(node), num_bytes=3) for node in nodes]
    answer = work_on_all(works)(order(CommandKind.FETCH, units=[UNIT] * 5))
    assert answer.num_bytes == 3 * len(nodes)
    for unit, fetch in enumerate(answer.fetches):
        each = {node[unit] for node in nodes}
        assert fetch in each
        assert (fetch is Fetch.HIT) == (each == {Fetch.HIT})
        assert (fetch is Fetch.UNAVAILABLE) == (Fetch.UNAVAILABLE in each)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_unit_is_stored_when_all_nodes_have_stored_it(nodes: list[list[bool]]) -> None:
    works = [lambda asked, node=node: done(asked, stored=bytes(node), seconds=len(node)) for node in nodes]
    answer = work_on_all(works)(order(CommandKind.PERSIST, units=[UNIT] * 5))
    assert answer.stored == bytes(all(node[unit] for node in nodes) for unit in range(5))


def away(asked: StorageCommand) -> StorageResult:
    raise OSError("nobody is there")


def test_with_one_owner_away_nothing_can_be_asked() -> None:
    with pytest.raises(OSError, match="nobody is there"):
        work_on_all([finder(3, set()), away])(order(CommandKind.FIND, digests=CHAIN))


def test_an_order_that_one_node_refuses_is_refused() -> None:
    def refuse(asked: StorageCommand) -> StorageResult:
        return asked.not_done(Outcome.CANCELLED, "of epoch 1, now is 2")

    def fetch(asked: StorageCommand) -> StorageResult:
        return done(asked, fetches=(Fetch.HIT,))

    asked = order(CommandKind.FETCH, units=[UNIT])
    assert work_on_all([fetch, refuse])(asked) == asked.not_done(Outcome.CANCELLED, "of epoch 1, now is 2")


def test_nodes_are_asked_at_the_same_time() -> None:
    all_are_here = threading.Barrier(4, timeout=30)

    def together(asked: StorageCommand) -> StorageResult:
        all_are_here.wait()
        return done(asked, stored=bytes([True]), seconds=0.3)

    assert work_on_all([together] * 4)(order(CommandKind.PERSIST, units=[UNIT])).seconds == 0.3


def test_a_deadline_travels_as_the_time_that_is_left() -> None:
    asked = replace(order(CommandKind.FIND), deadline_s=time.monotonic() + 60)
    assert 59 < asked.sent().deadline_s <= 60
    assert asked.sent().received().deadline_s == pytest.approx(asked.deadline_s, abs=1)
    assert order(CommandKind.FIND).sent().received().deadline_s == math.inf


# --- storage ----------------------------------------------------------------------------------------------------------

SPREADS = [
    (Split(tp=2, cp=2), (0, 0, 1, 1)),
    (Split(tp=4), (0, 1, 1, 0)),
    (Split(pp=4), (0, 1, 1, 2)),
    (Split(tp=2, pp=2), (0, 1, 2, 3)),
]


def nodes_of(tmp_path: Path, storages: Mapping[int, FileStorage], spread: tuple[Split, tuple[int, ...]]) -> list[Node]:
    split, nodes = spread
    return [Node(tmp_path, storages[at], split, nodes=nodes, node=at) for at in range(max(nodes) + 1)]


@pytest.fixture
def storages(tmp_path: Path) -> Iterator[dict[int, FileStorage]]:
    """One for each node."""
    made = {node: FileStorage(tmp_path / f"storage {node}", max_bytes=64 * MIB) for node in range(4)}
    yield made
    for storage in made.values():
        storage.close()


@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_nodes_with_storages_of_their_own_find_again_what_they_stored(
    tmp_path: Path, storages: dict[int, FileStorage], spread: tuple[Split, tuple[int, ...]]
) -> None:
    writers = nodes_of(tmp_path, storages, spread)
    units = [unit for number in range(3) for unit in writers[0].units(number)]
    for node in writers:
        for unit in units:
            node.fill(unit)
    assert all(work_on_all([node.worker.work for node in writers])(order(CommandKind.PERSIST, units=units)).stored)
    readers = nodes_of(tmp_path, storages, spread)
    work = work_on_all([node.worker.work for node in readers])
    assert work(order(CommandKind.FIND, digests=CHAIN)).found == Found(3, 3)
    answer = work(order(CommandKind.FETCH, units=units))
    assert set(answer.fetches) == {Fetch.HIT}
    assert answer.num_bytes == sum(node.layout.unit_bytes(unit.space) for node in readers for unit in units)
    assert all(node.holds(unit) for node in readers for unit in units)
    # One node loses all that it has stored: for all of them it is gone.
    storages[max(spread[1])].clear()
    work = work_on_all([node.worker.work for node in nodes_of(tmp_path, storages, spread)])
    assert work(order(CommandKind.FIND, digests=CHAIN)).found == Found(0, 0)
    last = readers[-1].layout
    has_lost = [any(last.pieces(rank, unit.space) for rank in last.ranks) for unit in units]
    fetches = work(order(CommandKind.FETCH, units=units)).fetches
    assert [fetch is Fetch.HIT for fetch in fetches] == [not lost for lost in has_lost]


@pytest.mark.parametrize("written", SPREADS, ids=str)
def test_what_nodes_store_in_one_place_any_other_split_and_spread_reads(
    tmp_path: Path, storages: dict[int, FileStorage], written: tuple[Split, tuple[int, ...]]
) -> None:
    shared = dict.fromkeys(range(4), storages[0])
    for node in nodes_of(tmp_path, shared, written):
        node.write([unit for number in range(2) for unit in node.units(number)])
    for spread in [*SPREADS, (Split(), (0,))]:
        readers = nodes_of(tmp_path, shared, spread)
        work = work_on_all([node.worker.work for node in readers])
        assert work(order(CommandKind.FIND, digests=CHAIN)).found == Found(2, 2, False), spread
        units = [unit for number in range(2) for unit in readers[0].units(number)]
        assert set(work(order(CommandKind.FETCH, units=units)).fetches) == {Fetch.HIT}
        assert all(node.holds(unit) for node in readers for unit in units)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lost=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(["full", "window", "state"]))))
def test_what_one_node_lacks_is_not_found(tmp_path: Path, lost: set[tuple[int, int, str]]) -> None:
    spread = (Split(pp=3), (0, 1, 2))
    made = [FileStorage(tmp_path / f"part {node}", max_bytes=64 * MIB) for node in range(3)]
    try:
        nodes = nodes_of(tmp_path, dict(enumerate(made)), spread)
        for at, node in enumerate(nodes):
            made[at].clear()
            units = [unit for number in range(5) for unit in node.units(number)]
            node.write([unit for unit in units if (at, CHAIN.index(unit.digest), unit.space) not in lost])
        work = work_on_all([node.worker.work for node in nodes])
        found = work(order(CommandKind.FIND, digests=CHAIN[:5])).found
        # Only what a node has rows of can be lost there.
        gone = {(page, space) for at, page, space in lost if nodes[at].layout.pieces(at, space)}
        units = [unit for number in range(5) for unit in nodes[0].units(number)]
        fetches = work(order(CommandKind.FETCH, units=units)).fetches
        hits = {(CHAIN.index(u.digest), u.space) for u, f in zip(units, fetches, strict=True) if f is Fetch.HIT}
        assert hits == {(page, space) for page in range(5) for space in ("full", "window", "state")} - gone
        needed = {length: continued_from(length) for length in range(1, 6)}
        have = [length for length, parts in needed.items() if parts <= hits]
        if all((page, "full") in hits for page in range(found.num_pages)):  # else a later page vouches for a lost one
            assert found.point_pages == max((length for length in have if length <= found.num_pages), default=0)
    finally:
        for storage in made:
            storage.close()


def continued_from(length: int) -> set[tuple[int, str]]:
    """What a model with a window of two pages and a token, and a state, needs at the end of so many pages."""
    window = {(page, "window") for page in range(max(0, length * PAGE - 2 * PAGE) // PAGE, length)}
    return {(page, "full") for page in range(length)} | window | {(length - 1, "state")}


# --- opening ----------------------------------------------------------------------------------------------------------

NODES = (0, 0, 1, 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    model = make_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    config = Config(model=str(model), device="cpu", page_size=8, tp=2, cp=2, host_memory="2MiB")
    return deploy(config, device_type="cpu")


def opened_by(owners: Sequence[HostService], served: Deployment, *, epoch: int = 1, **settings: object) -> list[Opened]:
    deployment = replace(served, config=replace(served.config, **settings))  # type: ignore[arg-type]
    return open_all(owners, deployment, epoch=epoch, nodes=NODES)


class Poor(HostService):
    """On a node that has less memory than others."""

    def budget(self, host_memory: str) -> int:
        return super().budget(host_memory) // 4


def test_every_node_has_the_slabs_of_its_ranks_and_the_first_one_the_catalog(
    served: Deployment,
) -> None:
    with host_services(2) as owners:
        opened = opened_by(owners, served)
        assert all(each.is_fresh for each in opened)
        arenas = [open_arena(each.path) for each in opened]
        assert arenas[0].sizes == arenas[1].sizes
        assert [arena.layout.ranks for arena in arenas] == [(0, 1), (2, 3)]
        assert len(arenas[0].catalog) > 0 and len(arenas[1].catalog) == 0
        for each, arena in zip(opened, arenas, strict=True):
            assert each.path.stat().st_size <= 2 * MIB
            arena.slab(arena.layout.ranks[0], "full")[0] = 1
        # Another decider finds all of it.
        again = opened_by(owners, served, epoch=2, host_memory="1MiB")
        assert not any(each.is_fresh for each in again)
        assert [each.spec.sizes for each in again] == [each.spec.sizes for each in opened]
        assert all(open_arena(each.path).slab(2 * node, "full")[0].all() for node, each in enumerate(again))


def test_the_poorest_node_says_how_many_pages_there_are(served: Deployment) -> None:
    with host_services(2) as owners:
        rich = opened_by(owners, served)[0].spec.sizes["full"]
    with host_services(1) as owners, host_services(1) as others:
        directory = others[0].path.parent
        others[0].close()
        poor = Poor(directory)
        try:
            opened = opened_by([owners[0], poor], served)
            assert {each.spec.sizes["full"] for each in opened} == {opened[0].spec.sizes["full"]}
            assert 1 <= opened[0].spec.sizes["full"] <= rich // 3
        finally:
            poor.close()


def test_when_one_node_has_lost_its_pages_all_begin_anew(served: Deployment, tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    with host_services(2) as owners:
        opened = opened_by(owners, served)
        for owner in owners:
            owner.attach(f"file://{tmp_path}/late/{{node}}?size=8MiB")
            owner.resize(4 * MIB)
        open_arena(opened[0].path).slab(0, "full")[0] = 1
        owners[1].drop()
        again = opened_by(owners, served, epoch=2)
        assert all(each.is_fresh for each in again)
        assert not open_arena(again[0].path).slab(0, "full").any()
        # What an operator has attached since stays, on the node that came back, too.
        assert [owner.status()["name"] for owner in owners] == [f"file:{tmp_path}/late/{node}" for node in (0, 1)]
        assert [owner.status()["bytes_limit"] for owner in owners] == [4 * MIB, 4 * MIB]


def test_ranks_that_moved_to_other_nodes_begin_anew(served: Deployment) -> None:
    with host_services(2) as owners:
        opened_by(owners, served)
        moved = open_all(owners, served, epoch=2, nodes=(0, 1, 0, 1))
        assert all(each.is_fresh for each in moved)
        assert [open_arena(each.path).layout.ranks for each in moved] == [(0, 2), (1, 3)]


def test_one_node_that_cannot_give_the_memory_says_so(served: Deployment) -> None:
    with host_services(2) as owners:
        with pytest.raises(ConfigError, match="does not fit"):
            opened_by(owners, served, host_memory="900TiB")
        with pytest.raises(ConfigError, match="is too small for this model"):
            opened_by(owners, served, host_memory="70KiB")


def test_ranks_are_gone_when_they_are_gone_on_all_nodes(served: Deployment) -> None:
    with host_services(2) as owners:
        opened = opened_by(owners, served)
        lease = Lease(opened[1].path.parent, "ranks")
        assert not are_all_gone(owners, timeout_s=0.05)
        lease.close()
        assert are_all_gone(owners, timeout_s=5)
    assert are_all_gone([], timeout_s=0.05)


def test_nodes_that_share_a_directory_are_told_to_part(served: Deployment, tmp_path: Path) -> None:
    with host_services(2) as owners, pytest.raises(ConfigError, match="in use.*write {node} into the path"):
        opened_by(owners, served, epoch=0, storage=f"file://{tmp_path}/one?size=8MiB")


def test_a_storage_that_a_lost_owner_still_has_does_not_keep_a_later_engine_from_starting(
    served: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/{{node}}?size=8MiB"
    with host_services(2) as lost, host_services(2) as owners:
        opened_by(lost, served, epoch=0, storage=url)
        with pytest.raises(ConfigError, match="in use"):
            opened_by(owners, served, epoch=0, storage=url)
        opened = opened_by(owners, served, epoch=1_000_000, storage=url)
        assert all(each.is_fresh for each in opened) and "in use" in caplog.text
        assert [owner.status() for owner in owners] == [{}, {}], "without its storage"
        assert all(owner.status() for owner in lost), "who has it keeps it"


def test_ranks_that_do_not_end_are_a_reason_to_try_again(served: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycache.host.nodes._GONE_TIMEOUT_S", 0.05)
    with host_services(2) as owners:
        opened = opened_by(owners, served)
        owners[1].drop()  # so all begin anew
        lease = Lease(opened[0].path.parent, "ranks")
        with pytest.raises(RankLostError, match="still use the host tier"):
            opened_by(owners, served, epoch=2)
        lease.close()
