"""Opens storages by URL.

    file:///var/cache/raycache?size=50GiB
    s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1     credentials from AWS_*, or the instance role
    gs://bucket/prefix, az://container/prefix                              credentials from GOOGLE_* and AZURE_*
    redis://user:password@127.0.0.1:6379/0?prefix=raycache                 rediss:// for TLS
    faulty+file:///tmp/x?size=1GiB&seed=1&corrupt=0.01                     injects faults, for tests (faulty.py)

The clients for object stores and Redis are optional dependencies, imported when a URL needs them.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from raycache.config import parse_bytes
from raycache.errors import ConfigError
from raycache.storage.base import Storage
from raycache.storage.file import FileStorage
from raycache.storage.guard import Guarded

_LOG = logging.getLogger(__name__)
_FAULTY = "faulty+"
_EXAMPLES = "file:///DIRECTORY?size=50GiB, s3://BUCKET/PREFIX?endpoint=...&region=..., redis://HOST:6379/0?prefix=..."
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "file": ("size",),
    "s3": ("endpoint", "region", "anonymous"),
    "gs": (),
    "az": (),
    "redis": ("prefix",),
    "rediss": ("prefix",),
}


class _Url(NamedTuple):
    """A parsed storage URL.

    Attributes:
        name: URL without credentials and options.
    """

    name: str
    parts: SplitResult
    options: dict[str, str]


def open_storage(url: str, *, timeout_s: float, retry_s: float = 5.0) -> Guarded:
    """Open a storage; one that is unreachable is opened later, once it can be reached.

    Args:
        timeout_s: limit of each call to a remote storage; after a timeout the storage counts as unavailable.
        retry_s: how long it then stays so before the next attempt.
    Raises:
        ConfigError: the URL is invalid, its client is not installed, or the storage denies access.
    """
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, got {timeout_s}")
    return Guarded(_opener(url, timeout_s), name=storage_name(url), retry_s=retry_s)


def storage_name(url: str) -> str:
    """The URL without credentials and options, for logs and metrics."""
    without_user = re.sub(r"//.*@", "//", url, flags=re.DOTALL)
    return re.split(r"[?#]", without_user)[0].replace("file://", "file:")


def _opener(url: str, timeout_s: float) -> Callable[[], Storage]:
    """Validate the URL and return a function that connects to the storage."""
    if url.startswith(_FAULTY):
        return _faulty(url.removeprefix(_FAULTY), timeout_s)
    place = _split(url)
    match place.parts.scheme:
        case "file":
            return _file(place)
        case "redis" | "rediss":
            return _redis(place, timeout_s)
        case _:
            return _object(place, timeout_s)


def _split(url: str) -> _Url:
    name = storage_name(url)
    scheme = url.partition("://")[0]
    if scheme not in _OPTIONS:
        raise ConfigError(f"storage {name!r} has an unknown scheme; use one of {_EXAMPLES}")
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        _ = parts.port
    except ValueError as error:
        # The name may contain part of a password that includes a delimiter.
        raise ConfigError(f"invalid {scheme}:// storage URL; use one of {_EXAMPLES}") from error
    options = dict(pairs)
    unknown = sorted(options.keys() - set(_OPTIONS[scheme]))
    if unknown or len(options) < len(pairs) or parts.fragment:
        known = ", ".join(_OPTIONS[scheme]) or "none"
        raise ConfigError(
            f"storage {name}: {unknown or 'a repeated option'} is not valid for {scheme}://; options: {known}"
        )
    return _Url(name, parts, options)


def _file(place: _Url) -> Callable[[], Storage]:
    directory = Path(unquote(place.parts.path))
    if place.parts.netloc not in ("", "localhost") or not directory.is_absolute():
        raise ConfigError(
            f"storage {place.name}: write a directory with three slashes, such as file:///var/cache/raycache"
        )
    if "size" not in place.options:
        raise ConfigError(f"storage {place.name} has no size; add one that fits on its disk, such as ?size=50GiB")
    max_bytes = parse_bytes(f"size of storage {place.name}", place.options["size"])
    return lambda: FileStorage(directory, max_bytes=max_bytes)


def _object(place: _Url, timeout_s: float) -> Callable[[], Storage]:
    parts, options = place.parts, place.options
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise ConfigError(
            f"storage {place.name}: write {parts.scheme}://BUCKET/PREFIX; credentials come from the environment, "
            "set another host with ?endpoint=http://HOST:PORT"
        )
    endpoint, anonymous = options.get("endpoint", ""), options.get("anonymous", "false")
    if endpoint and not re.match(r"https?://[^/@]+/?$", endpoint):
        raise ConfigError(f"storage {place.name}: endpoint must be http://HOST:PORT or https://HOST:PORT")
    if anonymous not in ("true", "false"):
        raise ConfigError(f"storage {place.name}: anonymous must be true or false, got {anonymous!r}")
    try:
        from raycache.storage.object import ObjectStorage, open_bucket
    except ModuleNotFoundError as error:
        raise _not_installed(place, error) from error
    bucket = open_bucket(
        f"{parts.scheme}://{parts.netloc}/{parts.path.strip('/')}",
        endpoint=endpoint,
        region=options.get("region", ""),
        is_anonymous=anonymous == "true",
        timeout_s=timeout_s,
    )
    return lambda: ObjectStorage(bucket, name=place.name, timeout_s=timeout_s)


def _redis(place: _Url, timeout_s: float) -> Callable[[], Storage]:
    parts = place.parts
    database = parts.path.strip("/") or "0"
    prefix = place.options.get("prefix", "raycache")
    if not parts.hostname or not database.isdecimal() or not prefix:
        raise ConfigError(f"storage {place.name}: write {parts.scheme}://HOST:PORT/NUMBER?prefix=NAME")
    try:
        from raycache.storage.redis import RedisServer, RedisStorage
    except ModuleNotFoundError as error:
        raise _not_installed(place, error) from error
    server = RedisServer(
        host=parts.hostname,
        port=parts.port or 6379,
        database=int(database),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        is_tls=parts.scheme == "rediss",
    )
    return lambda: RedisStorage(server, name=place.name, prefix=prefix, timeout_s=timeout_s)


def _not_installed(place: _Url, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"storage {place.name} needs the package {error.name}, which is not installed: pip install 'raycache[storage]'"
    )


def _faulty(url: str, timeout_s: float) -> Callable[[], Storage]:
    """Wrap a storage in injected faults; each time it is opened, the seed is one higher."""
    from raycache.storage.faulty import FaultyStorage, read_rates  # not needed in production

    inner_url, seed, rates = read_rates(url)
    open_inner, seeds = _opener(inner_url, timeout_s), itertools.count(seed)
    _LOG.warning("storage %s injects faults: %s", storage_name(inner_url), rates)
    return lambda: FaultyStorage(open_inner(), seed=next(seeds), rates=rates)
