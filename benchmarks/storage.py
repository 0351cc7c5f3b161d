"""Speed of the storage tier: keys, files, and the ways to lay files out that were weighed against each other.

    python -m benchmarks.storage                      in a temporary directory
    python -m benchmarks.storage --directory /data/x --repeats 5 --json out.json

Both sides of every ratio are measured in turns in one run, on the same bytes, in memory that was touched before; the
median of the repeats counts. Files are in the page cache: this is what the tier costs on top of the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import statistics
import struct
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import write_json
from raycache.cache.keys import Identity, PageChain
from raycache.storage.file import FileStorage

SIZES = {"64 KB": 64 << 10, "512 KB": 512 << 10, "4.5 MB": 64 * 576 * 2 * 61}
_BATCH_BYTES = 8 << 20
_CAPACITY_BYTES = 256 << 20
_SOURCE_BYTES = 64 << 20  # memory that is saved from and loaded to, more than a core's cache


class PagePerFile:
    """The plain way: one file per object, written beside its place and renamed, least recently used removed."""

    def __init__(self, directory: Path, *, max_bytes: int, object_bytes: int) -> None:
        directory.mkdir()
        self._directory, self._capacity = directory, max_bytes // object_bytes
        self._index: OrderedDict[bytes, None] = OrderedDict()

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[memoryview]) -> None:
        for key, payload in zip(keys, payloads, strict=True):
            while len(self._index) >= self._capacity:
                gone, _ = self._index.popitem(last=False)
                os.unlink(self._directory / gone.hex())
            path = self._directory / key.hex()
            with open(f"{path}.new", "wb", buffering=0) as file:
                file.write(payload)
            os.rename(f"{path}.new", path)
            self._index[key] = None

    def get(self, keys: Sequence[bytes], *, into: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, into, strict=True):
            with open(self._directory / key.hex(), "rb", buffering=0) as file:
                file.readinto(buffer)
            self._index.move_to_end(key)


class AppendedSegments:
    """A log of segments: objects are appended, the oldest segment is removed as a whole (first in, first out)."""

    def __init__(self, directory: Path, *, max_bytes: int, object_bytes: int) -> None:
        directory.mkdir()
        self._directory, self._segment_bytes, self._max_bytes = directory, max_bytes // 16, max_bytes
        self._index: dict[bytes, tuple[int, int]] = {}
        self._segments: OrderedDict[int, tuple[str, list[bytes]]] = OrderedDict()
        self._end = self._segment_bytes
        self._fd = -1

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[memoryview]) -> None:
        parts: list[bytes | memoryview] = []
        for key, payload in zip(keys, payloads, strict=True):
            if self._end + len(payload) + 64 > self._segment_bytes:
                self._flush(parts)
                parts = []
                self._next_segment()
            parts += [struct.pack("<56sQ", key, len(payload)), payload]
            self._index[key] = (self._fd, self._end + 64)
            self._segments[self._fd][1].append(key)
            self._end += 64 + len(payload)
        self._flush(parts)

    def get(self, keys: Sequence[bytes], *, into: Sequence[memoryview]) -> None:
        for key, buffer in zip(keys, into, strict=True):
            fd, start = self._index[key]
            os.preadv(fd, [buffer], start)

    def _flush(self, parts: list[bytes | memoryview]) -> None:
        if parts:
            os.pwritev(self._fd, parts, self._end - sum(map(len, parts)))

    def _next_segment(self) -> None:
        while (len(self._segments) + 1) * self._segment_bytes > self._max_bytes:
            fd, (path, keys) = self._segments.popitem(last=False)
            for key in keys:
                self._index.pop(key, None)
            os.unlink(path)
            os.close(fd)
        path = str(self._directory / f"{time.monotonic_ns()}.log")
        self._fd, self._end = os.open(path, os.O_RDWR | os.O_CREAT), 0
        self._segments[self._fd] = (path, [])


class PlainFile:
    """The ceiling: the same bytes written and read in order, in one file, without anything else."""

    def __init__(self, directory: Path, *, num_bytes: int) -> None:
        directory.mkdir()
        self._fd = os.open(directory / "plain", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, num_bytes)
        self._end = num_bytes
        self._at = 0

    def put(self, keys: Sequence[bytes], *, payloads: Sequence[memoryview]) -> None:
        self._at = self._at if self._at + sum(map(len, payloads)) <= self._end else 0
        self._at += os.pwritev(self._fd, payloads, self._at)

    def get(self, keys: Sequence[bytes], *, into: Sequence[memoryview]) -> None:
        self._at = self._at if self._at + sum(map(len, into)) <= self._end else 0
        self._at += os.preadv(self._fd, into, self._at)


def keys_ns(num_pages: int = 4000, page_size: int = 64) -> float:
    """CPU nanoseconds per token of chained page digests."""
    tokens = random.Random(0).randbytes(4 * page_size * num_pages)
    start_s = time.process_time()
    PageChain(Identity("weights", page_size=page_size)).digests(tokens)
    return (time.process_time() - start_s) / (num_pages * page_size) * 1e9


def options_ns() -> dict[str, float]:
    """The same with each hash that was considered, in the plainest loop; the best of five."""
    rows = [_options_ns() for _ in range(5)]
    return {name: min(row[name] for row in rows) for name in rows[0]}


def _options_ns() -> dict[str, float]:
    tokens, page = random.Random(0).randbytes(256 * 4000), 256
    hashes: dict[str, Callable[[bytes], bytes]] = {
        "sha256": lambda data: hashlib.sha256(data).digest(),
        "blake2b": lambda data: hashlib.blake2b(data, digest_size=32).digest(),
        "blake2s": lambda data: hashlib.blake2s(data).digest(),
    }
    result = {}
    for name, digest_of in hashes.items():
        digest, start_s = bytes(32), time.process_time()
        for start in range(0, len(tokens), page):
            digest = digest_of(digest + tokens[start : start + page])
        result[name] = (time.process_time() - start_s) / (len(tokens) / 4) * 1e9
    return result


def measure(directory: Path, size: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """CPU and wall microseconds per object of each side: name -> {put_cpu, put_wall, get_cpu, get_wall}."""
    bound = _CAPACITY_BYTES
    sides = {
        "ours": FileStorage(directory / "ours", max_bytes=bound),
        "one file per page": PagePerFile(directory / "pages", max_bytes=bound, object_bytes=size),
        "appended segments": AppendedSegments(directory / "log", max_bytes=bound, object_bytes=size),
        "plain file": PlainFile(directory / "plain", num_bytes=bound),
    }
    batch = max(1, min(64, _BATCH_BYTES // size))
    num_batches = max(1, _SOURCE_BYTES // (batch * size))
    payloads = [[memoryview(os.urandom(size)) for _ in range(batch)] for _ in range(num_batches)]
    buffers = [[memoryview(bytearray(payload)) for payload in part] for part in payloads]
    times: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    rounds = max(4, _CAPACITY_BYTES // (batch * size) // 3)
    for turn in range(repeats + 3):  # the first three fill what is bounded
        for name, side in sides.items():
            keys = [[os.urandom(56) for _ in range(batch)] for _ in range(rounds)]
            put = _timed(lambda side=side, keys=keys: _each(side.put, keys, payloads=payloads))
            get = _timed(lambda side=side, keys=keys: _each(side.get, keys, into=buffers))
            if turn >= 3:
                for key, value in zip(("put_cpu", "put_wall", "get_cpu", "get_wall"), (*put, *get), strict=True):
                    times[name].setdefault(key, []).append(value / (rounds * batch) * 1e6)
    ours = sides["ours"]
    stats = ours.stats()
    assert stats.evicted > 0
    assert stats.missing == stats.corrupt == 0
    ours.close()
    return times


def _each(
    move: Callable[..., object], keys: Sequence[Sequence[bytes]], **memory: Sequence[Sequence[memoryview]]
) -> None:
    ((name, batches),) = memory.items()
    for i, part in enumerate(keys):
        move(part, **{name: batches[i % len(batches)]})


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def index(directory: Path, num_objects: int = 50_000) -> dict[str, float]:
    """What the index costs: looking a key up, opening again, memory."""
    bound = num_objects * 5000
    storage = FileStorage(directory / "many", max_bytes=bound)
    keys = [os.urandom(56) for _ in range(num_objects)]
    for first in range(0, num_objects, 1000):
        part = keys[first : first + 1000]
        storage.put(part, payloads=[bytes(4000)] * len(part))
    cpu_s, _ = _timed(lambda: storage.contains(keys, touch=False))
    storage.close()
    start_s = time.perf_counter()
    FileStorage(directory / "many", max_bytes=bound).close()
    open_s = time.perf_counter() - start_s
    tracemalloc.start()
    storage = FileStorage(directory / "many", max_bytes=bound)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_left = storage.stats().objects
    storage.close()
    return {
        "contains, CPU us per key": cpu_s / num_objects * 1e6,
        "open again, us per object": open_s / num_left * 1e6,
        "memory, bytes per object": held_bytes / num_left,
    }


def ratios(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the bars are about; more than 1 is slower than the other side, of throughput less."""
    ours, plain = times["ours"], times["plain file"]
    return {
        "put + evict / one file per page, CPU": ours["put_cpu"] / times["one file per page"]["put_cpu"],
        "put + evict / appended segments, CPU": ours["put_cpu"] / times["appended segments"]["put_cpu"],
        "get / raw preadv, CPU": ours["get_cpu"] / plain["get_cpu"],
        "save, share of plain write": plain["put_wall"] / ours["put_wall"],
        "load, share of plain read": plain["get_wall"] / ours["get_wall"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="raycache-storage-", dir=args.directory))
    try:
        figures = _run(directory, args.repeats)
    finally:
        shutil.rmtree(directory)
    if args.json:
        write_json(args.json, figures)


def _run(directory: Path, repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"hash_ns": options_ns(), "index": index(directory), "objects": {}}
    figures["hash_ns"]["ours"] = min(keys_ns() for _ in range(5))
    print("chained page digests, CPU ns per token")
    for name, value in figures["hash_ns"].items():
        print(f"    {name:24}{value:8.2f}")
    for name, value in figures["index"].items():
        print(f"{name:28}{value:8.2f}")
    for label, size in SIZES.items():
        (directory / label).mkdir()
        raw = measure(directory / label, size, repeats)
        times = {side: {key: statistics.median(values) for key, values in row.items()} for side, row in raw.items()}
        figures["objects"][label] = {"us": times, "ratios": ratios(times)}
        print(f"\n{label} per object, us: put CPU, wall, get CPU, wall")
        for side, row in times.items():
            print(f"    {side:24}" + "".join(f"{value:10.1f}" for value in row.values()))
        for name, value in figures["objects"][label]["ratios"].items():
            print(f"    {name:40}{value:6.3f}")
        shutil.rmtree(directory / label)
    return figures


if __name__ == "__main__":
    main()
