"""Speed of storages across the network: objects per call and one by one, against their clients alone.

    python -m benchmarks.remote redis://127.0.0.1:6379/0
    python -m benchmarks.remote 's3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1' --json out.json

The client alone moves the same bytes by the same requests without headers, checksums, the look before a put, deadlines
and the copy into the caller's memory; both sides take turns, the median counts. Everything under the prefix goes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.figures import write_json
from raycache.cache.storage_commands import Fetch
from raycache.storage.open import open_storage, storage_name

SIZES = {"64 KB": 64 << 10, "512 KB": 512 << 10, "4.5 MB": 64 * 576 * 2 * 61}
_BATCH_BYTES = 16 << 20
_TIMEOUT_S = 60.0

Put = Callable[[Sequence[bytes], Sequence[bytes]], object]
Get = Callable[[Sequence[bytes]], object]


def client_alone(url: str) -> tuple[Put, Get]:
    """The fastest that the client does by the same requests."""
    if url.startswith("redis"):
        return redis_alone(url)
    return object_alone(url)


def redis_alone(url: str) -> tuple[Put, Get]:
    import redis

    client = redis.Redis.from_url(url.partition("?")[0], protocol=2)

    def put(keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        with client.pipeline(transaction=False) as pipeline:
            for key, payload in zip(keys, payloads, strict=True):
                pipeline.set(key, payload, ex=60)
            pipeline.execute()

    return put, client.mget


def object_alone(url: str) -> tuple[Put, Get]:
    import obstore

    from raycache.storage.object import open_bucket

    options = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    bucket = open_bucket(
        url.partition("?")[0] + "/alone",
        endpoint=options.get("endpoint", ""),
        region=options.get("region", ""),
        is_anonymous=False,
        timeout_s=_TIMEOUT_S,
    )
    threads = ThreadPoolExecutor(16)

    def put(keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        list(threads.map(lambda key, data: obstore.put(bucket, key.hex(), data, use_multipart=False), keys, payloads))

    return put, lambda keys: list(threads.map(lambda key: obstore.get(bucket, key.hex()).bytes(), keys))


def measure(url: str, size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds per object, wall and CPU of this process: side -> what -> value."""
    storage, (put, get) = open_storage(url, timeout_s=_TIMEOUT_S), client_alone(url)
    batch = max(2, min(64, _BATCH_BYTES // size))
    payloads = [os.urandom(size) for _ in range(batch)]
    buffers = [bytearray(size) for _ in range(batch)]
    times: dict[str, dict[str, list[float]]] = {"ours": {}, "client alone": {}}

    def note(side: str, what: str, work: Callable[[], Any], count: int = batch) -> Any:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        result = work()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        times[side].setdefault(what, []).append(wall_s / count * 1e6)
        times[side].setdefault(f"{what}, CPU", []).append(cpu_s / count * 1e6)
        return result

    for _ in range(repeats):
        keys = [os.urandom(56) for _ in range(batch)]
        assert all(note("ours", "put", lambda keys=keys: storage.put(keys, payloads=payloads)))
        note("client alone", "put", lambda keys=keys: put(keys, payloads))
        found = note("ours", "get", lambda keys=keys: storage.get(keys, into=buffers))
        assert found == [Fetch.HIT] * batch
        note("client alone", "get", lambda keys=keys: get(keys))
        note("ours", "contains", lambda keys=keys: storage.contains(keys, touch=False))
        note("ours", "get one", lambda keys=keys: storage.get(keys[:1], into=buffers[:1]), 1)
        note("client alone", "get one", lambda keys=keys: get(keys[:1]), 1)
        storage.clear()
    storage.close()
    return {side: {what: statistics.median(row) for what, row in rows.items()} for side, rows in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="whose prefix may be cleared")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for url in args.urls:
        for label, size in SIZES.items():
            sides = figures.setdefault(storage_name(url), {})[label] = measure(url, size, args.repeats)
            print(f"\n{storage_name(url)}, {label} per object, us")
            for what, value in sides["ours"].items():
                alone = sides["client alone"].get(what)
                print(f"    {what:16}{value:10.0f}" + (f"   client alone{alone:10.0f}" if alone is not None else ""))
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
