"""What every storage backend does: one conformance test for all, on the media themselves."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycache.cache.storage_commands import Fetch
from raycache.memory.checksum import checksum_of
from raycache.storage.base import Storage, StorageStats
from tests.unit.storage_media import (
    BucketMedium,
    FileMedium,
    Medium,
    RedisMedium,
    Wrapped,
    credentials,
    redis_server,
    s3_server,
)
from tests.unit.stored import MIB, get, has, key_of, payload_of, put

Servers = Callable[[str], str | int]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts a server when the first test asks for it; gives its address or port."""
    started: dict[str, str | int] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> str | int:
            if kind not in started:
                server = s3_server() if kind == "s3" else redis_server(tmp_path_factory.mktemp("redis"))
                started[kind] = stack.enter_context(server)
            return started[kind]

        yield start


OPEN: dict[str, Callable[[Path, Servers], Medium]] = {
    "file": lambda path, _: FileMedium(path),
    "object": lambda _, start: BucketMedium(str(start("s3"))),
    "redis": lambda _, start: RedisMedium(int(start("redis"))),
    "file by URL": lambda path, _: Wrapped(FileMedium(path), is_faulty=False),
    "object by URL": lambda _, start: Wrapped(BucketMedium(str(start("s3"))), is_faulty=False),
    "redis by URL": lambda _, start: Wrapped(RedisMedium(int(start("redis"))), is_faulty=False),
    "faulty file": lambda path, _: Wrapped(FileMedium(path), is_faulty=True),
}


@pytest.fixture(params=OPEN)
def medium(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Medium:
    credentials(monkeypatch)
    return OPEN[request.param](tmp_path / "storage", servers)


@pytest.fixture
def storage(medium: Medium) -> Iterator[Storage]:
    with contextlib.closing(medium.open()) as opened:
        yield opened


def test_what_was_put_is_found_and_nothing_else(storage: Storage) -> None:
    assert put(storage, [1, 2, 3]) == [True] * 3
    assert get(storage, [3, 4, 1]) == [Fetch.HIT, Fetch.MISSING, Fetch.HIT]
    assert has(storage, range(6)) == [1, 2, 3]
    stats = storage.stats()
    assert (stats.stored, stats.hits, stats.missing) == (3, 2, 1)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 600_000, 1 << 20])
def test_payloads_of_any_length_and_kind_of_buffer_come_back(storage: Storage, size: int) -> None:
    data = payload_of(b"x", size)
    keys = [b"a" * 64, b"b", b"c"]
    assert storage.put(keys, payloads=[data, bytearray(data), memoryview(data)]) == [True] * 3
    assert storage.contains([*keys, b"d"], touch=True) == [True, True, True, False]
    back = bytearray(size)
    for key in keys:
        assert storage.get([key], into=[memoryview(back)]) == [Fetch.HIT]
        assert back == data
        back[:] = bytes(size)


def test_large_objects_go_in_one_batch(storage: Storage, medium: Medium) -> None:
    size = MIB if isinstance(medium, FileMedium | Wrapped) else 5 * MIB
    assert put(storage, [1, 2, 3], size) == [True] * 3
    assert get(storage, [1, 2, 3], size) == [Fetch.HIT] * 3


