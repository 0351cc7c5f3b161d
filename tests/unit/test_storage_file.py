"""Files of the storage tier under crashes, damage and full disks."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import checksum_of
from raycache.storage.base import HEADER_BYTES, Header, read_header
from raycache.storage.change_log import ChangeLog
from raycache.storage.file import FileStorage
from tests.unit.stored import MIB, get, has, key_of, put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def open_file(path: Path, max_bytes: int = 4 * MIB) -> FileStorage:
    return FileStorage(path, max_bytes=max_bytes)


def disk_bytes(path: Path) -> int:
    return sum(
        max(file.stat().st_size, 512 * file.stat().st_blocks) for file in path.iterdir() if "segment" in file.name
    )


def test_objects_leave_in_the_order_of_their_last_use(path: Path) -> None:
    storage, twin, rng = open_file(path, MIB), OrderedDict[int, None](), random.Random(1)
    for step in range(600):
        number = rng.randrange(400)
        if rng.random() < 0.3:
            assert (get(storage, [number]) == [Fetch.HIT]) == (number in twin)
        else:
            before = storage.stats().evicted
            put(storage, [number])
            twin[number] = None
            for _ in range(storage.stats().evicted - before):
                twin.popitem(last=False)
        if number in twin:
            twin.move_to_end(number)
        if step % 100 == 99:
            assert has(storage, range(400)) == sorted(twin)
    assert storage.stats().evicted > 100
    assert 100 < len(twin) < 128  # 8 KiB each, 1 MiB in all
    storage.close()


@pytest.mark.parametrize("most_kept", [3, 200])
def test_changes_since_a_version_give_the_content(path: Path, monkeypatch: pytest.MonkeyPatch, most_kept: int) -> None:
    monkeypatch.setattr("raycache.storage.shelves.ChangeLog", lambda: ChangeLog(most_kept=most_kept))
    storage, rng, seen = open_file(path, MIB), random.Random(2), set[bytes]()
    version, wholes = "", 0
    for step in range(400):
        size = rng.choice([5000, 5000, 20_000])  # of two shelves: whole segments leave, too
        put(storage, [rng.randrange(300) for _ in range(rng.randrange(4))], size=size)
        if step == 200:
            storage.clear()
        if step % 7 == 0:
            version, is_whole, keys = storage.changes(version)
            wholes += is_whole
            seen = set() if is_whole else seen
            there = storage.contains(list(keys), touch=False)
            seen = (seen - set(keys)) | {key for key, is_there in zip(keys, there, strict=True) if is_there}
            assert seen == {key for key in map(key_of, range(300)) if storage.contains([key], touch=False)[0]}
    assert storage.stats().evicted > 100 and len(seen) > 0
    assert wholes == 1 if most_kept > 100 else wholes > 10
    storage.resize(MIB + 1)
    storage.close()
    again = open_file(path, MIB)
    assert again.changes(version).is_whole  # numbers of another life
    assert set(again.changes("").keys) == set(again.changes(version).keys)
    again.close()


def test_the_first_of_a_batch_leaves_last(path: Path) -> None:
    storage = open_file(path, MIB)
    put(storage, list(range(40)), size=8000)
    put(storage, list(range(1000, 1090)), size=8000)
    left = has(storage, range(40))
    assert 0 < len(left) < 40
    assert left == list(range(len(left)))  # a prefix: parents outlive their children
    storage.close()


def test_a_touched_prefix_stays(path: Path) -> None:
    storage = open_file(path, MIB)
    put(storage, list(range(40)), size=8000)
    storage.contains([key_of(number) for number in range(10)], touch=True)
    put(storage, list(range(1000, 1060)), size=8000)
    storage.contains([key_of(number) for number in range(10)], touch=True)
    put(storage, list(range(2000, 2100)), size=8000)
    assert has(storage, range(40)) == list(range(10))
    storage.close()


def test_the_bound_holds_at_every_moment_and_over_restarts(path: Path) -> None:
    rng, number = random.Random(2), 0
    for limit in (3 * MIB, 5 * MIB, 2 * MIB):
        storage = open_file(path, limit)
        for _ in range(60):
            number += 1
            put(storage, [number], size=rng.choice([3000, 70_000, 300_000]))
            assert disk_bytes(path) <= limit
        assert disk_bytes(path) == storage.stats().bytes_used > 0.7 * limit
        storage.close()
    storage = open_file(path, 2 * MIB)
    assert storage.stats().objects > 3
    storage.resize(MIB)
    assert disk_bytes(path) <= MIB
    storage.close()


def test_sizes_share_the_disk_by_use(path: Path) -> None:
    storage = open_file(path, 2 * MIB)
    put(storage, list(range(100)), size=8000)
    hot = list(range(10))
    for number in range(1000, 1200):
        put(storage, [number], size=100_000)
        get(storage, hot, size=8000)
    left = has(storage, range(100))
    assert left[:10] == hot
    assert len(left) < 32  # the coldest files went, one stays for the hot ones
    assert len(has(storage, range(1000, 1200))) >= 15
    for number in range(2000, 2400):
        put(storage, [number], size=8000)
    assert len(has(storage, range(2000, 2400))) > 100
    storage.close()


def test_an_object_larger_than_the_bound_is_refused(path: Path) -> None:
    storage = open_file(path, MIB)
    assert put(storage, [1, 2], size=MIB) == [False, False]
    assert put(storage, [3]) == [True]
    assert storage.stats().refused == 2
    storage.close()


def test_everything_is_found_again_after_a_restart_in_the_same_order(path: Path) -> None:
    storage = open_file(path, MIB)
    put(storage, list(range(60)), size=8000)
    get(storage, list(range(30, 60)), size=8000)
    storage.close()
    storage = open_file(path, MIB)
    assert has(storage, range(60)) == list(range(60))
    put(storage, list(range(1000, 1110)), size=8000)
    left = has(storage, range(60))
    assert left
    assert left == list(range(30, 30 + len(left)))
    assert get(storage, left, size=8000) == [Fetch.HIT] * len(left)
    storage.close()


def test_a_cleared_storage_is_empty_after_a_restart(path: Path) -> None:
    storage = open_file(path)
    put(storage, [1, 2])
    storage.clear()
    assert disk_bytes(path) == 0
    storage.close()
    storage = open_file(path)
    assert has(storage, range(5)) == []
    storage.close()


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_anywhere_are_misses_with_a_counter(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    storage = open_file(path, MIB)
    put(storage, list(range(40)), size=rng.choice([3000, 12_000]))
    size = 3000 if get(storage, [0], 3000) == [Fetch.HIT] else 12_000
    storage.close()
    for file in path.glob("*.segment"):
        data = bytearray(file.read_bytes())
        for _ in range(rng.choice([1, 20])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    storage = open_file(path, MIB)
    found = get(storage, list(range(40)), size)  # which compares every hit
    lost = found.count(Fetch.MISSING) + found.count(Fetch.CORRUPT)
    assert found.count(Fetch.HIT) + lost == 40
    assert lost == 0 or storage.stats().corrupt + storage.stats().foreign > 0
    assert found.count(Fetch.CORRUPT) == 0 or Fetch.CORRUPT not in get(storage, list(range(40)), size)  # they are gone
    assert all(put(storage, list(range(40)), size))
    assert get(storage, list(range(40)), size) == [Fetch.HIT] * 40
    storage.close()


def test_a_file_cut_short_while_it_is_used_costs_what_was_cut(path: Path) -> None:
    storage = open_file(path)
    put(storage, list(range(4)), size=8192)
    (file,) = path.glob("*.segment")
    os.truncate(file, 8192 + 2 * 8192 + 100)
    assert get(storage, list(range(4)), size=8192) == [Fetch.HIT, Fetch.HIT, Fetch.CORRUPT, Fetch.CORRUPT]
    storage.close()


@pytest.mark.parametrize("left", [0, 20, 5000, 20_000])
def test_a_file_cut_short_before_a_restart_is_no_error(path: Path, left: int) -> None:
    storage = open_file(path)
    put(storage, list(range(6)), size=8192)
    storage.close()
    (file,) = path.glob("*.segment")
    os.truncate(file, left)
    storage = open_file(path)
    assert Fetch.HIT not in get(storage, list(range(3, 6)), size=8192)
    assert storage.stats().corrupt + storage.stats().foreign > 0
    assert disk_bytes(path) <= 4 * MIB
    assert put(storage, [7], size=8192) == [True]
    assert get(storage, [7], size=8192) == [Fetch.HIT]
    storage.close()


def test_files_of_another_version_are_given_up_and_counted(path: Path) -> None:
    storage = open_file(path)
    put(storage, [1])
    storage.close()
    (file,) = path.glob("*.segment")
    data = bytearray(file.read_bytes())
    data[7] += 1
    file.write_bytes(data)
    (path / "00000009.new").write_bytes(b"unfinished")
    storage = open_file(path)
    assert get(storage, [1]) == [Fetch.MISSING]
    assert storage.stats().foreign == 1
    assert [file.name for file in path.iterdir()] == ["raycache-storage"]
    storage.close()


def test_headers_say_what_is_wrong_with_them() -> None:
    header = Header(b"key", 4, checksum_of(b"data"))
    data = header.packed()
    assert len(data) == HEADER_BYTES
    assert read_header(data) == header
    assert read_header(bytes(HEADER_BYTES)) is Fetch.MISSING
    assert read_header(data[:-1]) is Fetch.CORRUPT
    assert read_header(b"PK\x03\x04" + data[4:]) is Fetch.FOREIGN
    assert read_header(data[:4] + b"\xff" + data[5:]) is Fetch.FOREIGN
    assert read_header(data[:30] + b"x" + data[31:]) is Fetch.CORRUPT


def test_scrub_finds_and_drops_what_is_bad(path: Path) -> None:
    storage = open_file(path)
    put(storage, list(range(20)), size=8192)
    (file,) = path.glob("*.segment")
    with file.open("r+b") as data:
        for slot in (3, 7):  # 8 slots of 8 KiB in a file of 64 KiB, behind two blocks
            data.seek(8192 + slot * 8192 - 10)
            data.write(b"spoilt")
    before = storage.stats()
    scrub = storage.scrub()
    assert (scrub.checked, scrub.bad, scrub.num_bytes) == (20, 2, 20 * 8192)
    assert storage.stats().hits == before.hits
    assert storage.stats().objects == 18
    storage.close()
    storage = open_file(path)
    assert storage.stats().objects == 18
    assert storage.scrub().bad == 0
    storage.close()


def test_a_directory_of_somebody_else_is_refused_and_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.segment").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        open_file(path)
    assert (path / "thesis.segment").read_text() == "precious"


def test_a_directory_has_one_user_at_a_time(path: Path) -> None:
    storage = open_file(path)
    with pytest.raises(ConfigError, match="in use"):
        open_file(path)
    storage.close()
    open_file(path).close()


def test_a_bound_that_is_of_no_use_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes=1000"):
        open_file(path, 1000)


WRITER = """
import sys, random
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.test_storage_file import get, put, open_file
storage = open_file(Path({path!r}), 2 << 20)
rng = random.Random({seed})
put(storage, list(range(0, 12, 3)), 5000)
print("open", flush=True)
while True:
    size = rng.choice([5000, 90_000, 600_000])
    numbers = [rng.randrange(40) * 3 + (5000, 90_000, 600_000).index(size) for _ in range(rng.randint(1, 8))]
    put(storage, numbers, size)
    get(storage, numbers[:2], size)
