"""A storage that injects faults, reproducibly by seed, to test the tiers above.

It behaves like a backend that detects the faults itself, so hits are correct, unless `lies` is set: then damaged
objects are reported as hits, which the checksums of the tiers above must catch.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from urllib.parse import parse_qsl, urlencode, urlsplit

from raycache.cache.storage_commands import Fetch
from raycache.errors import ConfigError
from raycache.memory.checksum import Buffer
from raycache.storage.base import Changes, Scrub, Storage, StorageStats, flat

_JUNK = b"\xaa"
_AMOUNTS = ("error_calls", "delay_s")


@dataclass(frozen=True)
class FaultRates:
    """Probabilities of faults, each from 0 to 1.

    Attributes:
        drop: an object put is not stored, and reported as such.
        lose: a requested object is missing until it is put again.
        corrupt: an object read has a flipped bit; it is missing afterwards.
        foreign: an object read has another format; it is missing afterwards.
        unavailable: an object cannot be read.
        partial: the rest of a batch, from some position on, cannot be read or stored.
        error: a call starts an outage, in which it and the following calls raise OSError.
        error_calls: maximum length of an outage in calls.
        delay: a call is delayed.
        delay_s: maximum delay in seconds.
    Raises:
        ConfigError: a rate is out of range.
    """

    drop: float = 0
    lose: float = 0
    corrupt: float = 0
    foreign: float = 0
    unavailable: float = 0
    partial: float = 0
    error: float = 0
    error_calls: float = 3
    delay: float = 0
    delay_s: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= (1 if name not in _AMOUNTS else math.inf):
                raise ConfigError(f"{name}={value} of a faulty storage is out of range; a probability is 0 to 1")


class FaultyStorage:
    """Wraps and owns a storage, injecting faults.

    Args:
        seed: of the faults; with one thread, the same calls fail the same way.
        lies: whether to report damaged objects as hits.
    """

    def __init__(self, inner: Storage, *, seed: int, rates: FaultRates, lies: bool = False) -> None:
        self._inner, self._rates, self._lies = inner, rates, lies
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._lost = set[bytes]()
        self._errors_left = 0
        self._counts = StorageStats()

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[Buffer], checksums: Sequence[int] = ()) -> list[bool]:
        self._begin()
        with self._lock:
            end = self._end(len(keys))
            taken = [i for i in range(len(keys)) if i < end and not self._happens(self._rates.drop)]
        known = [checksums[i] for i in taken] if checksums else []
        done = self._inner.put([keys[i] for i in taken], payloads=[payloads[i] for i in taken], checksums=known)
        stored = [False] * len(keys)
        with self._lock:
            for i, is_stored in zip(taken, done, strict=True):
                stored[i] = is_stored
                self._lost.discard(keys[i])
            self._counts.io_errors += len(keys) - len(taken)
        return stored

    def get(self, keys: Sequence[bytes], *, into: Sequence[Buffer]) -> list[Fetch]:
        self._begin()
        found = self._inner.get(keys, into=into)
        with self._lock:
            end = self._end(len(keys))
            for i, key in enumerate(keys):
                was = found[i]
                view = flat(into[i])
                found[i] = self._spoil(key, was, view) if i < end else Fetch.UNAVAILABLE
                if found[i] is not Fetch.HIT:
                    view[:] = _JUNK * len(view)  # its content must not be used
                self._counts.count([found[i]])
                self._discount(was)
        return found

    def contains(self, keys: Sequence[bytes], *, touch: bool) -> list[bool]:
        self._begin()
        stored = self._inner.contains(keys, touch=touch)
        with self._lock:
            return [is_stored and key not in self._lost for key, is_stored in zip(keys, stored, strict=True)]

    def checksums(self, keys: Sequence[bytes]) -> list[int]:
        return self._inner.checksums(keys)

    def suffixes(self) -> set[bytes]:
        self._begin()
        return self._inner.suffixes()

    def changes(self, since: str) -> Changes | None:
        self._begin()
        return self._inner.changes(since)

    def stats(self) -> StorageStats:
        """Statistics of the wrapped storage, plus injected faults."""
        stats = astuple(self._inner.stats())
        with self._lock:
            return StorageStats(*(sum(pair) for pair in zip(stats, astuple(self._counts), strict=True)))

    def close(self) -> None:
        self._inner.close()

    def clear(self) -> None:
        self._begin()
        self._inner.clear()

    def resize(self, max_bytes: int) -> None:
        self._inner.resize(max_bytes)

    def scrub(self, *, until_s: float = math.inf) -> Scrub:
        return self._inner.scrub(until_s=until_s)

    def _begin(self) -> None:
        """Inject faults that affect a whole call."""
        with self._lock:
            wait_s = self._random.random() * self._rates.delay_s if self._happens(self._rates.delay) else 0.0
            if self._errors_left or self._happens(self._rates.error):
                self._errors_left = (self._errors_left or self._random.randint(1, int(self._rates.error_calls))) - 1
                raise ConnectionError("injected outage")
        if wait_s:
            time.sleep(wait_s)

    def _end(self, num_keys: int) -> int:
        """Number of keys of a batch before a partial failure."""
        return self._random.randrange(num_keys) if num_keys and self._happens(self._rates.partial) else num_keys

    def _spoil(self, key: bytes, found: Fetch, view: memoryview) -> Fetch:
        """Inject faults into an object read; returns its result."""
        if found is not Fetch.HIT:
            return found
        if key in self._lost or self._happens(self._rates.lose):
            self._lost.add(key)
            return Fetch.MISSING
        if self._happens(self._rates.corrupt):
            view[self._random.randrange(len(view))] ^= 1 << self._random.randrange(8)
            return self._say(Fetch.CORRUPT, key)
        if self._happens(self._rates.foreign):
            view[:] = self._random.randbytes(len(view))
            return self._say(Fetch.FOREIGN, key)
        return Fetch.UNAVAILABLE if self._happens(self._rates.unavailable) else Fetch.HIT

    def _say(self, truth: Fetch, key: bytes) -> Fetch:
        if self._lies:
            return Fetch.HIT
        self._lost.add(key)
        return truth

    def _discount(self, found: Fetch) -> None:
        """Subtract what the inner storage has counted."""
        before = StorageStats()
        before.count([found])
        self._counts.hits -= before.hits
        self._counts.missing -= before.missing
        self._counts.corrupt -= before.corrupt
        self._counts.foreign -= before.foreign

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate


def read_rates(url: str) -> tuple[str, int, FaultRates]:
    """Extract the seed and the options named in `FaultRates` from a URL.

    Returns:
        The remaining URL, the seed (default 0) and the rates.
    Raises:
        ConfigError: a value is not a number or out of range.
    """
    names = {item.name for item in fields(FaultRates)}
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    try:
        rates = FaultRates(**{name: float(value) for name, value in pairs if name in names})
        seed = int(dict(pairs).get("seed", "0"))
    except ValueError as error:
        raise ConfigError(f"a faulty storage takes numbers for seed, {', '.join(sorted(names))}: {error}") from error
    rest = urlencode([(name, value) for name, value in pairs if name not in names | {"seed"}])
    return url.partition("?")[0] + (f"?{rest}" if rest else ""), seed, rates
