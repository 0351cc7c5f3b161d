"""Units between host and storage: what one split has persisted, any other fetches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from raycache.cache.keys import Identity, PageChain, object_keys, row_format, tag_of
from raycache.cache.storage_commands import (
    CommandKind,
    Fetch,
    Found,
    Listed,
    Outcome,
    StorageCommand,
    StoredUnit,
    StoredUnits,
)
from raycache.host.nodes import work_on_all
from raycache.memory.arena import Arena
from raycache.memory.checksum import checksum_of
from raycache.memory.component import ITEMSIZE, CacheFormat, Component, Reuse, index_keys, kv, latent, recurrent
from raycache.memory.rows import EnvelopeLayout, groups
from raycache.parallel.sharding import Split
from raycache.storage.base import Storage
from raycache.storage.coverage import Coverage, groups_of
from raycache.storage.faulty import FaultRates, FaultyStorage
from raycache.storage.file import FileStorage
from raycache.storage.guard import Guarded
from raycache.storage.storage_worker import StorageWorker
from tests.oracle.staged import staged
from tests.unit.stored import MIB

PAGE, LAYERS, UNITS = 8, 9, 24
F32, BF16 = CacheFormat("float32"), CacheFormat("bfloat16")
FP8 = CacheFormat("bfloat16", has_fp8_latent=True)
MIXED = (
    kv("kv", [0, 3, 4, 8], heads=2, dim=4, fmt=BF16),
    latent([1, 5], rank=128, rope_dim=4, fmt=FP8),
    index_keys([1, 5], dim=3, fmt=F32),
    kv("window", [2, 6], heads=4, dim=2, fmt=BF16, window=2 * PAGE + 1),
    recurrent([3, 7], heads=4, key_dim=3, value_dim=2, fmt=BF16, conv=[("x", 8, 2), ("b", 2, 2)], conv_kernel=4),
)
DENSE = (kv("kv", list(range(LAYERS)), heads=2, dim=4, fmt=BF16),)
LATENT = MIXED[1:3]  # whose envelopes are two objects
SPLITS = [Split(tp, pp, cp) for tp, pp, cp in itertools.product((1, 2, 4), repeat=3) if tp * cp <= 4]
CHAIN = PageChain(Identity("weights", PAGE)).digests(np.arange(UNITS * PAGE, dtype=np.int32).tobytes())


@lru_cache(1024)
def rows_of(component: Component, digest: bytes) -> dict[str, np.ndarray]:
    """What belongs to a unit, of the whole model, by its digest: field -> bytes [layers, tokens, heads, row]."""
    rows = {}
    for place, field in enumerate(component.fields):
        heads = 1 if field.head_axis is None else field.shape[0]
        tokens = 1 if component.reuse is Reuse.STATE_HERE else PAGE
        shape = (len(component.layers), tokens, heads, field.num_bytes // heads)
        rng = np.random.default_rng([*digest[:16], place, *component.name.encode()])
        rows[field.name] = rng.integers(0, 256, shape, np.uint8)
    return rows


class Node:
    """A host tier of one split, or of those of its ranks that are on one of several nodes, over a storage."""

    def __init__(
        self,
        directory: Path,
        storage: Storage,
        split: Split,
        components: Sequence[Component] = MIXED,
        *,
        nodes: Sequence[int] = (),
        node: int | None = None,
    ) -> None:
        self.components = components
        split = staged(split, LAYERS)
        self.layout = EnvelopeLayout(components, num_layers=LAYERS, page_size=PAGE, split=split, nodes=nodes, node=node)
        sizes = {space: UNITS for space in self.layout.spaces}
        path = directory / f"arena {id(self)}"
        self.arena = Arena.create(path, self.layout, sizes=sizes, catalog_bytes=0, description=b"")
        path.unlink()
        self.worker = StorageWorker(
            self.arena,
            self.layout,
            storage,
            page_size=PAGE,
            windows={part.space: part.window for part in components if part.window},
            state_space=next((part.space for part in components if part.reuse is Reuse.STATE_HERE), ""),
        )

    def units(self, number: int) -> list[StoredUnit]:
        """All units at the end of a page; each space has them in another order."""
        return [
            StoredUnit(space, (number + 5 * place) % UNITS, CHAIN[number])
            for place, space in enumerate(self.layout.spaces)
        ]

    def pieces(self, unit: StoredUnit) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(rank, what its slab holds, what belongs there), for every field of every piece of every rank."""
        whole = {part.name: rows_of(part, unit.digest) for part in self.components if part.space == unit.space}
        found = []
        for rank in self.layout.ranks:
            envelope = self.arena.slab(rank, unit.space)[unit.host]
            for piece in self.layout.pieces(rank, unit.space):
                for place in piece.fields:
                    box = tuple(slice(first, end) for first, end in piece.box.ranges)
                    expected = whole[piece.group.name][place.field.name][box]
                    held = envelope[place.offset : place.offset + place.num_bytes].reshape(expected.shape)
                    assert place.num_bytes == np.prod(place.shape) * ITEMSIZE[place.field.dtype]
                    found.append((rank, held, expected))
        return found

    def fill(self, unit: StoredUnit) -> None:
        """As the ranks leave a unit when they have saved it."""
        for _, held, expected in self.pieces(unit):
            held[...] = expected
        for rank in self.layout.ranks:
            checksum = checksum_of(self.arena.slab(rank, unit.space)[unit.host].data)
            self.arena.headers(rank, unit.space)[unit.host] = unit.tag, checksum

    def holds(self, unit: StoredUnit) -> bool:
        """Whether the slots of all ranks say that they hold a unit; then they have to."""
        ranks = [rank for rank in self.layout.ranks if self.layout.pieces(rank, unit.space)]
        headers = [self.arena.headers(rank, unit.space)[unit.host].tolist() for rank in ranks]
        if any(tag != unit.tag for tag, _ in headers):
            return False
        for rank, (_, checksum) in zip(ranks, headers, strict=True):
            assert checksum == checksum_of(self.arena.slab(rank, unit.space)[unit.host].data)
        assert all(np.array_equal(held, expected) for _, held, expected in self.pieces(unit))
        return True

    def write(self, units: Sequence[StoredUnit]) -> None:
        for unit in units:
            self.fill(unit)
        assert all(self.worker.persist(units))