"""


def test_a_writer_killed_at_any_moment_leaves_no_torn_object(path: Path) -> None:
    rng, kept, torn = random.Random(3), 0, 0
    for seed in range(12):
        code = WRITER.format(path=str(path), seed=seed, root=str(Path(__file__).parents[2]))
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        time.sleep(rng.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        storage = open_file(path, 2 * MIB)
        assert disk_bytes(path) <= 2 * MIB
        for index, size in enumerate((5000, 90_000, 600_000)):
            found = get(storage, list(range(index, 120, 3)), size)  # which compares every hit
            kept, torn = kept + found.count(Fetch.HIT), torn + found.count(Fetch.CORRUPT)
        assert storage.scrub().bad == 0  # what was torn is gone
        storage.close()
    assert kept > 12
    assert torn <= 12 * 8  # no more than a batch each time


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from raycache.storage.base import Fetch
from tests.unit.test_storage_file import get, put, open_file
storage = open_file(Path({path!r}))
assert put(storage, list(range(5)), 20_000) == [True] * 5
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
stored = put(storage, list(range(5, 60)), 20_000)
found = get(storage, list(range(60)), 20_000)
print(stored.count(False), found.count(Fetch.HIT), found.count(Fetch.MISSING), storage.stats().disk_full)
storage.close()
"""


