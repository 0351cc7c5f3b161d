"""Storage across the network: buckets and Redis that are slow, away, full, or refuse us."""

import contextlib
import http.server
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.store import MemoryStore

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import checksum_of
from raycache.storage.base import Storage
from raycache.storage.guard import Guarded
from raycache.storage.object import ObjectStorage, open_bucket
from raycache.storage.open import open_storage
from raycache.storage.redis import RedisServer, RedisStorage
from raycache.storage.workers import Workers
from tests.unit.storage_media import BucketMedium, Line, RedisMedium, credentials, free_port, redis_server, s3_server
from tests.unit.stored import MIB, get, has, key_of, put

LIMIT_S = 0.5  # of calls that are to fail


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture(autouse=True)
def signed(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials(monkeypatch)


def bucket_at(endpoint: str, name: str = "bucket", timeout_s: float = LIMIT_S) -> ObjectStorage:
    url = f"s3://{name}/far"
    bucket = open_bucket(url, endpoint=endpoint, region="us-east-1", is_anonymous=False, timeout_s=timeout_s)
    return ObjectStorage(bucket, name=url, timeout_s=timeout_s)


def redis_at(port: int, timeout_s: float = LIMIT_S) -> RedisStorage:
    return RedisStorage(RedisServer("127.0.0.1", port, 0), name="redis", prefix="far", timeout_s=timeout_s)


class Far:
    """A storage behind a line, that is asked again at once after it was away.

    Attributes:
        line: to the server.
        direct: the same storage without the line and with patience, for what a test needs first.
        storage: behind the line and a guard.
    """

    def __init__(self, port: int, open_at: Callable[[int, float], Storage]) -> None:
        self.line, self.direct = Line(port), open_at(port, 20.0)
        self.storage = Guarded(lambda: open_at(self.line.port, LIMIT_S), name="far", retry_s=0)
        self.direct.clear()

    def close(self) -> None:
        self.storage.close()
        self.direct.close()


@pytest.fixture(params=["object", "redis"])
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    if request.param == "object":
        port = urlsplit(request.getfixturevalue("endpoint")).port
        opened = Far(port, lambda port, timeout_s: bucket_at(f"http://127.0.0.1:{port}", timeout_s=timeout_s))
    else:
        opened = Far(request.getfixturevalue("redis_port"), redis_at)
    with contextlib.closing(opened):
        yield opened


def in_time(call: Callable[[], object]) -> object:
    """The call's result, which must not come much later than the timeout, as machines go."""
    start_s = time.monotonic()
    result = call()
    assert time.monotonic() - start_s < LIMIT_S + 20
    return result


def eventually(call: Callable[[], object], wanted: object) -> None:
    """The call gives this in the end; on a busy machine a call that should work can be too late as well."""
    until_s = time.monotonic() + 30
    while (found := call()) != wanted:
        assert time.monotonic() < until_s, found


def test_a_silent_server_is_a_miss_in_time(far: Far) -> None:
    put(far.direct, [1])
    for call, answer in {
        lambda: put(far.storage, [1, 2]): [False, False],
        lambda: get(far.storage, [1, 2]): [Fetch.UNAVAILABLE] * 2,
        lambda: has(far.storage, range(3)): [],
    }.items():
        far.line.pause_s = 0.0
        eventually(lambda: has(far.storage, range(3)), [1])
        far.line.pause_s = None
        assert in_time(call) == answer
    assert in_time(far.storage.suffixes) == set()
    assert far.storage.stats().unavailable > 0


def test_a_server_that_sends_drop_by_drop_is_a_miss_in_time(far: Far) -> None:
    put(far.direct, [1], size=300_000)
    eventually(lambda: has(far.storage, range(3)), [1])
    far.line.piece_bytes, far.line.pause_s = 1000, 0.05
    assert in_time(lambda: get(far.storage, [1], size=300_000)) == [Fetch.UNAVAILABLE]


def test_an_answer_that_comes_late_does_not_touch_the_buffer(far: Far) -> None:
    put(far.direct, [1])
    eventually(lambda: has(far.storage, range(3)), [1])
    far.line.pause_s = None
    buffer = bytearray(b"mine" * 1250)
    assert far.storage.get([key_of(1)], into=[buffer]) == [Fetch.UNAVAILABLE]
    far.line.pause_s = 0.0
    time.sleep(0.1)
    assert buffer == b"mine" * 1250


def test_a_storage_that_goes_away_comes_back_with_what_it_had(far: Far, caplog: pytest.LogCaptureFixture) -> None:
    put(far.direct, [1])
    eventually(lambda: get(far.storage, [1]), [Fetch.HIT])
    far.line.cut()
    assert get(far.storage, [1]) == [Fetch.UNAVAILABLE]
    assert in_time(lambda: put(far.storage, [2])) == [False]
    assert far.storage.suffixes() == set()
    assert not far.storage.is_up
    with pytest.raises(ConfigError, match="is unreachable"):
        far.storage.scrub()
    far.line.mend()
    eventually(lambda: get(far.storage, [1]), [Fetch.HIT])
    assert len([message for message in caplog.messages if "cannot be reached" in message]) == 1


def test_nobody_at_the_address_is_an_error_of_the_backend_and_a_miss_behind_the_guard() -> None:
    for opening in (lambda: bucket_at(f"http://127.0.0.1:{free_port()}"), lambda: redis_at(free_port())):
        with pytest.raises(OSError):
            opening()
    for url in (f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}", f"redis://127.0.0.1:{free_port()}/0"):
        with contextlib.closing(open_storage(url, timeout_s=LIMIT_S)) as storage:
            assert not storage.is_up
            assert get(storage, [1]) == [Fetch.UNAVAILABLE]
            assert put(storage, [1]) == [False]
            assert storage.stats().unavailable == 2


def test_a_bound_that_is_not_ours_is_not_resized(far: Far) -> None:
    with pytest.raises(ConfigError, match=r"lifecycle rules|maxmemory"):
        far.direct.resize(5 * MIB)


def test_two_writers_see_each_other(far: Far) -> None:
    put(far.direct, [1, 1001])
    eventually(lambda: put(far.storage, [1, 2]), [True, True])
    assert get(far.direct, [2]) == [Fetch.HIT]
    far.line.cut()  # buckets are listed twice a minute, or when they are opened
    assert has(far.storage, range(3)) == []
    far.line.mend()
    eventually(far.storage.suffixes, {key_of(1)[-24:], key_of(1001)[-24:]})


# Buckets.


def test_a_bucket_that_is_not_there_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="no such bucket"):
        open_storage(f"s3://another-bucket/x?endpoint={endpoint}&region=us-east-1", timeout_s=5)


