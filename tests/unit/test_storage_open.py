"""Storages by URL, guarded, and failing on purpose."""

import contextlib
import math
import random
import sys
import threading
from pathlib import Path

import pytest

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.storage.base import Storage
from raycache.storage.faulty import FaultRates, FaultyStorage
from raycache.storage.file import FileStorage
from raycache.storage.guard import Guarded
from raycache.storage.open import open_storage, storage_name
from tests.unit.stored import MIB, get, has, key_of, payload_of, put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage"


# URLs.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("/var/cache", "unknown scheme"),
        ("ftp://host/x", r"file:///DIRECTORY\?size=50GiB"),
        ("file:///x", r"\?size=50GiB"),
        ("file://x/y?size=1GiB", "three slashes"),
        ("file:///x?size=large", "512MiB"),
        ("file:///x?size=1KiB", "at least 1048576"),
        ("file:///x?size=1GiB&bound=2", "options: size"),
        ("file:///x?size=1GiB&size=2GiB", "repeated option"),
        ("file:///x?size", "invalid .*storage URL"),
        ("s3://", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/x", "environment"),
        ("s3://bucket/x?endpoint=127.0.0.1:9000", "http://HOST:PORT"),
        ("s3://bucket/x?anonymous=maybe", "true or false"),
        ("gs://bucket/x?region=eu", "options: none"),
        ("redis://", "redis://HOST:PORT/NUMBER"),
        ("redis://host/name", "redis://HOST:PORT/NUMBER"),
        ("redis://host:port/0", "invalid .*storage URL"),
        ("faulty+file:///x?size=1GiB&corrupt=2", "out of range"),
        ("faulty+file:///x?size=1GiB&seed=x", "takes numbers"),
        ("faulty+ftp://x", "unknown scheme"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_one_that_would(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        open_storage(url, timeout_s=1)
    assert "secret" not in str(refused.value)


def test_a_timeout_must_be_one() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        open_storage("file:///x?size=1GiB", timeout_s=0)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("file:///var/cache?size=50GiB", "file:/var/cache"),
        ("s3://bucket/a/b?endpoint=http://h:1", "s3://bucket/a/b"),
        ("redis://me:secret@host:6379/0?prefix=x", "redis://host:6379/0"),
        ("redis://:se@cret/?#@host/0", "redis://host/0"),
        ("faulty+redis://:secret@host/0?seed=1", "faulty+redis://host/0"),
    ],
)
def test_names_hold_no_credentials(url: str, name: str) -> None:
    assert storage_name(url) == name


def test_a_directory_is_named_by_its_url(tmp_path: Path) -> None:
    with contextlib.closing(open_storage(f"file://{tmp_path}/a%20b?size=2.5MiB", timeout_s=1)) as storage:
        assert storage.is_up
        assert storage.name == f"file:{tmp_path}/a%20b"
        assert storage.stats().bytes_limit == 2.5 * MIB
    assert (tmp_path / "a b" / "raycache-storage").exists()


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [("s3://bucket/x", "object", "obstore"), ("redis://host/0", "redis", "redis")],
)
def test_a_missing_client_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, package: str
) -> None:
    monkeypatch.delitem(sys.modules, f"raycache.storage.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.* pip install 'raycache\[storage\]'"):
        open_storage(url, timeout_s=1)


# Guarded.


