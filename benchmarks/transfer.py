"""Speed of page moves between the device pool and the host, against a plain copy of the same bytes.

    python -m benchmarks.transfer
    python -m benchmarks.transfer --repeats 9 --json out.json
    python -m benchmarks.transfer --device cuda --json out.json

The pool is layer first, an envelope page first: a save gathers a page from all layers, a load scatters many pages layer
by layer. All are measured in turns in one run, on memory that was touched before. The median of the repeats counts.

On the CPU "copy" is that alone, "move" the whole of it as a rank does it: on the lane's thread, with headers and
checksums. Processor time, not that of the clock: other processes of the machine do not count.

On CUDA all are moves, from the call to the post, of scattered pages; the plain copy is one of pinned memory. Then the
time until the first layer of a load is there, and what a matrix product loses while pages come and go.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import write_json
from raycache.memory.arena import Arena
from raycache.memory.carriers import CPU_TURNS, arrays_of, copy_runs, copy_units
from raycache.memory.component import CacheFormat, Component, kv, latent
from raycache.memory.device import DevicePool
from raycache.memory.host import HostSpace
from raycache.memory.mover import Mover
from raycache.memory.moves import Moves, Unit, runs
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split, even_range

FMT = CacheFormat("bfloat16")
MODELS = {
    "latent, 61 layers": (64, latent(range(61), rank=512, rope_dim=64, fmt=FMT)),
    "8 KV heads of 128, 28 layers": (64, kv("kv", range(28), heads=8, dim=128, fmt=FMT)),
    "3 KV heads of 64, 30 layers, pages of 16": (16, kv("kv", range(30), heads=3, dim=64, fmt=FMT)),
}
CUDA_MODELS = {
    "latent of 512 + 64, 61 layers, pages of 64": (64, latent(range(61), rank=512, rope_dim=64, fmt=FMT)),
    "8 KV heads of 128, 36 layers, pages of 16": (16, kv("kv", range(36), heads=8, dim=128, fmt=FMT)),
    "8 KV heads of 128, 36 layers, pages of 64": (64, kv("kv", range(36), heads=8, dim=128, fmt=FMT)),
}
CUDA_PAGES, POOL_PAGES = 500, 550
PLAIN_BYTES = 1 << 30  # of pinned memory, copied again until all bytes are
TOTAL_BYTES = 192 << 20  # moved per measurement, on the CPU, more than its caches


class Host:
    """One rank with a pool of random bytes, an arena and a mover."""

    def __init__(self, path: Path, component: Component, *, page_size: int, device: str) -> None:
        num_layers = len(component.layers)
        layout = EnvelopeLayout([component], num_layers=num_layers, page_size=page_size, split=Split())
        num_pages = POOL_PAGES if device == "cuda" else TOTAL_BYTES // layout.unit_bytes("full")
        sizes = {"full": num_pages}
        self.arena = Arena.create(path, layout, sizes=sizes, catalog_bytes=0, description=b"")
        ctx = ParallelContext.single(torch.device(device))
        self.pool = DevicePool([component], num_layers=num_layers, sizes=sizes, page_size=page_size, ctx=ctx)
        for rows in self.pool.rows(component.name).values():
            rows.view(torch.uint8).random_(0, 255)
        self._posts: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.mover = Mover(
            self.pool, self.arena, layout, rank=0, post=lambda lane, number, has_failed: self._posts.put(has_failed)
        )
        self.space = HostSpace("full", pool=self.pool, arena=self.arena, layout=layout, rank=0)
        self.num_pages, self.page_bytes = num_pages, layout.unit_bytes("full")

    def save(self, units: Sequence[Unit]) -> None:
        self.mover.save(Moves.of(1, units))
        self.posted()

    def load(self, units: Sequence[Unit]) -> None:
        self.mover.load(Moves.of(1, units))
        self.posted()

    def posted(self) -> None:
        assert not self._posts.get(timeout=60), "the move has not failed"

    def close(self) -> None:
        self.mover.close()
        self.arena.close()


class CpuTransfer:
    """A rank with pages to move, and a plain copy of as many bytes."""

    def __init__(self, host: Host) -> None:
        count, self._space = host.num_pages, host.space
        self.host, self.num_bytes = host, count * host.page_bytes
        self.in_order = [Unit("full", page, page, page + 1) for page in range(count)]
        shuffled = random.Random(0).sample(range(count), count)
        self.scattered = [Unit("full", page, at, page + 1) for page, at in enumerate(shuffled)]
        self._plain = np.ones(self.num_bytes, np.uint8), np.zeros(self.num_bytes, np.uint8)
        layers = self._space.layers
        turns = [even_range(len(layers), turn, CPU_TURNS) for turn in range(CPU_TURNS)]
        self._saves = arrays_of(self._space.saves(self._space.own_slab))
        self._loads = [
            arrays_of(self._space.loads_between(layers[turn.start], layers[turn.stop - 1])) for turn in turns
        ]

    def plain(self) -> None:
        np.copyto(self._plain[1], self._plain[0])

    def copy_saved(self, units: Sequence[Unit]) -> None:
        copy_units(self._saves, Moves.of(1, units).by_space()["full"])

    def copy_loaded(self, units: Sequence[Unit]) -> None:
        taken = runs(Moves.of(1, units).by_space()["full"])
        for strips in self._loads:
            copy_runs(strips, taken)

    def kinds(self) -> dict[str, Callable[[], None]]:
        kinds: dict[str, Callable[[], None]] = {"plain copy": self.plain}
        for name, units in (("in order", self.in_order), ("scattered", self.scattered)):
            # Saves last before the loads that read them: a move checks what it loads.
            kinds[f"save, copy, {name}"] = partial(self.copy_saved, units)
            kinds[f"save, move, {name}"] = partial(self.host.save, units)
            kinds[f"load, copy, {name}"] = partial(self.copy_loaded, units)
            kinds[f"load, move, {name}"] = partial(self.host.load, units)
        return kinds


class CudaTransfer:
    """A rank with scattered pages to move, a plain copy of as many bytes, and something to compute."""

    def __init__(self, host: Host) -> None:
        ids = random.Random(0)
        pages = (ids.sample(range(host.num_pages), CUDA_PAGES) for _ in range(2))
        self.units = [Unit("full", device, at, device + 1) for device, at in zip(*pages, strict=True)]
        self.host, self.num_bytes = host, CUDA_PAGES * host.page_bytes
        self._pinned = torch.empty(min(self.num_bytes, PLAIN_BYTES), dtype=torch.uint8, pin_memory=True)
        self._plain = torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda").split(len(self._pinned))
        # More than the device's cache holds, as the weights of a model.
        self._matrices = torch.randn(8, 4096, 4096, dtype=torch.bfloat16, device="cuda")

    def plain_to_host(self) -> None:
        for part in self._plain:
            self._pinned[: len(part)].copy_(part, non_blocking=True)
        torch.cuda.synchronize()

    def plain_to_device(self) -> None:
        for part in self._plain:
            part.copy_(self._pinned[: len(part)], non_blocking=True)
        torch.cuda.synchronize()

    def first_layer_s(self) -> float:
        """From the call of a load until its first layer can be read."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.host.mover.load(Moves.of(1, self.units))
        self.host.pool.gate(0)
        torch.cuda.current_stream().synchronize()
        found = time.perf_counter() - start
        self.host.posted()
        return found

    def products(self, num_tokens: int, *, count: int) -> torch.cuda.CUDAGraph:
        """Products of tokens with one matrix after the other, as a graph: the time to launch them does not count."""
        tokens, graph = torch.randn(num_tokens, 4096, dtype=torch.bfloat16, device="cuda"), torch.cuda.CUDAGraph()
        tokens @ self._matrices[0]
        with torch.cuda.graph(graph):
            for i in range(count):
                tokens @ self._matrices[i % len(self._matrices)]
        return graph

    def seconds_of(self, graph: torch.cuda.CUDAGraph, move: Callable[[], None] | None) -> float:
        """Of a computation on the device, while pages are moved over and over."""
        graph.replay()
        torch.cuda.synchronize()
        over = threading.Event()

        def keep_moving() -> None:
            while move is not None and not over.is_set():
                move()

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with ThreadPoolExecutor(1) as threads:
            moving = threads.submit(keep_moving)
            time.sleep(0.02)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            over.set()
            moving.result()
        return float(begin.elapsed_time(end)) / 1e3