class Strict(http.server.BaseHTTPRequestHandler):
    """A server of buckets that lets nobody write, and at first nobody read."""

    may_list = False

    def do_GET(self) -> None:
        self._answer(200 if self.may_list else 403, b"<ListBucketResult></ListBucketResult>")

    def do_HEAD(self) -> None:
        self._answer(404)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(403)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_bucket_that_refuses_us_is_a_setting_to_change_and_one_that_refuses_writes_can_be_read() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strict) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match="credentials"):
            bucket_at(address, timeout_s=5)
        Strict.may_list = True
        with contextlib.closing(bucket_at(address, timeout_s=5)) as storage:
            assert put(storage, [1]) == [False]
            assert storage.stats().io_errors == 1
        server.shutdown()


def test_what_others_keep_under_the_prefix_is_left_alone(endpoint: str) -> None:
    medium = BucketMedium(endpoint)
    theirs = ["readme.txt", "objects-1/readme.txt", "objects-1/notes/of mine", "objects-12/ab/cd"]
    for path in theirs:
        obstore.put(medium.bucket, path, b"precious")
    with contextlib.closing(medium.open()) as storage:
        put(storage, [1])
        assert storage.suffixes() == {key_of(1)[-24:]}
        assert storage.scrub().checked == 1
        storage.clear()
        assert has(storage, range(2)) == []
    assert sorted(item["path"] for item in obstore.list(medium.bucket).collect()) == sorted(theirs)