class Flaky:
    """Opens a storage of files behind a line that can be cut."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_up, self.num_open = path, True, 0

    def open(self) -> Storage:
        if not self.is_up:
            raise ConnectionRefusedError("nobody is there")
        self.num_open += 1
        return Cut(FileStorage(self.path, max_bytes=4 * MIB), seed=0, rates=FaultRates(), line=self)


class Cut(FaultyStorage):
    """Fails every call while the line is cut."""

    def __init__(self, inner: Storage, *, seed: int, rates: FaultRates, line: Flaky) -> None:
        super().__init__(inner, seed=seed, rates=rates)
        self.line = line

    def _begin(self) -> None:
        if not self.line.is_up:
            raise TimeoutError("no answer")

    def close(self) -> None:
        super().close()
        self.line.num_open -= 1


def test_a_storage_that_is_away_is_a_miss_and_comes_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line, now = Flaky(path), [0.0]
    line.is_up = False
    storage = Guarded(line.open, name="flaky", retry_s=5, clock=lambda: now[0])
    assert put(storage, [1]) == [False]
    assert get(storage, [1]) == [Fetch.UNAVAILABLE]
    line.is_up = True
    assert put(storage, [1]) == [False]  # not asked again yet
    now[0] = 6
    assert put(storage, [1]) == [True]
    assert storage.is_up
    line.is_up = False
    assert get(storage, [1, 2]) == [Fetch.UNAVAILABLE] * 2
    assert line.num_open == 0
    assert has(storage, range(3)) == []
    assert storage.suffixes() == set()
    assert len(caplog.messages) == 1
    now[0] = 70
    assert get(storage, [1]) == [Fetch.UNAVAILABLE]
    assert len(caplog.messages) == 2  # one a minute
    assert "flaky" in caplog.messages[0]
    line.is_up = True
    now[0] = 76
    assert get(storage, [1]) == [Fetch.HIT]
    assert storage.stats().unavailable == 9
    storage.close()
    assert get(storage, [1]) == [Fetch.UNAVAILABLE]
    assert line.num_open == 0


def test_a_bound_that_was_changed_holds_after_it_was_away(path: Path) -> None:
    line = Flaky(path)
    with contextlib.closing(Guarded(line.open, name="flaky", retry_s=0)) as storage:
        storage.resize(2 * MIB)
        line.is_up = False
        assert has(storage, range(3)) == []
        with pytest.raises(ConfigError, match="keeps its size limit"):
            storage.resize(3 * MIB)
        line.is_up = True
        assert put(storage, [1]) == [True]
        assert storage.stats().bytes_limit == 2 * MIB


def test_a_setting_is_refused_at_the_start_and_a_miss_later(path: Path) -> None:
    line = Flaky(path)
    with contextlib.closing(Guarded(line.open, name="flaky", retry_s=0)) as storage:
        with pytest.raises(ConfigError, match="in use"):
            Guarded(line.open, name="flaky")
        line.is_up = False
        assert has(storage, range(3)) == []
        line.is_up = True
        with contextlib.closing(FileStorage(path, max_bytes=4 * MIB)):
            assert put(storage, [1]) == [False]
        assert put(storage, [1]) == [True]


def test_a_storage_closes_when_the_last_call_has_left_it(path: Path) -> None:
    line, inside, leave = Flaky(path), threading.Event(), threading.Event()

    class Slow(Cut):
        def scrub(self, *, until_s: float = math.inf) -> object:
            inside.set()
            assert leave.wait(10)
            return super().scrub(until_s=until_s)

    def open_slow() -> Storage:
        line.num_open += 1
        return Slow(FileStorage(path, max_bytes=4 * MIB), seed=0, rates=FaultRates(), line=line)

    storage = Guarded(open_slow, name="slow", retry_s=1000)
    put(storage, [1])
    checked = list[int]()
    scrubbing = threading.Thread(target=lambda: checked.append(storage.scrub().checked))
    scrubbing.start()
    assert inside.wait(10)
    line.is_up = False
    assert get(storage, [1]) == [Fetch.UNAVAILABLE]
    storage.close()
    assert line.num_open == 1
    leave.set()
    scrubbing.join(10)
    assert checked == [1]
    assert line.num_open == 0


# Failing on purpose.

RATES = FaultRates(
    drop=0.05,
    lose=0.03,
    corrupt=0.05,
    foreign=0.05,
    unavailable=0.05,
    partial=0.05,
    error=0.02,
    delay=0.05,
    delay_s=0.001,
)


def run(storage: Storage, seed: int, steps: int) -> list[object]:
    """What random calls answered; checks what is called a hit."""
    rng, said = random.Random(seed), list[object]()
    for _ in range(steps):
        numbers = [rng.randrange(60) for _ in range(rng.randint(1, 5))]
        try:
            match rng.randrange(3):
                case 0:
                    said.append(put(storage, numbers, size=600))
                case 1:
                    said.append(get(storage, numbers, size=600))
                case _:
                    said.append(storage.contains([key_of(number) for number in numbers], touch=True))
        except OSError as error:
            said.append(type(error))
    return said


def test_every_kind_of_fault_happens_and_no_hit_is_wrong(path: Path) -> None:
    with contextlib.closing(FaultyStorage(FileStorage(path, max_bytes=4 * MIB), seed=1, rates=RATES)) as storage:
        said = run(storage, 1, 2500)
        fetched = [fetch for answer in said if isinstance(answer, list) for fetch in answer if isinstance(fetch, Fetch)]
        assert set(fetched) == set(Fetch)
        assert fetched.count(Fetch.HIT) > len(fetched) / 2
        assert ConnectionError in said
        assert any(False in answer and True in answer for answer in said if isinstance(answer, list))
        stats = storage.stats()
        assert stats.hits == fetched.count(Fetch.HIT)
        assert stats.missing == fetched.count(Fetch.MISSING)
        assert stats.corrupt == fetched.count(Fetch.CORRUPT)
        assert stats.foreign == fetched.count(Fetch.FOREIGN)


def test_the_same_seed_fails_the_same_way(path: Path) -> None:
    def said(name: str, seed: int) -> list[object]:
        inner = FileStorage(path / name, max_bytes=4 * MIB)
        with contextlib.closing(FaultyStorage(inner, seed=seed, rates=RATES)) as storage:
            return run(storage, 1, 200)

    assert said("a", 1) == said("b", 1) != said("c", 2)


def test_what_is_spoilt_is_gone_until_it_is_put_again(path: Path) -> None:
    rates = FaultRates(corrupt=1)
    with contextlib.closing(FaultyStorage(FileStorage(path, max_bytes=4 * MIB), seed=1, rates=rates)) as storage:
        put(storage, [1])
        assert get(storage, [1]) == [Fetch.CORRUPT]
        assert get(storage, [1]) == [Fetch.MISSING]
        assert has(storage, range(3)) == []
        assert put(storage, [1]) == [True]
        assert has(storage, range(3)) == [1]


def test_a_liar_calls_wrong_bytes_a_hit(path: Path) -> None:
    rates = FaultRates(corrupt=0.5, foreign=0.5)
    inner = FileStorage(path, max_bytes=4 * MIB)
    with contextlib.closing(FaultyStorage(inner, seed=1, rates=rates, lies=True)) as storage:
        put(storage, [1])
        wrong, buffer = 0, bytearray(5000)
        for _ in range(20):
            assert storage.get([key_of(1)], into=[buffer]) == [Fetch.HIT]
            wrong += buffer != payload_of(key_of(1), 5000)
        assert 10 <= wrong <= 20


def test_outages_behind_a_guard_are_misses(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"faulty+file://{path}?size=4MiB&seed=3&error=0.2&error_calls=2"
    with contextlib.closing(open_storage(url, timeout_s=1, retry_s=0)) as storage:
        said = run(storage, 1, 300)
    assert OSError not in said
    assert [Fetch.HIT] in said
    assert "injects faults" in caplog.text
