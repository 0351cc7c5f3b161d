"""Storage in a Redis or Valkey server: one value per object, header and payload (base.py).

    <prefix>:o1:<key>        an object
    <prefix>:suffixes1       a set, the suffixes of the keys

What leaves when memory is full is the server's to decide: give it `maxmemory` and `maxmemory-policy allkeys-lru`. Reads
and `touch` count as uses there, and the parents of a batch are used last. One server, not a cluster of them.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis import Redis, RedisError, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import Buffer
from raycache.storage.base import (
    FORMAT_VERSION,
    HEADER_BYTES,
    Scrub,
    StorageStats,
    check_objects,
    flat,
    pack_object,
    read_object,
    suffix_of,
)
from raycache.storage.workers import Scratch, Workers

_LOG = logging.getLogger(__name__)
_NUM_THREADS = 4  # connections
_BATCH_BYTES = 8 << 20  # of one round trip
_BATCH_KEYS = 1000


@dataclass(frozen=True)
class RedisServer:
    """Where a server is and who we are there.

    Attributes:
        host, port: of the server.
        database: number of it.
        username, password: empty for none.
        is_tls: encrypt, and check the server's certificate.
    """

    host: str
    port: int
    database: int
    username: str = ""
    password: str = ""
    is_tls: bool = False


class RedisClient:
    """Requests to a server, each in one round trip. It connects when it is asked something, and tries once.

    Args:
        server: to connect to.
        timeout_s: of each request.
    Raises:
        OSError: from each method, if the server cannot be reached, does not answer in time or refuses us.
    """

    def __init__(self, server: RedisServer, *, timeout_s: float) -> None:
        self._redis = Redis(
            host=server.host,
            port=server.port,
            db=server.database,
            username=server.username or None,
            password=server.password or None,
            ssl=server.is_tls,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    def ask(self, *command: Any) -> Any:
        """The answer to a command."""
        with _answers():
            return self._redis.execute_command(*command)

    def ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers to commands; errors of the server are among them."""
        with _answers(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        return answers

    def info(self) -> dict[str, Any]:
        """What the server says of its memory and evictions; empty where it does not tell us."""
        try:
            with _answers():
                self._redis.ping()
                return {**self._redis.info("memory"), **self._redis.info("stats")}
        except PermissionError as error:
            if isinstance(error.__cause__, exceptions.NoPermissionError):
                return {}
            raise

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


class RedisStorage:
    """Objects in a database of a server, for any number of processes.

    Args:
        server: to connect to.
        name: for messages.
        prefix: of all keys there.
        timeout_s: of each call.
    Raises:
        ConfigError: the server refuses us, or has no such database.
        OSError: it cannot be reached.
    """

    def __init__(self, server: RedisServer, *, name: str, prefix: str, timeout_s: float) -> None:
        self._prefix = f"{prefix}:o{FORMAT_VERSION}:".encode()
        self._suffixes_key = f"{prefix}:suffixes{FORMAT_VERSION}".encode()
        self._counts = StorageStats()
        self._lock = threading.Lock()
        self._client = RedisClient(server, timeout_s=timeout_s)
        self._workers, self._scratch = Workers(_NUM_THREADS, timeout_s=timeout_s, name=name), Scratch()
        try:
            info = self._info()
        except (PermissionError, FileNotFoundError) as error:
            raise ConfigError(f"storage {name} refuses us: {error}") from error
        self._evicted_before = info.get("evicted_keys", 0)
        if info.get("maxmemory_policy") == "noeviction":
            _LOG.warning(
                "storage %s evicts nothing and takes nothing more when it is full; "
                "set maxmemory and maxmemory-policy allkeys-lru on the server",
                name,
            )

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """See `Storage.put`.

        Raises:
            ValueError: a key is empty or too long, or a payload is empty.
            OSError: the server did not answer, or not in time.
        """
        views = [flat(payload) for payload in payloads]
        check_objects(keys, views)
        lengths = self._lengths(keys)
        stored = [length == HEADER_BYTES + len(view) for length, view in zip(lengths, views, strict=True)]
        num_known = sum(stored)
        new = [i for i in reversed(range(len(keys))) if not stored[i]]
        parts = list(_batches(new, [len(view) for view in views]))
        objects = list(zip(keys, views, checksums or [0] * len(keys), strict=True))
        requests = [partial(self._set, [objects[i] for i in part]) for part in parts]
        num_full = 0
        for which, done in self._workers.each(requests):
            for i, answer in zip(parts[which], done, strict=True):
                stored[i] = answer is None
                num_full += isinstance(answer, exceptions.OutOfMemoryError)
        with self._lock:
            self._counts.known += num_known
            self._counts.stored += sum(stored) - num_known
            self._counts.disk_full += num_full
            self._counts.io_errors += len(stored) - sum(stored) - num_full
        return stored

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        """Read objects. Raises OSError, like `put`."""
        found = [Fetch.MISSING] * len(keys)
        views = [flat(buffer) for buffer in into]
        lengths = [len(view) for view in views]
        parts = list(_batches(list(reversed(range(len(keys)))), lengths))
        requests = [partial(self._get, [keys[i] for i in part], [lengths[i] for i in part]) for part in parts]
        for which, payloads in self._workers.each(requests):
            for i, payload in zip(parts[which], payloads, strict=True):
                if isinstance(payload, Fetch):
                    found[i] = payload
                else:
                    views[i][:] = payload
                    found[i] = Fetch.HIT
        with self._lock:
            self._counts.count(found)
        return found

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        """Whether objects exist. Raises OSError, like `put`."""
        command = "TOUCH" if touch else "EXISTS"
        return [bool(number) for number in self._ask_each(command, keys)]

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        """None known, as that would need a request to the server."""
        return [0] * len(keys)

    def suffixes(self) -> set[bytes]:
        """Key suffixes; if the server evicts the set, it fills again as objects are put. Raises OSError."""
        (members,) = self._workers.run([partial(self._client.ask, "SMEMBERS", self._suffixes_key)])
        return set(members)

    def stats(self) -> StorageStats:
        """Statistics; stored and evicted objects are those of the whole database and server. Raises OSError."""
        info = self._info()
        (num_objects,) = self._workers.run([partial(self._client.ask, "DBSIZE")])
        with self._lock:
            return replace(
                self._counts,
                objects=num_objects,
                bytes_used=info.get("used_memory", 0),
                bytes_limit=info.get("maxmemory", 0),
                evicted=info.get("evicted_keys", 0) - self._evicted_before,
            )

    def close(self) -> None:
        self._workers.close()
        self._client.close()

    def clear(self) -> None:
        """Delete everything in parts, each within the timeout. Raises OSError, like `put`."""
        for keys in self._pages():
            self._workers.run([partial(self._client.ask, "UNLINK", *map(self._name_of, keys))])
        self._workers.run([partial(self._client.ask, "UNLINK", self._suffixes_key)])

    def resize(self, max_bytes: int) -> None:
        """See `Storage.resize`.

        Raises:
            ConfigError: always; a server's bound is its own.
        """
        raise ConfigError("a Redis server is bounded by its maxmemory, not by RayCache; set it there")

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        """Check objects in bounded parts, each within the timeout. Raises OSError, like `put`."""
        start_s, checked, num_bytes, bad, is_whole = time.monotonic(), 0, 0, 0, True
        for keys in self._pages():
            if time.monotonic() >= until_s:
                is_whole = False
                break
            lengths = [max(0, length - HEADER_BYTES) for length in self._lengths(keys)]
            for part in _batches(list(range(len(keys))), lengths):
                request = partial(self._get, [keys[i] for i in part], [lengths[i] for i in part])
                (payloads,) = self._workers.run([request])
                checked, num_bytes = checked + len(part), num_bytes + sum(lengths[i] for i in part)
                bad += sum(payload in (Fetch.CORRUPT, Fetch.FOREIGN) for payload in payloads)
        with self._lock:
            self._counts.corrupt += bad
        return Scrub(checked, num_bytes, bad, time.monotonic() - start_s, is_whole)

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the values, 0 where there is none."""
        return [length if isinstance(length, int) else 0 for length in self._ask_each("STRLEN", keys)]

    def _ask_each(self, command: str, keys: Sequence[bytes]) -> list[Any]:
        """One command for each key, the first key last; an answer can be an error of the server."""
        names = [self._name_of(key) for key in reversed(keys)]
        parts = [names[first : first + _BATCH_KEYS] for first in range(0, len(names), _BATCH_KEYS)]
        answers = self._workers.run(
            [partial(self._client.ask_all, [(command, name) for name in part]) for part in parts]
        )
        return [answer for part in answers for answer in part][::-1]

    def _info(self) -> dict[str, Any]:
        """What the server says of its memory and evictions; empty where it does not tell us."""
        (info,) = self._workers.run([self._client.info])
        return info

    def _pages(self) -> Iterator[list[bytes]]:
        """All keys of ours, in parts; some may come twice."""
        pattern, cursor = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*", 0
        while True:
            request = partial(self._client.ask, "SCAN", cursor, "MATCH", pattern, "COUNT", _BATCH_KEYS)
            ((cursor, names),) = self._workers.run([request])
            if names:
                yield [name.removeprefix(self._prefix) for name in names]
            if not cursor:
                return

    def _name_of(self, key: bytes) -> bytes:
        return self._prefix + key

    # Requests. Each runs in a thread of the workers.

    def _set(self, objects: Sequence[tuple[bytes, memoryview, int]]) -> list[RedisError | None]:
        """Store (key, payload, checksum or 0)."""
        commands: list[tuple[Any, ...]] = [("SADD", self._suffixes_key, *{suffix_of(key) for key, *_ in objects})]
        with self._scratch.hold(sum(HEADER_BYTES + len(payload) for _, payload, _ in objects)) as rest:
            for key, payload, checksum in objects:
                packed, rest = rest[: HEADER_BYTES + len(payload)], rest[HEADER_BYTES + len(payload) :]
                pack_object(key, payload, into=packed, checksum=checksum)
                commands.append(("SET", self._name_of(key), packed))
            _, *answers = self._client.ask_all(commands)
        return [answer if isinstance(answer, RedisError) else None for answer in answers]

    def _get(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[memoryview | Fetch]:
        values = self._client.ask("MGET", *map(self._name_of, keys))
        payloads, bad = list[memoryview | Fetch](), list[bytes]()
        for key, value, length in zip(keys, values, lengths, strict=True):
            payload = Fetch.MISSING if value is None else read_object(value, key=key, num_bytes=length)
            payloads.append(payload)
            # What has the right size would be taken for known by the next `put`.
            if value is not None and isinstance(payload, Fetch) and len(value) == HEADER_BYTES + length:
                bad.append(self._name_of(key))
        if bad:
            with suppress(OSError):
                self._client.ask("UNLINK", *bad)
        return payloads


@contextmanager
def _answers() -> Iterator[None]:
    """Where the client's errors get our names: all of them are OSError from here on."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise PermissionError(str(error)) from error
    except exceptions.TimeoutError as error:
        raise TimeoutError(str(error)) from error
    except RedisError as error:
        if "DB index" in str(error):
            raise FileNotFoundError(str(error)) from error
        raise ConnectionError(str(error)) from error


def _batches(items: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Items in parts of about `_BATCH_BYTES`; `lengths` are by item."""
    batch, num_bytes = list[int](), 0
    for item in items:
        batch.append(item)
        num_bytes += lengths[item]
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_KEYS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
