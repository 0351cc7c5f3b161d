"""Speed of page moves between the device pool and the host on the CPU, against a plain copy of the same bytes.

    python -m benchmarks.transfer
    python -m benchmarks.transfer --repeats 9 --json out.json

The pool is layer first, an envelope page first: a save gathers a page from all layers, a load scatters many pages layer
by layer. "copy" is that alone, "move" the whole of it as a rank does it: on the lane's thread, with headers and
checksums. All are measured in turns in one run, on memory that was touched before. Processor time, not that of the
clock: other processes of the machine do not count. The median of the repeats counts.
"""

from __future__ import annotations

import argparse
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import write_json
from raycache.memory.arena import Arena
from raycache.memory.component import CacheFormat, Component, kv, latent
from raycache.memory.device import DevicePool
from raycache.memory.host import HostSpace, runs
from raycache.memory.mover import CPU_TURNS, Mover
from raycache.memory.moves import Moves, Unit
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split, even_range

FMT = CacheFormat("bfloat16")
MODELS = {
    "latent, 61 layers": (64, latent(range(61), rank=512, rope_dim=64, fmt=FMT)),
    "8 KV heads of 128, 28 layers": (64, kv("kv", range(28), heads=8, dim=128, fmt=FMT)),
    "3 KV heads of 64, 30 layers, pages of 16": (16, kv("kv", range(30), heads=3, dim=64, fmt=FMT)),
}
TOTAL_BYTES = 192 << 20  # moved per measurement, more than the processor's caches


class Transfer:
    """A rank with pages to move, and a plain copy of as many bytes."""

    def __init__(self, path: Path, component: Component, *, page_size: int) -> None:
        num_layers = len(component.layers)
        layout = EnvelopeLayout([component], num_layers=num_layers, page_size=page_size, split=Split())
        count = TOTAL_BYTES // layout.unit_bytes("full")
        sizes = {"full": count}
        self.arena = Arena.create(path, layout, sizes=sizes, catalog_bytes=0, description=b"")
        ctx = ParallelContext.single(torch.device("cpu"))
        pool = DevicePool([component], num_layers=num_layers, sizes=sizes, page_size=page_size, ctx=ctx)
        for rows in pool.rows(component.name).values():
            rows.view(torch.uint8).random_(0, 255)
        self._posts: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.mover = Mover(
            pool, self.arena, layout, rank=0, post=lambda lane, number, has_failed: self._posts.put(has_failed)
        )
        self._space = HostSpace("full", pool=pool, arena=self.arena, layout=layout, rank=0)
        self.in_order = [Unit("full", page, page, page + 1) for page in range(count)]
        shuffled = random.Random(0).sample(range(count), count)
        self.scattered = [Unit("full", page, host, page + 1) for page, host in enumerate(shuffled)]
        self.page_bytes, self.num_bytes = layout.unit_bytes("full"), count * layout.unit_bytes("full")
        self._plain = np.ones(self.num_bytes, np.uint8), np.zeros(self.num_bytes, np.uint8)

    def plain(self) -> None:
        np.copyto(self._plain[1], self._plain[0])

    def copy_saved(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._space.begin_save(unit)

    def copy_loaded(self, units: Sequence[Unit]) -> None:
        taken = runs(units)
        layers = self._space.layers
        for turn in (even_range(len(layers), turn, CPU_TURNS) for turn in range(CPU_TURNS)):
            self._space.load(layers[turn.start], layers[turn.stop - 1], taken)

    def save(self, units: Sequence[Unit]) -> None:
        self.mover.save(Moves(1, units))
        assert not self._posts.get()

    def load(self, units: Sequence[Unit]) -> None:
        self.mover.load(Moves(1, units))
        assert not self._posts.get()


def measure(transfer: Transfer, *, repeats: int) -> dict[str, tuple[float, float]]:
    """Of each kind GB/s and its ratio to the plain copy of the same round, the medians."""
    kinds: dict[str, Callable[[], None]] = {"plain copy": transfer.plain}
    for name, units in (("in order", transfer.in_order), ("scattered", transfer.scattered)):
        # Saves last before the loads that read them: a move checks what it loads.
        kinds[f"save, copy, {name}"] = lambda units=units: transfer.copy_saved(units)
        kinds[f"save, move, {name}"] = lambda units=units: transfer.save(units)
        kinds[f"load, copy, {name}"] = lambda units=units: transfer.copy_loaded(units)
        kinds[f"load, move, {name}"] = lambda units=units: transfer.load(units)
    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        seconds = {}
        for kind, call in kinds.items():
            start = time.process_time()
            call()
            seconds[kind] = time.process_time() - start
        rounds.append(seconds)
    return {
        kind: (
            transfer.num_bytes / statistics.median(seconds[kind] for seconds in rounds[1:]) / 1e9,
            statistics.median(seconds["plain copy"] / seconds[kind] for seconds in rounds[1:]),
        )
        for kind in kinds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {}
    for name, (page_size, component) in MODELS.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            transfer = Transfer(Path(directory) / "arena", component, page_size=page_size)
            figures[name] = found = measure(transfer, repeats=args.repeats)
            transfer.mover.close()
        print(f"\n{name}: {len(transfer.in_order)} pages of {transfer.page_bytes / 1024:.0f} KiB")
        for kind, (speed, ratio) in found.items():
            print(f"  {kind:24}{speed:8.1f} GB/s{ratio:8.0%}")
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
