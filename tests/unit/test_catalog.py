"""The record of the host tier: what comes back is what was recorded, whatever happened in between."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from array import array
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycache.cache.catalog import Branch, Catalog, slots_hold
from raycache.cache.keys import tag_of
from raycache.cache.node import RestorePoint
from raycache.cache.tree import NOTHING, RadixTree
from raycache.memory.arena import Arena
from raycache.memory.component import CacheFormat, kv, recurrent
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.sharding import Split

PAGE = 4
SIZES = {"full": 40, "window": 9, "state": 6}
WIDTHS = {"window": 3, "state": 1}
NUM_BYTES = Catalog.num_bytes(sizes=SIZES, page_size=PAGE, part_widths=WIDTHS)


def catalog_in(memory: memoryview) -> Catalog:
    return Catalog(memory, sizes=SIZES, page_size=PAGE, part_widths=WIDTHS)


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def page_ids(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, np.intp)


class Host:
    """A host tier that keeps its own account of what it has recorded: page -> (seed, tokens from the first on)."""

    def __init__(self, memory: memoryview) -> None:
        self.catalog = catalog_in(memory)
        self.pages: dict[int, tuple[bytes, bytes]] = {}
        self.parents: dict[int, int] = {}
        self.points: dict[int, dict[str, tuple[int, ...]]] = {}

    def add(self, rng: random.Random, count: int) -> None:
        """Record pages behind any page, or behind none."""
        free = sorted(set(range(SIZES["full"])) - set(self.pages))
        ids = rng.sample(free, min(count, len(free)))
        if not ids:
            return
        parent = rng.choice([-1, *self.pages])
        seed, before = self.pages.get(parent, (rng.choice([b"a" * 32, b"\0" * 32]), b""))
        tokens = packed([rng.randrange(1 << 30) for _ in range(len(ids) * PAGE)])
        digests, digest = b"", self.catalog.digests(page_ids([parent])) if before else seed
        for number, page in enumerate(ids):
            digest = sha256(digest + tokens[4 * PAGE * number : 4 * PAGE * (number + 1)]).digest()
            digests += digest
            self.pages[page] = seed, before + tokens[: 4 * PAGE * (number + 1)]
            self.parents[page] = ids[number - 1] if number else parent
        self.catalog.add_pages(page_ids(ids), digests=digests, tokens=tokens, parent=parent, seed=seed)
        assert self.catalog.digests(page_ids(ids)) == digests

    def drop(self, rng: random.Random) -> None:
        """Forget a page and all behind it."""
        gone = {rng.choice([*self.pages])} if self.pages else set()
        while more := {page for page, parent in self.parents.items() if parent in gone} - gone:
            gone |= more
        self.catalog.drop_pages(page_ids(sorted(gone)))
        for page in gone:
            del self.pages[page], self.parents[page]
            self.points.pop(page, None)

    def keep(self, rng: random.Random) -> None:
        """Record a restore point, with window pages that others may have and a state slot that no other has."""
        states = set(range(SIZES["state"])) - {unit for parts in self.points.values() for unit in parts["state"]}
        pages = set(self.pages) - set(self.points)
        if states and pages:
            page = rng.choice(sorted(pages))
            count = min(len(self.pages[page][1]) // (4 * PAGE), rng.randint(0, WIDTHS["window"]))
            window = tuple(rng.sample(range(SIZES["window"]), count))
            self.points[page] = {"window": window, "state": (rng.choice(sorted(states)),)}
            self.catalog.add_point(page, self.points[page])

    def lose(self, rng: random.Random) -> None:
        """Forget a restore point."""
        if self.points:
            page = rng.choice(sorted(self.points))
            del self.points[page]
            self.catalog.drop_point(page)

    def step(self, rng: random.Random) -> None:
        match rng.randrange(6):
            case 0 | 1 | 2:
                self.add(rng, rng.randint(1, 6))
            case 3:
                self.keep(rng)
            case 4:
                self.lose(rng)
            case _:
                self.drop(rng)


def pages_of(branches: list[Branch]) -> dict[int, tuple[bytes, bytes]]:
    return {
        int(page): (branch.seed, branch.tokens[: 4 * PAGE * (number + 1)])
        for branch in branches
        for number, page in enumerate(branch.pages)
    }


def points_of(branches: list[Branch]) -> dict[int, dict[str, tuple[int, ...]]]:
    points = [(int(branch.pages[length - 1]), dict(parts)) for branch in branches for length, parts in branch.points]
    assert len(dict(points)) == len(points), "a restore point is given twice"
    return dict(points)


@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 40))
def test_what_was_recorded_comes_back(seed: int, num_steps: int) -> None:
    memory, rng = memoryview(bytearray(NUM_BYTES)), random.Random(seed)
    host = Host(memory)
    for _ in range(num_steps):
        host.step(rng)
    branches = catalog_in(memory).recover()
    assert pages_of(branches) == host.pages
    assert points_of(branches) == host.points
    leaves = set(host.pages) - set(host.parents.values())
    assert sorted(int(branch.pages[-1]) for branch in branches) == sorted(leaves)
    assert pages_of(catalog_in(memory).recover()) == host.pages  # looking changes nothing


@given(seed=st.integers(0, 2**32))
def test_branches_put_into_a_tree_in_turn_give_all_of_it(seed: int) -> None:
    memory, rng = memoryview(bytearray(NUM_BYTES)), random.Random(seed)
    host = Host(memory)
    for _ in range(20):
        host.step(rng)
    tree = RadixTree(PAGE, point_spaces=tuple(WIDTHS))
    for branch in catalog_in(memory).recover():
        handle = tree.match(NOTHING, now=0, root=branch.seed)
        for length, parts in [*branch.points, (len(branch.pages), None)]:
            tree.extend(handle, branch.tokens, branch.pages[handle.length // PAGE : length], now=0)
            assert parts is None or tree.keep(handle, RestorePoint(length * PAGE, parts))
        handle.release()
    tree.check()
    assert sorted(tree.trie.pages().tolist()) == sorted(host.pages)
    assert tree.num_points == len(host.points)


@given(seed=st.integers(0, 2**32), flips=st.lists(st.tuples(st.integers(0, NUM_BYTES - 1), st.integers(1, 255))))
@settings(max_examples=200)
def test_damage_costs_pages_and_never_gives_wrong_ones(seed: int, flips: list[tuple[int, int]]) -> None:
    data, rng = bytearray(NUM_BYTES), random.Random(seed)
    host = Host(memoryview(data))
    for _ in range(15):
        host.step(rng)
    for at, mask in flips:
        data[at] ^= mask
    branches = catalog_in(memoryview(data)).recover()
    assert pages_of(branches).items() <= host.pages.items()
    states = [unit for parts in points_of(branches).values() for unit in parts["state"]]
    assert len(set(states)) == len(states)
    for parts in points_of(branches).values():
        assert all(0 <= unit < SIZES[space] for space, units in parts.items() for unit in units)
    assert pages_of(catalog_in(memoryview(data)).recover()) == pages_of(branches)


def test_records_that_hang_at_nothing_are_gone_for_good() -> None:
    memory = memoryview(bytearray(NUM_BYTES))
    host, rng = Host(memory), random.Random(0)
    host.add(rng, 4)
    first, second, *_ = host.pages
    host.catalog.drop_pages(page_ids([second]))
    assert list(pages_of(catalog_in(memory).recover())) == [first]
    seed, tokens = host.pages[second]
    digest = sha256(host.catalog.digests(page_ids([first])) + tokens[-4 * PAGE :]).digest()
    host.catalog.add_pages(page_ids([second]), digests=digest, tokens=tokens[-4 * PAGE :], parent=first, seed=seed)
    assert list(pages_of(catalog_in(memory).recover())) == [first, second]


def test_a_page_that_is_there_twice_is_found_once() -> None:
    memory, tokens, seed = memoryview(bytearray(NUM_BYTES)), packed([1, 2, 3, 4]), b"s" * 32
    catalog = catalog_in(memory)
    for page in (7, 5):
        catalog.add_pages(page_ids([page]), digests=sha256(seed + tokens).digest(), tokens=tokens, parent=-1, seed=seed)
    (branch,) = catalog.recover()
    assert (len(branch.pages), branch.tokens) == (1, tokens)
    assert len(catalog.recover()) == 1


def test_restore_points_that_cannot_be_are_dropped_and_their_pages_stay() -> None:
    memory = memoryview(bytearray(NUM_BYTES))
    host, rng = Host(memory), random.Random(1)
    host.add(rng, 5)
    a, b, c, d, _ = host.pages
    host.catalog.add_point(b, {"window": (1, 2), "state": (3,)})
    host.catalog.add_point(c, {"window": (2, 8), "state": (3,)})  # b's state
    host.catalog.add_point(d, {"window": (1, 9), "state": (4,)})  # there is no window page 9
    host.catalog.add_point(a, {"window": (1, 2), "state": (5,)})  # more window pages than pages
    branches = catalog_in(memory).recover()
    assert points_of(branches) == {b: {"window": (1, 2), "state": (3,)}}
    assert pages_of(branches) == host.pages
    host.catalog.drop_point(b)
    assert points_of(catalog_in(memory).recover()) == {}, "c's is gone for good"


def test_a_record_that_was_not_finished_is_not_there() -> None:
    memory, tokens, seed = memoryview(bytearray(NUM_BYTES)), packed([1, 2, 3, 4]), b"s" * 32
    catalog, page, digest = catalog_in(memory), page_ids([3]), sha256(seed + tokens).digest()
    catalog.add_pages(page, digests=digest, tokens=tokens, parent=-1, seed=seed)
    catalog.add_point(3, {"window": (1,), "state": (1,)})
    assert points_of(catalog.recover()) == {3: {"window": (1,), "state": (1,)}}
    with pytest.raises(ValueError, match="'x'"):
        catalog.add_point(3, {"window": (2,), "state": "x"})  # type: ignore[dict-item]
    assert points_of(catalog.recover()) == {}
    catalog.add_point(3, {"window": (1,), "state": (1,)})
    with pytest.raises(ValueError, match="buffer"):
        catalog.add_pages(page, digests=digest, tokens=tokens, parent=-1, seed=b"short")
    assert catalog.recover() == []
    catalog.add_pages(page, digests=digest, tokens=tokens, parent=-1, seed=seed)
    (branch,) = catalog.recover()
    assert branch.points == [], "a page that is recorded anew has no point"


def test_a_slot_whose_header_says_something_else_is_not_held(tmp_path: Path) -> None:
    fmt = CacheFormat("float32")
    components = [
        kv("kv", [0, 1], heads=2, dim=4, fmt=fmt),
        kv("window", [2], heads=2, dim=4, fmt=fmt, window=6),
        recurrent([3], heads=2, key_dim=2, value_dim=2, fmt=fmt),
    ]
    layout = EnvelopeLayout(components, num_layers=4, page_size=PAGE, split=Split(tp=2, pp=2, stages=(2, 2)))
    arena = Arena.create(tmp_path / "arena", layout, sizes=SIZES, catalog_bytes=NUM_BYTES, description=b"")
    host = Host(arena.catalog)
    host.add(random.Random(0), 5)
    a, b, c, d, e = pages = list(host.pages)
    points = {b: (a, [3, 4], 0), c: (b, [5, 6], 1), d: (c, [7, 8], 2)}  # page -> page before, window pages, state
    tags = {page: tag_of(host.catalog.digests(page_ids([page]))) for page in pages}
    for page, (before, window, state) in points.items():
        host.catalog.add_point(page, {"window": window, "state": [state]})
        for rank in range(4):
            arena.headers(rank, "window")[window, 0] = [tags[before], tags[page]]
            arena.headers(rank, "state")[state, 0] = tags[page]
    for rank in range(4):
        arena.headers(rank, "full")[pages, 0] = list(tags.values())
    holds = slots_hold(arena)
    assert set(points_of(host.catalog.recover(holds))) == {b, c, d}
    arena.headers(3, "state")[2, 0] = 0
    arena.headers(2, "window")[5, 0] += 1
    arena.headers(1, "full")[e, 0] = 1
    branches = host.catalog.recover(holds)
    assert set(pages_of(branches)) == {a, b, c, d}
    assert set(points_of(branches)) == {b}


CHILD = """
import mmap, random, struct, sys
from tests.unit.test_catalog import NUM_BYTES, Host
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), NUM_BYTES + 8)
host, rng = Host(memoryview(shared)[:NUM_BYTES]), random.Random(int(sys.argv[2]))
for number in range(1, 1 << 40):
    host.step(rng)
    struct.pack_into("<Q", shared, NUM_BYTES, number)
"""


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_moment_of_death_what_is_found_is_right(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(NUM_BYTES + 8))
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(seed)], cwd=root, env=os.environ) as child:
        while struct.unpack_from("<Q", path.read_bytes(), NUM_BYTES)[0] == 0:
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(random.Random(seed).random() / 20)
        child.send_signal(signal.SIGKILL)
    data = bytearray(path.read_bytes())
    (num_steps,) = struct.unpack_from("<Q", data, NUM_BYTES)
    twin, rng = Host(memoryview(bytearray(NUM_BYTES))), random.Random(seed)
    for _ in range(num_steps):
        twin.step(rng)
    before = dict(twin.pages), dict(twin.points)
    twin.step(rng)
    after = dict(twin.pages), dict(twin.points)
    branches = catalog_in(memoryview(data)[:NUM_BYTES]).recover()
    for found, was, will_be in zip((pages_of(branches), points_of(branches)), before, after, strict=True):
        assert found.items() <= (was | will_be).items()
        assert found.items() >= {name: was[name] for name in was if will_be.get(name) == was[name]}.items()