def test_what_is_there_is_not_written_again(storage: Storage) -> None:
    put(storage, [1])
    assert storage.stats().stored == 1
    assert put(storage, [1]) == [True]
    assert storage.stats().stored == storage.stats().known == 1
    assert put(storage, [1, 2, 2]) == [True] * 3
    assert has(storage, range(5)) == [1, 2]


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_payload_that_is_not_what_its_checksum_was_taken_of_is_corrupt_when_read(storage: Storage, size: int) -> None:
    keys = [key_of(number) for number in range(3)]
    payloads = [payload_of(key, size) for key in keys]
    totals = [checksum_of(payload) for payload in payloads]
    damaged = bytearray(payloads[1])
    damaged[size // 2] ^= 1
    assert storage.put(keys, payloads=[payloads[0], damaged, payloads[2]], checksums=[totals[0], totals[1], 0])
    assert all(known in (0, total) for known, total in zip(storage.checksums(keys), totals, strict=True))
    assert get(storage, [0, 1, 2], size) == [Fetch.HIT, Fetch.CORRUPT, Fetch.HIT]
    assert get(storage, [1], size) == [Fetch.MISSING]
    assert storage.checksums([keys[1]]) == [0]


def test_another_length_is_foreign_and_replaced_when_put(storage: Storage) -> None:
    put(storage, [1], size=100)
    assert get(storage, [1], size=99) == [Fetch.FOREIGN]
    assert get(storage, [1], size=101) == [Fetch.FOREIGN]
    assert get(storage, [1], size=100) == [Fetch.HIT]
    assert put(storage, [1], size=9000) == [True]
    assert get(storage, [1], size=9000) == [Fetch.HIT]
    assert storage.stats().foreign == 2


@pytest.mark.parametrize("size", [500, 700_000])
def test_a_flipped_bit_is_found_and_the_object_can_be_put_again(storage: Storage, medium: Medium, size: int) -> None:
    put(storage, [1, 2, 3], size)
    medium.damage(key_of(2), size)
    assert get(storage, [1, 2, 3], size) == [Fetch.HIT, Fetch.CORRUPT, Fetch.HIT]
    assert storage.stats().corrupt == 1
    assert get(storage, [2], size) == [Fetch.MISSING]
    assert put(storage, [2], size) == [True]
    assert get(storage, [2], size) == [Fetch.HIT]


def test_scrub_finds_and_drops_what_is_bad(storage: Storage, medium: Medium) -> None:
    put(storage, list(range(20)), size=8192)
    for number in (3, 7):
        medium.damage(key_of(number), 8192)
    before = storage.stats()
    scrub = storage.scrub()
    assert (scrub.checked, scrub.bad, scrub.num_bytes) == (20, 2, 20 * 8192)
    assert storage.stats().hits == before.hits
    assert storage.stats().corrupt == 2
    assert has(storage, range(20)) == [number for number in range(20) if number not in (3, 7)]
    assert storage.scrub().bad == 0


def test_a_scrub_ends_when_its_time_is_over_and_says_so(storage: Storage) -> None:
    put(storage, range(20), size=500)
    late = storage.scrub(until_s=time.monotonic())
    assert (late.checked, late.is_whole) == (0, False)
    assert storage.scrub(until_s=time.monotonic() + 60).is_whole


def test_what_was_stored_is_found_when_opened_again(medium: Medium) -> None:
    with contextlib.closing(medium.open()) as storage:
        put(storage, [1, 1001])
    with contextlib.closing(medium.open()) as storage:
        assert storage.suffixes() == {key_of(1)[-24:], key_of(1001)[-24:]}
        assert get(storage, [1, 2, 1001]) == [Fetch.HIT, Fetch.MISSING, Fetch.HIT]


def test_suffixes_of_stored_keys_are_told(storage: Storage) -> None:
    assert storage.suffixes() == set()
    put(storage, [1, 2])
    assert storage.suffixes() == {key_of(1)[-24:]}
    put(storage, [1001])
    assert storage.suffixes() == {key_of(1)[-24:], key_of(1001)[-24:]}
    storage.clear()
    assert storage.suffixes() == set()


def test_clear_forgets_everything_and_takes_new_objects(storage: Storage) -> None:
    put(storage, [1, 2])
    storage.clear()
    assert get(storage, [1, 2]) == [Fetch.MISSING] * 2
    assert has(storage, range(5)) == []
    assert put(storage, [2]) == [True]
    assert get(storage, [2]) == [Fetch.HIT]


def test_empty_batches_are_fine(storage: Storage) -> None:
    assert (storage.put([], payloads=[]), storage.get([], into=[]), storage.contains([], touch=True)) == ([], [], [])


@pytest.mark.parametrize("key", [b"", b"k" * 65])
def test_a_key_that_no_header_can_hold_is_refused(storage: Storage, key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        storage.put([key], payloads=[b"x"])


def test_stats_are_a_copy(storage: Storage) -> None:
    before = storage.stats()
    put(storage, [1])
    assert isinstance(before, StorageStats)
    assert before.stored == 0


def test_threads_that_put_and_get_only_see_what_belongs_to_the_key(storage: Storage) -> None:
    failures: list[BaseException] = []
    until_s = time.monotonic() + 2

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(40):
                size = rng.choice([3000, 60_000, 700_000])
                numbers = [rng.randrange(30) * 10 + size % 7 for _ in range(rng.randint(1, 6))]
                if rng.random() < 0.5:
                    put(storage, numbers, size)
                else:
                    get(storage, numbers, size)
                if time.monotonic() > until_s:
                    return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = storage.stats()
    assert stats.hits > 0
    assert stats.evicted > 0 or not stats.bytes_limit
    assert stats.corrupt == stats.io_errors == stats.unavailable == 0