def test_a_full_disk_is_a_counter(path: Path) -> None:
    code = FULL_DISK.format(path=str(path), root=str(Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    refused, hits, missing, counted = map(int, done.stdout.split())
    assert refused == counted > 50
    assert missing >= refused - 5
    assert hits + missing == 60


def test_on_a_full_disk_a_new_size_takes_the_place_of_the_coldest_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, reserve = [2 * MIB], os.posix_fallocate

    def reserve_on_a_small_disk(fd: int, start: int, size: int) -> None:
        if disk_bytes(path) + size > room[0]:
            raise OSError(errno.ENOSPC, "no space left on device")
        reserve(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve_on_a_small_disk)
    storage = open_file(path, 64 * MIB)
    assert all(all(put(storage, list(range(first, first + 50)), size=8000)) for first in range(0, 300, 50))
    assert storage.stats().evicted > 0
    assert put(storage, [1000], size=500_000) == [True]
    assert get(storage, [1000, 1001], size=500_000) == [Fetch.HIT, Fetch.MISSING]
    assert has(storage, range(250, 300))
    room[0] = 0
    assert put(storage, [2000], size=5_000_000) == [False]
    assert storage.stats().disk_full == 1
    storage.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can write to"):
        FileStorage(tmp_path / "cache", max_bytes=1 << 20)


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can write to"):
        FileStorage(tmp_path / "file" / "cache", max_bytes=1 << 20)
