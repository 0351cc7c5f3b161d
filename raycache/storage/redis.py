"""Storage in a Redis or Valkey server: one value per object, header and payload (base.py).

    <prefix>:o1:<key>        an object
    <prefix>:suffixes1       set of key suffixes

The server evicts: set `maxmemory` and `maxmemory-policy allkeys-lru` there. Reads and `touch` count as uses; in a
batch, parents are used after their children, so they are evicted later. Redis Cluster is not supported.
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
_BATCH_BYTES = 8 << 20  # per round trip
_BATCH_KEYS = 1000


@dataclass(frozen=True)
class RedisServer:
    """Address and credentials of a server.

    Attributes:
        database: number.
        username, password: empty for none.
        is_tls: use TLS, and verify the server's certificate.
    """

    host: str
    port: int
    database: int
    username: str = ""
    password: str = ""
    is_tls: bool = False


class RedisClient:
    """Sends requests to a server, each in one round trip; connects on demand and does not retry.

    Args:
        timeout_s: limit of each request.
    Raises:
        OSError: from each method: the server cannot be reached, does not reply in time or denies access.
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
        """Return the reply to a command."""
        with _os_errors():
            return self._redis.execute_command(*command)

    def ask_all(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the replies to commands; a failed command's is the server's error."""
        with _os_errors(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def info(self) -> dict[str, Any]:
        """The server's memory and eviction statistics; empty if it denies INFO."""
        try:
            with _os_errors():
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
    """Objects in a database of a server, shared by any number of processes.

    Args:
        name: shown in messages.
        prefix: start of all keys.
        timeout_s: limit of each call.
    Raises:
        ConfigError: the server denies access, or has no such database.
        OSError: the server cannot be reached.
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
            raise ConfigError(f"storage {name} denies access: {error}") from error
        self._evicted_before = info.get("evicted_keys", 0)
        if info.get("maxmemory_policy") == "noeviction":
            _LOG.warning(
                "storage %s evicts nothing, so a full one stores nothing more; "
                "set maxmemory and maxmemory-policy allkeys-lru on the server",
                name,
            )

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """Store objects.

        Raises:
            ValueError: a key is empty or too long, or a payload is empty.
            OSError: the server did not reply in time.
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
            for i, error in zip(parts[which], done, strict=True):
                stored[i] = error is None
                num_full += isinstance(error, exceptions.OutOfMemoryError)
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
        """Return zeros: checksums would take a request to the server."""
        return [0] * len(keys)

    def suffixes(self) -> set[bytes]:
        """Key suffixes; a set that the server evicted is refilled by later puts. Raises OSError."""
        (members,) = self._workers.run([partial(self._client.ask, "SMEMBERS", self._suffixes_key)])
        return set(members)

    def changes(self, since: str) -> None:
        """Return None: others store, and the server evicts, without telling."""

    def stats(self) -> StorageStats:
        """Statistics; `objects` counts the whole database, `bytes_*` and `evicted` the server. Raises OSError."""
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
        """Raise ConfigError: the server's maxmemory is the limit."""
        raise ConfigError("the size of a Redis server is not limited by RayCache; set maxmemory on the server")

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
        """Sizes of values in bytes; 0: not stored."""
        return [length if isinstance(length, int) else 0 for length in self._ask_each("STRLEN", keys)]

    def _ask_each(self, command: str, keys: Sequence[bytes]) -> list[Any]:
        """Send one command per key, the first key last, and return the replies by key; some may be errors."""
        names = [self._name_of(key) for key in reversed(keys)]
        parts = [names[first : first + _BATCH_KEYS] for first in range(0, len(names), _BATCH_KEYS)]
        replies = self._workers.run(
            [partial(self._client.ask_all, [(command, name) for name in part]) for part in parts]
        )
        return [reply for part in replies for reply in part][::-1]

    def _info(self) -> dict[str, Any]:
        (info,) = self._workers.run([self._client.info])
        return info

    def _pages(self) -> Iterator[list[bytes]]:
        """Iterate over all stored keys, in batches; a key may come twice."""
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

    # Requests, each run in a worker thread.

    def _set(self, objects: Sequence[tuple[bytes, memoryview, int]]) -> list[RedisError | None]:
        """Store (key, payload, checksum or 0); returns the error of each, or None."""
        commands: list[tuple[Any, ...]] = [("SADD", self._suffixes_key, *{suffix_of(key) for key, *_ in objects})]
        with self._scratch.hold(sum(HEADER_BYTES + len(payload) for _, payload, _ in objects)) as rest:
            for key, payload, checksum in objects:
                packed, rest = rest[: HEADER_BYTES + len(payload)], rest[HEADER_BYTES + len(payload) :]
                pack_object(key, payload, into=packed, checksum=checksum)
                commands.append(("SET", self._name_of(key), packed))
            _, *replies = self._client.ask_all(commands)
        return [reply if isinstance(reply, RedisError) else None for reply in replies]

    def _get(self, keys: Sequence[bytes], lengths: Sequence[int]) -> list[memoryview | Fetch]:
        values = self._client.ask("MGET", *map(self._name_of, keys))
        payloads, bad = list[memoryview | Fetch](), list[bytes]()
        for key, value, length in zip(keys, values, lengths, strict=True):
            payload = Fetch.MISSING if value is None else read_object(value, key=key, num_bytes=length)
            payloads.append(payload)
            # The next `put` would take an object of the right size for intact.
            if value is not None and isinstance(payload, Fetch) and len(value) == HEADER_BYTES + length:
                bad.append(self._name_of(key))
        if bad:
            with suppress(OSError):
                self._client.ask("UNLINK", *bad)
        return payloads


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert the client's exceptions to subclasses of OSError."""
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
    """Split items into batches of about `_BATCH_BYTES`; `lengths` is indexed by item."""
    batch, num_bytes = list[int](), 0
    for item in items:
        batch.append(item)
        num_bytes += lengths[item]
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_KEYS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