def measure(
    kinds: Mapping[str, Callable[[], None]], *, num_bytes: int, clock: Callable[[], float], repeats: int
) -> dict[str, tuple[float, float]]:
    """Of each kind GB/s and its ratio to the plain copy before it in the same round, the medians."""
    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        seconds = {}
        for kind, call in kinds.items():
            start = clock()
            call()
            seconds[kind] = clock() - start
        rounds.append(seconds)
    found, plain = {}, ""
    for kind in kinds:
        plain = kind if kind.startswith("plain") else plain
        found[kind] = (
            num_bytes / statistics.median(seconds[kind] for seconds in rounds[1:]) / 1e9,
            statistics.median(seconds[plain] / seconds[kind] for seconds in rounds[1:]),
        )
    return found


def on_cpu(host: Host, *, repeats: int) -> dict[str, tuple[float, float]]:
    transfer = CpuTransfer(host)
    return measure(transfer.kinds(), num_bytes=transfer.num_bytes, clock=time.process_time, repeats=repeats)


def on_cuda(host: Host, *, repeats: int) -> dict[str, tuple[float, float]]:
    transfer = CudaTransfer(host)
    kinds = {
        "plain copy to the host": transfer.plain_to_host,
        "save": lambda: host.save(transfer.units),
        "plain copy to the device": transfer.plain_to_device,
        "load": lambda: host.load(transfer.units),
    }
    found = measure(kinds, num_bytes=transfer.num_bytes, clock=time.perf_counter, repeats=repeats)
    first_s = statistics.median(transfer.first_layer_s() for _ in range(repeats))
    print(f"  first layer of a load after {first_s * 1e3:.2f} ms")
    for num_tokens, count in ((4096, 500), (64, 6000)):
        graph = transfer.products(num_tokens, count=count)
        alone = transfer.seconds_of(graph, None)
        beside = {kind: transfer.seconds_of(graph, kinds[kind]) / alone - 1 for kind in ("save", "load")}
        more = ", ".join(f"{share:+.1%} beside a {kind}" for kind, share in beside.items())
        print(f"  matrix products {num_tokens} x 4096 x 4096 take {more}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="memory for the arena")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {}
    is_cuda = args.device == "cuda"
    for name, (page_size, component) in (CUDA_MODELS if is_cuda else MODELS).items():
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            host = Host(Path(directory) / "arena", component, page_size=page_size, device=args.device)
            print(f"\n{name}: {host.num_pages} pages of {host.page_bytes / 1024:.0f} KiB")
            figures[name] = found = (on_cuda if is_cuda else on_cpu)(host, repeats=args.repeats)
            host.close()
        for kind, (speed, ratio) in found.items():
            print(f"  {kind:24}{speed:8.1f} GB/s{ratio:8.0%}")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