def files(directory: Path) -> FileStorage:
    return FileStorage(directory / "storage", max_bytes=64 * MIB)


@pytest.mark.parametrize("written", SPLITS, ids=str)
def test_what_one_split_persists_every_other_fetches(tmp_path: Path, written: Split) -> None:
    storage = files(tmp_path)
    writer = Node(tmp_path, storage, written)
    writer.write([unit for number in range(2) for unit in writer.units(number)])
    for split in SPLITS:
        reader = Node(tmp_path, storage, split)
        assert reader.worker.find(CHAIN) == Found(2, 2), split
        units = [unit for number in range(2) for unit in reader.units(number)]
        assert reader.worker.fetch(units) == [Fetch.HIT] * len(units), split
        assert all(reader.holds(unit) for unit in units)
    assert storage.stats().corrupt == storage.stats().foreign == 0


def test_nothing_is_read_twice_or_by_way_of_scratch_under_the_split_that_wrote_it(tmp_path: Path) -> None:
    storage = files(tmp_path)
    node = Node(tmp_path, storage, Split(tp=2, pp=2))
    node.write(node.units(0))
    num_objects = storage.stats().objects
    assert set(node.worker.fetch(node.units(0))) == {Fetch.HIT}
    assert storage.stats().hits == num_objects
    assert all(node.worker.persist(node.units(0)))
    assert storage.stats().objects == storage.stats().known == num_objects


def whole_units(node: Node, keys: Sequence[bytes], numbers: range) -> list[bool]:
    """Which units can be filled from objects, found by marking each of their rows."""
    stored, answers = set(keys), []
    for number in numbers:
        for unit in node.units(number):
            is_whole = True
            for group in (g for part in node.components if part.space == unit.space for g in groups(part)):
                tokens = 1 if group.reuse is Reuse.STATE_HERE else PAGE
                heads = 1 if group.fields[0].head_axis is None else group.fields[0].shape[0]
                cells = np.zeros((len(group.layers), tokens, heads), np.bool_)
                for key in (key for key in stored if key.startswith(unit.digest + row_format(group))):
                    a, b, c, d, e, f = np.frombuffer(key[-12:], np.uint16)
                    cells[a:b, c:d, e:f] = True
                is_whole &= bool(cells.all())
            answers.append(is_whole)
    return answers


