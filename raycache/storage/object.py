"""Storage in an object store: S3 and compatible servers, Google Cloud Storage, Azure Blob Storage.

    prefix/objects-1/<suffix of the key in hex>/<the rest in hex>        header and payload (base.py)

The suffix of a key, its row format and box, comes first in the path, so a single listing returns all stored suffixes.

There is no index and no size limit: the bucket's lifecycle rules decide what expires, and neither reads nor `touch`
count as uses. The requests of one call run concurrently, so a child can be stored without its parent; fetching the
prefix then ends before it.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore, from_url

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import Buffer
from raycache.storage.base import (
    FORMAT_VERSION,
    HEADER_BYTES,
    SUFFIX_BYTES,
    Scrub,
    StorageStats,
    check_objects,
    flat,
    pack_object,
    read_object,
    suffix_of,
)
from raycache.storage.workers import Scratch, Workers

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

_OBJECTS = f"objects-{FORMAT_VERSION}"
_NUM_THREADS = 16
_NUM_KEY_LOCKS = 256
_SUFFIXES_FOR_S = 30.0
_PAGE = 1000
_SCRUB_BYTES = 64 << 20


class _Put(Enum):
    """Result of putting one object."""

    STORED = "stored"
    KNOWN = "known"
    FAILED = "failed"


def open_bucket(url: str, *, endpoint: str, region: str, is_anonymous: bool, timeout_s: float) -> ObjectStore:
    """Create a client for s3://, gs:// or az:// with credentials from the environment; does not connect yet.

    Args:
        url: bucket and prefix.
        endpoint: URL of an S3-compatible server; empty: the provider's. http:// is not encrypted.
        region: empty: from the environment.
        is_anonymous: whether to send unsigned requests.
        timeout_s: limit of each request, including connecting; requests are not retried.
    Raises:
        ConfigError: the client rejects the URL or the environment's settings.
    """
    limit = timedelta(seconds=timeout_s)
    client: ClientConfig = {"timeout": limit, "connect_timeout": limit, "allow_http": endpoint.startswith("http://")}
    settings: S3Config = {}
    if endpoint:
        settings["endpoint"] = endpoint
    if region:
        settings["region"] = region
    if is_anonymous:
        settings["skip_signature"] = True
    try:
        return from_url(
            url,
            config=settings or None,
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": limit},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"storage {url} cannot be used: {_first_line(error)}") from error


class ObjectStorage:
    """Objects under a prefix of a bucket, shared by any number of processes.

    Args:
        bucket: client that adds the prefix.
        name: shown in errors.
        timeout_s: limit of each call.
    Raises:
        ConfigError: the bucket does not exist, or the credentials do not permit listing it.
        OSError: the bucket cannot be reached.
    """

    def __init__(self, bucket: ObjectStore, *, name: str, timeout_s: float) -> None:
        self._bucket = bucket
        self._counts = StorageStats()
        self._lock = threading.Lock()
        self._key_locks = [threading.Lock() for _ in range(_NUM_KEY_LOCKS)]  # no object is written twice at once
        self._suffixes, self._suffixes_until_s = set[bytes](), 0.0
        self._workers, self._scratch = Workers(_NUM_THREADS, timeout_s=timeout_s, name=name), Scratch()
        try:
            self.suffixes()
        except PermissionError as error:
            raise ConfigError(
                f"storage {name}: the credentials in the environment do not permit listing it ({error}); "
                "set others, or add ?anonymous=true for a public bucket"
            ) from error
        except FileNotFoundError as error:
            raise ConfigError(f"storage {name}: there is no such bucket; create it or name another") from error

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        """Store objects.

        Raises:
            ValueError: a key is empty or too long, or a payload is empty.
            OSError: the bucket did not reply in time.
        """
        views = [flat(payload) for payload in payloads]
        check_objects(keys, views)
        objects = zip(keys, views, checksums or [0] * len(keys), strict=True)
        done = self._workers.run([partial(self._put, *parts) for parts in objects])
        with self._lock:
            self._counts.stored += done.count(_Put.STORED)
            self._counts.known += done.count(_Put.KNOWN)
            self._counts.io_errors += done.count(_Put.FAILED)
            self._suffixes |= {suffix_of(key) for key, put in zip(keys, done, strict=True) if put is not _Put.FAILED}
        return [put is not _Put.FAILED for put in done]

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        """Read objects. Raises OSError, like `put`."""
        found = [Fetch.MISSING] * len(keys)
        views = [flat(buffer) for buffer in into]
        requests = [partial(self._get, key, len(view)) for key, view in zip(keys, views, strict=True)]
        for i, payload in self._workers.each(requests):
            if isinstance(payload, Fetch):
                found[i] = payload
            else:
                views[i][:] = payload
                found[i] = Fetch.HIT
        with self._lock:
            self._counts.count(found)
        return found

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        """Whether objects exist; `touch` has no effect. Raises OSError, like `put`."""
        sizes = self._workers.run([partial(self._size, key) for key in keys])
        return [size is not None for size in sizes]

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        """Return zeros: checksums would take requests to the bucket."""
        return [0] * len(keys)

    def suffixes(self) -> set[bytes]:
        """Key suffixes, listed again after half a minute. Raises OSError, like `put`."""
        with self._lock:
            if time.monotonic() < self._suffixes_until_s:
                return set(self._suffixes)
        (listed,) = self._workers.run([self._list_suffixes])
        with self._lock:
            self._suffixes, self._suffixes_until_s = listed, time.monotonic() + _SUFFIXES_FOR_S
            return set(listed)

    def changes(self, since: str) -> None:
        """Return None: others store, and the server evicts, without telling."""

    def stats(self) -> StorageStats:
        """Statistics; the contents of the bucket are not counted."""
        with self._lock:
            return replace(self._counts)

    def close(self) -> None:
        self._workers.close()

    def clear(self) -> None:
        """Delete everything, one listing page at a time, each within the timeout. Raises OSError, like `put`."""
        for page in self._pages():
            self._workers.run([partial(self._delete, [path for path, _ in page])])
        with self._lock:
            self._suffixes.clear()

    def resize(self, max_bytes: int) -> None:
        """Raise ConfigError: lifecycle rules limit a bucket."""
        raise ConfigError("the size of a bucket is not limited by RayCache; set an expiry in its lifecycle rules")

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        """Check objects in bounded parts, each within the timeout. Raises OSError, like `put`."""
        start_s, sizes, bad, is_whole = time.monotonic(), list[int](), 0, True
        for batch in _batches(self._pages()):
            if time.monotonic() >= until_s:
                is_whole = False
                break
            requests = [partial(self._get, _key_of(path), size - HEADER_BYTES) for path, size in batch]
            bad += sum(found in (Fetch.CORRUPT, Fetch.FOREIGN) for _, found in self._workers.each(requests))
            sizes += [max(0, size - HEADER_BYTES) for _, size in batch]
        with self._lock:
            self._counts.corrupt += bad
        return Scrub(len(sizes), sum(sizes), bad, time.monotonic() - start_s, is_whole)

    # Requests, each run in a worker thread.

    def _put(self, key: bytes, payload: memoryview, checksum: int) -> _Put:
        with self._key_locks[hash(key) % _NUM_KEY_LOCKS]:
            return self._put_alone(key, payload, checksum)

    def _put_alone(self, key: bytes, payload: memoryview, checksum: int) -> _Put:
        if self._size(key) == HEADER_BYTES + len(payload):
            return _Put.KNOWN
        try:
            with self._scratch.hold(HEADER_BYTES + len(payload)) as packed, _os_errors():
                pack_object(key, payload, into=packed, checksum=checksum)
                obstore.put(self._bucket, _path_of(key), packed, use_multipart=False)
        except PermissionError:
            return _Put.FAILED  # the credentials may only permit reading
        return _Put.STORED

    def _get(self, key: bytes, num_bytes: int) -> memoryview | Fetch:
        path = _path_of(key)
        try:
            with _os_errors():
                reply = obstore.get(self._bucket, path)
                if reply.meta["size"] > HEADER_BYTES + num_bytes:
                    return Fetch.FOREIGN
                data = memoryview(reply.bytes())
        except FileNotFoundError:
            return Fetch.MISSING
        payload = read_object(data, key=key, num_bytes=num_bytes)
        # The next `put` would take an object of the right size for intact.
        if isinstance(payload, Fetch) and len(data) == HEADER_BYTES + num_bytes:
            with suppress(OSError):
                self._delete([path])
        return payload

    def _size(self, key: bytes) -> int | None:
        try:
            with _os_errors():
                return obstore.head(self._bucket, _path_of(key))["size"]
        except FileNotFoundError:
            return None

    def _delete(self, paths: Sequence[str]) -> None:
        with _os_errors():
            obstore.delete(self._bucket, paths)

    def _list_suffixes(self) -> set[bytes]:
        with _os_errors():
            folders = obstore.list_with_delimiter(self._bucket, _OBJECTS)["common_prefixes"]
        names = [folder.rpartition("/")[2] for folder in folders]
        return {bytes.fromhex(name) for name in names if _is_hex(name)}

    def _pages(self) -> Iterator[list[tuple[str, int]]]:
        """Iterate over listing pages: (path, bytes) of each object in our key format."""
        with _os_errors():
            for page in obstore.list(self._bucket, _OBJECTS, chunk_size=_PAGE):
                yield [(item["path"], item["size"]) for item in page if _is_ours(item["path"])]


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert the client's exceptions to subclasses of OSError."""
    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(_first_line(error)) from error
    except BaseError as error:
        # Listings raise no specific exception for these.
        if re.search(r"status code: 40[13]\b", str(error)):
            raise PermissionError(_first_line(error)) from error
        if "NoSuchBucket" in str(error):
            raise FileNotFoundError(_first_line(error)) from error
        raise ConnectionError(_first_line(error)) from error


def _batches(pages: Iterator[list[tuple[str, int]]]) -> Iterator[list[tuple[str, int]]]:
    """Split pages into batches of about `_SCRUB_BYTES`."""
    for page in pages:
        batch, num_bytes = list[tuple[str, int]](), 0
        for path, size in page:
            batch.append((path, size))
            num_bytes += size
            if num_bytes >= _SCRUB_BYTES:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch


def _path_of(key: bytes) -> str:
    rest = key[:-SUFFIX_BYTES].hex()
    return f"{_OBJECTS}/{suffix_of(key).hex()}/{rest or '-'}"


def _key_of(path: str) -> bytes:
    suffix, _, rest = path.partition(f"{_OBJECTS}/")[2].partition("/")
    return bytes.fromhex(rest.removesuffix("-") + suffix)


def _is_ours(path: str) -> bool:
    suffix, _, rest = path.partition(f"{_OBJECTS}/")[2].partition("/")
    return _is_hex(suffix) and _is_hex(rest.removesuffix("-"))


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and not text.strip("0123456789abcdef")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