def test_a_foreign_object_in_our_place_is_told_and_replaced(endpoint: str) -> None:
    medium = BucketMedium(endpoint)
    with contextlib.closing(medium.open()) as storage:
        obstore.put(medium.bucket, medium.path_of(key_of(1)), b"PK\x03\x04" * (5096 // 4))
        obstore.put(medium.bucket, medium.path_of(key_of(2)), b"short")
        assert get(storage, [1, 2]) == [Fetch.FOREIGN, Fetch.CORRUPT]
        assert put(storage, [1, 2]) == [True] * 2
        assert get(storage, [1, 2]) == [Fetch.HIT] * 2


# Redis.


def test_a_full_server_that_evicts_keeps_the_newest(tmp_path: Path) -> None:
    settings = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(tmp_path, *settings) as port, contextlib.closing(RedisMedium(port).open()) as storage:
        for number in range(200):
            assert put(storage, [number], size=100_000) == [True]
        # The server may go on evicting for a while, and may evict the set of suffixes as well.
        eventually(lambda: storage.stats().objects - len(has(storage, range(200))) - bool(storage.suffixes()), 0)
        left = has(storage, range(200))
        assert 0 < len(left) < 90
        assert left[-1] == 199
        stats = storage.stats()
        assert stats.bytes_limit == 8 * MIB
        assert 0 < stats.bytes_used <= 10 * MIB
        assert stats.evicted >= 200 - len(left)


def test_a_full_server_that_evicts_nothing_is_a_counter_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *settings) as port, contextlib.closing(RedisMedium(port).open()) as storage:
        stored = [put(storage, [number], size=100_000)[0] for number in range(120)]
        assert stored[:40] == [True] * 40
        assert stored[-1] is False
        assert storage.stats().disk_full == stored.count(False)
        assert get(storage, [0, 119], size=100_000) == [Fetch.HIT, Fetch.MISSING]
    assert "evicts nothing" in caplog.text


def test_a_server_that_refuses_us_is_a_setting_to_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, "--requirepass", "p@5s/w0rd", "--databases", "2") as port:
        for user in ("", ":wrong@"):
            with pytest.raises(ConfigError, match="denies access"):
                open_storage(f"redis://{user}127.0.0.1:{port}/0", timeout_s=5)
        with pytest.raises(ConfigError, match="DB index"):
            open_storage(f"redis://:p%405s%2Fw0rd@127.0.0.1:{port}/7", timeout_s=5)
        with contextlib.closing(open_storage(f"redis://:p%405s%2Fw0rd@127.0.0.1:{port}/1", timeout_s=5)) as storage:
            assert put(storage, [1]) == [True]
            assert storage.name == f"redis://127.0.0.1:{port}/1"
    assert "w0rd" not in caplog.text


def test_what_others_keep_in_the_database_is_left_alone(redis_port: int) -> None:
    medium, other = RedisMedium(redis_port), RedisMedium(redis_port)
    with contextlib.closing(medium.open()) as storage, contextlib.closing(other.open()) as theirs:
        put(theirs, [1])
        put(storage, list(range(5)))
        medium.client.set("a xprefixxy", "theirs")  # what the prefix would match as a pattern
        storage.clear()
        assert has(storage, range(5)) == []
        assert has(theirs, range(5)) == [1]
        assert medium.client.get("a xprefixxy") == b"theirs"


def test_a_value_of_another_kind_or_cut_short_is_told_and_replaced(redis_port: int) -> None:
    medium = RedisMedium(redis_port)
    with contextlib.closing(medium.open()) as storage:
        put(storage, [2])
        medium.client.rpush(medium.name_of(key_of(1)), "a list")
        medium.client.set(medium.name_of(key_of(2)), medium.client.get(medium.name_of(key_of(2)))[:2000])
        medium.client.set(medium.name_of(key_of(3)), b"PK\x03\x04" * 30)
        assert get(storage, [1, 2, 3]) == [Fetch.MISSING, Fetch.CORRUPT, Fetch.FOREIGN]
        assert put(storage, [1, 2, 3]) == [True] * 3
        assert get(storage, [1, 2, 3]) == [Fetch.HIT] * 3


# Workers.


def test_memory_that_is_reused_before_a_late_write_has_read_it_is_never_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = ObjectStorage(MemoryStore(), name="late", timeout_s=0.2)
    size_of, asked = storage._size, threading.Event()

    def late(key: bytes) -> int | None:
        asked.wait(20)
        return size_of(key)

    monkeypatch.setattr(storage, "_size", late)
    payload, key = bytearray(b"A" * 4096), key_of(1)
    with pytest.raises(TimeoutError):
        storage.put([key], payloads=[payload], checksums=[checksum_of(payload)])
    payload[:] = b"B" * 4096
    monkeypatch.setattr(storage, "_size", size_of)
    asked.set()
    storage.close()
    found = bytearray(4096)
    again = ObjectStorage(storage._bucket, name="late", timeout_s=20)
    assert again.get([key], into=[found])[0] in (Fetch.CORRUPT, Fetch.MISSING)
    again.close()


def test_requests_run_side_by_side_and_results_keep_their_order() -> None:
    with contextlib.closing(Workers(4, timeout_s=5, name="test")) as workers:
        barrier = threading.Barrier(4, timeout=5)
        assert workers.run([lambda i=i: (barrier.wait(), i)[1] for i in range(4)]) == [0, 1, 2, 3]


def test_requests_that_have_not_begun_in_time_never_do() -> None:
    begun, leave = list[int](), threading.Event()

    def request(number: int) -> None:
        begun.append(number)
        assert leave.wait(30)

    with contextlib.closing(Workers(1, timeout_s=0.1, name="test")) as workers:
        with pytest.raises(TimeoutError, match=r"within 0.1 s"):
            workers.run([lambda i=i: request(i) for i in range(3)])
        leave.set()
        assert workers.run([lambda: "free"]) == ["free"]
    assert begun in ([], [0])


def test_clients_are_loaded_only_for_a_url_that_needs_them() -> None:
    code = "import sys, raycache.storage.open; print([m for m in ('redis', 'obstore') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