@given(
    writers=st.lists(st.tuples(st.sampled_from(SPLITS), st.integers(0, 3)), min_size=1, max_size=4),
    readers=st.lists(st.sampled_from(SPLITS), min_size=1, max_size=2),
    drop=st.sampled_from((0.0, 0.02, 0.2)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_unit_is_fetched_if_and_only_if_all_its_rows_are_stored_by_anyone(
    tmp_path: Path, writers: list[tuple[Split, int]], readers: list[Split], drop: float, seed: int
) -> None:
    storage = files(tmp_path)
    storage.clear()
    try:
        faulty = FaultyStorage(storage, seed=seed, rates=FaultRates(drop=drop))
        for split, first in writers:
            writer = Node(tmp_path, faulty, split)
            units = [unit for number in range(first, first + 2) for unit in writer.units(number)]
            for unit in units:
                writer.fill(unit)
            writer.worker.persist(units)
        for split in readers:
            reader = Node(tmp_path, storage, split)
            expected = whole_units(reader, storage.keys(), range(5))
            units = [unit for number in range(5) for unit in reader.units(number)]
            found = reader.worker.fetch(units)
            assert found == [Fetch.HIT if is_whole else Fetch.MISSING for is_whole in expected]
            assert [reader.holds(unit) for unit in units] == expected
            stored = [expected[3 * number] for number in range(5)]
            if stored == sorted(stored, reverse=True):  # as writers that drop nothing leave it
                assert reader.worker.find(CHAIN[:5]).num_pages == sum(stored)
    finally:
        storage.close()


@given(
    num_pages=st.integers(0, UNITS),
    states=st.sets(st.integers(0, UNITS - 1)),
    windows=st.lists(st.tuples(st.integers(0, UNITS - 1), st.integers(1, 8)), max_size=5),
    page_count=st.integers(0, UNITS),
)
@example(num_pages=UNITS, states=set(range(UNITS)), windows=[(5, 2)], page_count=UNITS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_longest_restore_point_that_is_stored_is_found(
    tmp_path: Path, num_pages: int, states: set[int], windows: list[tuple[int, int]], page_count: int
) -> None:
    storage = files(tmp_path)
    storage.clear()
    try:
        node = Node(tmp_path, storage, Split(tp=2))
        window_pages = {page for first, count in windows for page in range(first, min(first + count, UNITS))}
        units = {unit.space: unit for unit in node.units(0)}
        for space, pages in (("full", range(num_pages)), ("window", window_pages), ("state", states)):
            for page in pages:
                node.write([units[space]._replace(host=page, digest=CHAIN[page])])
        can_continue = [
            length - 1 in states and set(range(max(0, length * PAGE - 2 * PAGE) // PAGE, length)) <= window_pages
            for length in range(1, num_pages + 1)
        ]
        limit = min(page_count, num_pages)
        expected = max((length for length in range(1, limit + 1) if can_continue[length - 1]), default=0)
        assert node.worker.find(CHAIN[:page_count]) == Found(limit, expected)
    finally:
        storage.close()


def test_a_single_restore_point_is_found_wherever_it_is(tmp_path: Path) -> None:
    components = (kv("kv", [0], heads=2, dim=4, fmt=BF16), recurrent([1], heads=2, key_dim=2, value_dim=2, fmt=BF16))
    node = Node(tmp_path, files(tmp_path), Split(), components)
    for length in range(1, UNITS + 1):
        chain = PageChain(Identity(str(length), PAGE)).digests(bytes(4 * PAGE * UNITS))
        units = [StoredUnit("full", number, digest) for number, digest in enumerate(chain)]
        units.append(StoredUnit("state", 0, chain[length - 1]))
        for unit in units:
            node.fill(unit)
        assert all(node.worker.persist(units))
        assert node.worker.find(chain) == Found(UNITS, length)
        assert node.worker.find(chain[: length - 1]) == Found(length - 1, 0)


def test_what_was_just_persisted_is_found_at_once(tmp_path: Path) -> None:
    node = Node(tmp_path, files(tmp_path), Split(tp=2), DENSE)
    assert node.worker.find(CHAIN) == Found()
    node.write([unit for number in range(2) for unit in node.units(number)])
    assert node.worker.find(CHAIN) == Found(2, 2)


def test_what_others_have_stored_is_seen_after_a_while(tmp_path: Path) -> None:
    storage, now_s = files(tmp_path), [100.0]
    writers = [Node(tmp_path, storage, split, DENSE) for split in (Split(tp=2), Split(pp=2))]
    (group,) = groups_of(writers[0].layout, "full")
    coverage = Coverage(storage, clock=lambda: now_s[0])

    def boxes_after(seconds: float) -> int:
        now_s[0] += seconds
        return len(coverage.boxes(group))

    assert boxes_after(0.0) == 0
    writers[0].write(writers[0].units(0))
    assert boxes_after(0.4) == 0, "a storage is not asked for every prompt that it has nothing of"
    assert boxes_after(0.2) == 2, "nothing covered, so it was asked again soon"
    writers[1].write(writers[1].units(0))
    assert boxes_after(4.8) == 2
    assert boxes_after(0.3) == 4


def test_a_dense_model_continues_from_every_stored_page(tmp_path: Path) -> None:
    node = Node(tmp_path, files(tmp_path), Split(pp=2), DENSE)
    node.write([unit for number in range(5) for unit in node.units(number)])
    assert node.worker.find(CHAIN) == Found(5, 5)
    assert node.worker.find(CHAIN[:3]) == Found(3, 3)
    assert node.worker.find([]) == Found(0, 0)
    assert node.worker.find(CHAIN[1:]) == Found(4, 4)  # a digest stands for all before it
    assert node.worker.find([bytes(32)]) == Found(0, 0)


def test_one_object_too_few_is_a_miss_on_all_ranks(tmp_path: Path) -> None:
    storage = files(tmp_path)
    writer, reader = Node(tmp_path, storage, Split(tp=2, pp=2), DENSE), Node(tmp_path, storage, Split(tp=2), DENSE)
    for number in range(3):
        (unit,) = writer.units(number)
        writer.fill(unit)
        for rank in range(4):
            (piece,) = writer.layout.pieces(rank, "full")
            (key,) = object_keys([unit.digest], rows=row_format(DENSE[0]), box=piece.box)
            if (number, rank) != (1, 3):
                storage.put([key], payloads=[writer.arena.slab(rank, "full")[unit.host].data[: piece.num_bytes]])
    for node in (writer, reader):
        units = [unit for number in range(3) for unit in node.units(number)]
        assert node.worker.fetch(units) == [Fetch.HIT, Fetch.MISSING, Fetch.HIT]
        assert [node.holds(unit) for unit in units] == [True, False, True]
        assert all(node.arena.headers(rank, "full")[units[1].host, 0] == 0 for rank in range(2))
        assert node.worker.find(CHAIN[:2]) == Found(1, 1)


def spoil(directory: Path, payload: bytes, *, truncate: bool = False) -> None:
    """Flip a bit of a stored object, or cut its file off there."""
    for segment in (directory / "storage").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        if (start := data.find(payload)) >= 0:
            data[start + 7] ^= 16
            segment.write_bytes(data[: start + 7] if truncate else data)
            return
    raise AssertionError("it is not stored")


def damaged(tmp_path: Path, readers: Sequence[Split], *, truncate: bool = False) -> list[list[Fetch]]:
    """What becomes of three pages when the middle of what tp=2 has stored of them was spoilt, for each reader."""
    storage = files(tmp_path)
    writer = Node(tmp_path, storage, Split(tp=2), DENSE)
    units = [unit for number in range(3) for unit in writer.units(number)]
    writer.write(units)
    spoil(tmp_path, writer.arena.slab(1, "full")[units[1].host].tobytes(), truncate=truncate)
    found = []
    for split in readers:
        reader = Node(tmp_path, storage, split, DENSE)
        found.append(reader.worker.fetch(units))
        assert [reader.holds(unit) for unit in units] == [answer is Fetch.HIT for answer in found[-1]]
    storage.close()
    return found


@pytest.mark.parametrize("split", [Split(tp=2), Split(cp=2), Split()], ids=str)
def test_a_flipped_bit_is_noticed_by_whoever_reads_it_and_gone_then(tmp_path: Path, split: Split) -> None:
    first, second = damaged(tmp_path, [split, split])
    assert first == [Fetch.HIT, Fetch.CORRUPT, Fetch.HIT]
    assert second == [Fetch.HIT, Fetch.MISSING, Fetch.HIT]


def test_what_was_cut_off_is_not_read(tmp_path: Path) -> None:
    for answers in damaged(tmp_path, [Split(cp=2), Split(tp=2)], truncate=True):
        assert answers[1] is not Fetch.HIT


@pytest.mark.parametrize("damage", ["another length", "a flipped bit"])
def test_what_is_damaged_in_one_box_is_read_from_others(tmp_path: Path, damage: str) -> None:
    storage = files(tmp_path)
    writers = [Node(tmp_path, storage, split, DENSE) for split in (Split(tp=2), Split(pp=2))]
    for writer in writers:
        writer.write(writer.units(0))
    (unit,) = writers[0].units(0)
    (piece,) = writers[0].layout.pieces(1, "full")
    if damage == "another length":
        storage.put(object_keys([unit.digest], rows=row_format(DENSE[0]), box=piece.box), payloads=[b"short"])
    else:
        spoil(tmp_path, writers[0].arena.slab(1, "full")[unit.host, : piece.num_bytes].tobytes())
    assert writers[0].worker.fetch([unit]) == [Fetch.HIT]
    assert writers[0].holds(unit)


def test_more_is_joined_than_the_last_time(tmp_path: Path) -> None:
    storage = files(tmp_path)
    writer, reader = Node(tmp_path, storage, Split(tp=2)), Node(tmp_path, storage, Split())
    writer.write([unit for number in range(6) for unit in writer.units(number)])
    for numbers in (range(1), range(6), range(2)):
        units = [unit for number in numbers for unit in reader.units(number)]
        assert set(reader.worker.fetch(units)) == {Fetch.HIT}
        assert all(reader.holds(unit) for unit in units)


def test_rows_of_another_format_are_called_foreign(tmp_path: Path) -> None:
    storage = files(tmp_path)
    writer = Node(tmp_path, storage, Split(), DENSE)
    other = (kv("kv", list(range(LAYERS)), heads=2, dim=4, fmt=F32),)
    reader = Node(tmp_path, storage, Split(), other)
    writer.write([unit for number in range(3) for unit in writer.units(number)])
    assert reader.worker.find(CHAIN) == Found(0, 0, is_foreign=True)
    assert reader.worker.fetch(reader.units(0)) == [Fetch.MISSING]
    assert reader.worker.find([bytes(32)]) == Found(0, 0)
    assert writer.worker.find(CHAIN) == Found(3, 3)


@pytest.mark.parametrize("damage", ["tag", "checksum", "row", "one rank"])
@pytest.mark.parametrize("components", [DENSE, MIXED], ids=["one object", "several objects"])
def test_what_a_slot_should_not_hold_is_never_fetched(
    tmp_path: Path, components: Sequence[Component], damage: str
) -> None:
    storage = files(tmp_path)
    node = Node(tmp_path, storage, Split(tp=2), components)
    good, bad = (node.units(number)[0] for number in range(2))
    node.fill(good)
    node.fill(bad)
    match damage:
        case "tag":
            for rank in range(2):
                node.arena.headers(rank, "full")[bad.host, 0] = tag_of(CHAIN[7])
        case "checksum":
            node.arena.headers(0, "full")[bad.host, 1] += 1
        case "row":
            node.arena.slab(1, "full")[bad.host, 3] ^= 1
        case _:
            node.arena.headers(1, "full")[bad.host] = 0
    is_stored, is_bad_stored = node.worker.persist([good, bad])
    assert is_stored
    # Where an object is all of an envelope, what has been damaged since it was saved is found out by the reader.
    assert is_bad_stored == (components is DENSE and damage in ("checksum", "row"))
    assert is_bad_stored or {key[:32] for key in list(storage.keys())} == {good.digest}
    expected = [Fetch.HIT, Fetch.CORRUPT if is_bad_stored else Fetch.MISSING]
    assert Node(tmp_path, storage, Split(cp=2), components).worker.fetch([good, bad]) == expected


def test_a_storage_that_is_away_is_a_miss_and_an_answer(tmp_path: Path) -> None:
    inner = files(tmp_path)
    node = Node(tmp_path, inner, Split(tp=2))
    units = tuple(unit for number in range(3) for unit in node.units(number))
    node.write(units)
    orders = [
        StorageCommand(CommandKind.FIND, 1, "a", digests=b"".join(CHAIN)),
        StorageCommand(CommandKind.FETCH, 2, "a", units=StoredUnits.of(units)),
        StorageCommand(CommandKind.PERSIST, 3, "a", units=StoredUnits.of(units)),
    ]
    away = FaultyStorage(inner, seed=0, rates=FaultRates(error=1))
    for storage, outcome in ((away, Outcome.UNAVAILABLE), (Guarded(lambda: away, name="away"), Outcome.DONE)):
        lost = Node(tmp_path, storage, Split(tp=2))
        for unit in units:
            lost.fill(unit)
        found, persisted, fetched = (lost.worker.work(orders[i]) for i in (0, 2, 1))
        assert {answer.outcome for answer in (found, fetched, persisted)} == {outcome}
        assert found.found == Found() and not any(persisted.stored) and len(persisted.stored) == len(units)
        assert not any(lost.holds(unit) for unit in units)
        assert not set(fetched.fetches) & {Fetch.HIT} and len(fetched.fetches) == len(units)
        assert bool(found.error) == (outcome is Outcome.UNAVAILABLE)


def test_an_order_is_answered_with_what_it_took(tmp_path: Path) -> None:
    node = Node(tmp_path, files(tmp_path), Split(tp=2, cp=2))
    units = tuple(unit for number in range(2) for unit in node.units(number))
    for unit in units[:3]:
        node.fill(unit)
    num_bytes = sum(node.layout.unit_bytes(space) for space in node.layout.spaces)
    persisted = node.worker.work(StorageCommand(CommandKind.PERSIST, 4, "me", units=StoredUnits.of(units)))
    assert (persisted.number, persisted.kind, persisted.owner) == (4, CommandKind.PERSIST, "me")
    assert (persisted.outcome, persisted.stored, persisted.error) == (Outcome.DONE, bytes([True] * 3 + [False] * 3), "")
    assert persisted.num_bytes == num_bytes and persisted.seconds > 0
    fetched = node.worker.work(StorageCommand(CommandKind.FETCH, 5, "me", units=StoredUnits.of(units)))
    assert fetched.fetches == (Fetch.HIT,) * 3 + (Fetch.MISSING,) * 3
    assert fetched.num_bytes == num_bytes
    found = node.worker.work(StorageCommand(CommandKind.FIND, 6, "me", digests=b"".join(CHAIN)))
    assert (found.found, found.num_bytes) == (Found(1, 1), 0)


def test_orders_of_a_decider_that_is_gone_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, files(tmp_path), Split(), DENSE)
    (unit,) = node.units(0)
    node.write([unit])
    assert node.worker.fence(3, timeout_s=1)
    old = node.worker.work(StorageCommand(CommandKind.FETCH, 1, "a", units=StoredUnits.of([unit]), epoch=2))
    assert (old.outcome, old.fetches) == (Outcome.CANCELLED, (Fetch.UNAVAILABLE,))
    assert node.holds(unit), "nobody has touched it"
    new = node.worker.work(StorageCommand(CommandKind.FETCH, 1, "a", units=StoredUnits.of([unit]), epoch=3))
    assert (new.outcome, new.fetches) == (Outcome.DONE, (Fetch.HIT,))


def test_settling_waits_for_what_is_being_done_and_not_for_what_begins_after(tmp_path: Path) -> None:
    begun, may_end = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    class Slow(FileStorage):
        def put(self, *arguments: Any, **named: Any) -> list[bool]:
            turn = int(begun[0].is_set())
            begun[turn].set()
            assert may_end[turn].wait(20)
            return super().put(*arguments, **named)

    node = Node(tmp_path, Slow(tmp_path / "slow", max_bytes=MIB), Split(), DENSE)
    units = node.units(0)[:1]
    node.fill(units[0])
    order = StorageCommand(CommandKind.PERSIST, 1, "a", units=StoredUnits.of(units))
    threads = [threading.Thread(target=node.worker.work, args=(order,)) for _ in begun]
    threads[0].start()
    assert begun[0].wait(20) and not node.worker.settle(timeout_s=0.05)
    settled: list[bool] = []
    waiting = threading.Thread(target=lambda: settled.append(node.worker.settle(timeout_s=20)))
    waiting.start()
    time.sleep(0.05)
    threads[1].start()
    assert begun[1].wait(20)
    may_end[0].set()
    waiting.join(20)
    assert settled == [True]
    may_end[1].set()
    for thread in threads:
        thread.join(20)


def test_what_is_found_stays_longer_than_what_is_not(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "storage", max_bytes=MIB)
    wide = (kv("kv", list(range(LAYERS)), heads=2, dim=64, fmt=BF16),)
    node = Node(tmp_path, storage, Split(), wide)

    def write(chain: Sequence[bytes]) -> None:
        node.write([StoredUnit("full", number, digest) for number, digest in enumerate(chain)])

    def chain(seed: int) -> list[bytes]:
        return PageChain(Identity(str(seed), PAGE)).digests(bytes(4 * PAGE * 4))

    write(chain(0))
    write(chain(1))
    for seed in range(2, 20):
        node.worker.find(chain(0))
        write(chain(seed))
    assert storage.stats().evicted > 0
    assert node.worker.find(chain(0)) == Found(4, 4)
    assert node.worker.find(chain(1)) == Found(0, 0)


@pytest.mark.parametrize("components", [DENSE, LATENT, MIXED], ids=["dense", "latent", "mixed"])
def test_pages_are_listed_once_all_their_objects_are_stored(tmp_path: Path, components: Sequence[Component]) -> None:
    storage = files(tmp_path)
    node, other = (Node(tmp_path, storage, split, components) for split in (Split(2, 1, 1), Split(1, 1, 1)))
    assert node.worker.listed("") == node.worker.listed("")._replace(is_whole=True, added=(), removed=())
    for number in range(4):
        node.write(node.units(number))
    whole = node.worker.listed("")
    assert whole.is_whole and sorted(whole.added) == sorted(CHAIN[:4]) and whole.removed == ()
    assert other.worker.listed("").added == whole.added  # another split reads them, too
    other.write(other.units(4))
    more = node.worker.listed(whole.version)
    assert (more.is_whole, more.added, more.removed) == (False, (CHAIN[4],), ())
    assert node.worker.listed(more.version)[1:] == (False, (), ())
    for key in [key for key in storage.changes("").keys if key.startswith(CHAIN[1])]:  # as after damage
        shelf = storage._shelves.find(key)
        assert shelf is not None
        storage._shelves.erase(shelf, key)
    less = node.worker.listed(more.version)
    assert (less.is_whole, less.added, less.removed) == (False, (), (CHAIN[1],))
    storage.clear()
    gone = node.worker.listed(less.version)
    assert gone.added == () and sorted(gone.removed) == sorted([CHAIN[0], *CHAIN[2:5]])
    storage.close()


def test_a_storage_that_others_change_lists_nothing(tmp_path: Path) -> None:
    class Shared(FileStorage):
        def changes(self, since: str) -> None:  # type: ignore[override]
            return None

    storage = Shared(tmp_path / "storage", max_bytes=MIB)
    node = Node(tmp_path, storage, Split(1, 1, 1), DENSE)
    node.write(node.units(0))
    assert node.worker.listed("") == Listed()
    storage.close()


def test_the_storages_of_several_nodes_list_nothing_together(tmp_path: Path) -> None:
    storages = [FileStorage(tmp_path / f"storage {node}", max_bytes=MIB) for node in range(2)]
    split = Split(2, 1, 1)
    nodes = [Node(tmp_path, storage, split, DENSE, nodes=[0, 1], node=i) for i, storage in enumerate(storages)]
    for node in nodes:
        node.write(node.units(0))
    command = StorageCommand(CommandKind.LIST, 1, "events")
    assert all(node.worker.work(command).listed.added == (CHAIN[0],) for node in nodes)
    result = work_on_all([node.worker.work for node in nodes])(command)
    assert (result.outcome, result.listed) == (Outcome.DONE, Listed())
    for storage in storages:
        storage.close()
