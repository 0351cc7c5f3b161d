"""Speed of the way between host tier and file storage, against plain sequential files.

    python -m benchmarks.tier_storage models/smollm2                    in a temporary directory
    python -m benchmarks.tier_storage models/smollm2 --tp 3 --page-size 16 --directory /data/x

    save    envelopes in shared memory -> checked against their headers -> objects          against one pwritev
    load    objects -> checked -> envelopes in shared memory -> headers                     against one preadv

The envelopes are real ones, of a model's layout under a split, and what moves them is the host tier's
own storage worker.
Both sides move the same bytes in turns in one run, from and to the same memory, which was touched before; files are in
the page cache. Medians count.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.figures import write_json
from raycache.cache.keys import tag_of
from raycache.cache.storage_commands import Fetch, StoredUnit
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.memory.arena import Arena
from raycache.memory.checksum import checksum_of
from raycache.memory.component import FULL
from raycache.storage.file import FileStorage
from raycache.storage.storage_worker import StorageWorker

_WANTED_RATIO = 0.8
_PAGES_PER_ORDER = 16
"""As the engine orders them."""
_FIRST_ROUNDS = 2
"""Not counted: they touch memory and files for the first time."""


class PlainFile:
    """The same bytes, one after the other, in one file."""

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, num_bytes)

    def save(self, envelopes: Sequence[memoryview], start: int) -> None:
        """Write at an offset."""
        os.pwritev(self._fd, envelopes, start)

    def load(self, envelopes: Sequence[memoryview], start: int) -> None:
        """Read from an offset."""
        os.preadv(self._fd, envelopes, start)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


class HostPages:
    """Pages of a model in an arena, and both ways to move them.

    Args:
        config: model, split and page size.
        directory: for files.
        num_pages: of the model.
        num_lanes: orders at once, as of raycache/storage/lanes.py.
    """

    def __init__(self, config: Config, directory: Path, *, num_pages: int, num_lanes: int) -> None:
        self.layout = deploy(config, device_type="cpu").envelope_layout()
        self._num_ranks, self._num_pages = config.world_size, num_pages
        arena_path = Path(f"/dev/shm/raycache-benchmark-{os.getpid()}")
        self._arena = Arena.create(
            arena_path,
            self.layout,
            sizes=dict.fromkeys(self.layout.spaces, num_pages),
            catalog_bytes=8,
            description=b"",
        )
        arena_path.unlink()  # mapped, and gone with the process
        self.num_bytes = num_pages * self.layout.unit_bytes(FULL)
        self._envelopes = [
            self._arena.slab(rank, FULL)[page] for page in range(num_pages) for rank in range(self._num_ranks)
        ]
        self._storage = FileStorage(directory / "tier", max_bytes=3 * self.num_bytes)
        self._worker = StorageWorker(
            self._arena, self.layout, self._storage, page_size=config.page_size, windows={}, state_space=""
        )
        self._plain = PlainFile(directory / "plain", num_bytes=self.num_bytes)
        self._units: list[StoredUnit] = []
        self._lanes = ThreadPoolExecutor(num_lanes)
        self._fill()

    def begin_round(self, number: int) -> None:
        """Let the same rows belong to other pages from now on, as if they had just been saved by the ranks."""
        digests = [hashlib.sha256(f"{number} {page}".encode()).digest() for page in range(self._num_pages)]
        self._units = [StoredUnit(FULL, page, digest) for page, digest in enumerate(digests)]
        for rank in range(self._num_ranks):
            self._arena.headers(rank, FULL)[:, 0] = [tag_of(digest) for digest in digests]

    def save(self) -> None:
        """Host to storage."""
        assert all(all(stored) for stored in self._lanes.map(self._worker.persist, self._orders())), "not all stored"

    def load(self) -> None:
        """Storage to host."""
        for found in self._lanes.map(self._worker.fetch, self._orders()):
            assert set(found) == {Fetch.HIT}, f"not all came back: {found}"

    def save_plain(self) -> None:
        """The same bytes to a plain file."""
        self._move_plain(self._plain.save)

    def load_plain(self) -> None:
        """The same bytes from a plain file."""
        self._move_plain(self._plain.load)

    def checksums(self) -> list[int]:
        """Of all envelopes, to see that what is loaded is what was saved."""
        return [checksum_of(envelope.data) for envelope in self._envelopes]

    def close(self) -> None:
        """Give files and memory back."""
        self._lanes.shutdown()
        self._storage.close()
        self._plain.close()
        self._envelopes = []
        self._arena.close()

    def _orders(self) -> list[list[StoredUnit]]:
        starts = range(0, self._num_pages, _PAGES_PER_ORDER)
        return [self._units[start : start + _PAGES_PER_ORDER] for start in starts]

    def _fill(self) -> None:
        random = np.random.default_rng(0)
        for rank in range(self._num_ranks):
            slab, headers = self._arena.slab(rank, FULL), self._arena.headers(rank, FULL)
            slab[...] = random.integers(0, 256, slab.shape, np.uint8)
            headers[:, 1] = [checksum_of(envelope.data) for envelope in slab]

    def _move_plain(self, move: Callable[[Sequence[memoryview], int], None]) -> None:
        start, per_order = 0, _PAGES_PER_ORDER * self._num_ranks
        for first in range(0, len(self._envelopes), per_order):
            views = [envelope.data for envelope in self._envelopes[first : first + per_order]]
            move(views, start)
            start += sum(view.nbytes for view in views)


def measure(pages: HostPages, *, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall seconds) of each way, once a round."""
    ways = {"save": pages.save, "save plain": pages.save_plain, "load": pages.load, "load plain": pages.load_plain}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    saved = pages.checksums()
    for number in range(rounds + _FIRST_ROUNDS):
        pages.begin_round(number)
        for name, way in ways.items():
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            way()
            spent = time.process_time() - cpu_s, time.perf_counter() - wall_s
            if number >= _FIRST_ROUNDS:
                times[name].append(spent)
        assert pages.checksums() == saved, "what was loaded is not what was saved"
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; the exit code says whether 80 % of the ceilings are reached."""
    options = _options(argv)
    config = Config(model=str(options.model), device="cpu", tp=options.tp, pp=options.pp, page_size=options.page_size)
    with tempfile.TemporaryDirectory() as folder:
        pages = HostPages(config, options.directory or Path(folder), num_pages=options.pages, num_lanes=options.lanes)
        page_bytes, num_bytes = pages.layout.unit_bytes(FULL), pages.num_bytes
        times = measure(pages, rounds=options.rounds)
        pages.close()
    print(
        f"{options.model.name} tp={config.tp} pp={config.pp}: {options.pages} pages of {config.page_size} tokens, "
        f"{page_bytes / 1e6:.2f} MB each in {config.world_size} envelopes, {options.lanes} lanes, {options.rounds} x"
    )
    ratios = _print_table(times, num_bytes)
    if options.json:
        write_json(options.json, {"page_bytes": page_bytes, "num_bytes": num_bytes, "seconds": times})
    return 0 if min(ratios) >= _WANTED_RATIO else 1


def _print_table(times: dict[str, list[tuple[float, float]]], num_bytes: int) -> list[float]:
    """Returns: speed by that of plain files, of CPU time, per way."""
    print(f"{'':14}{'GB per CPU s':>14}{'GB/s wall':>12}{'of plain, CPU':>16}{'of plain, wall':>16}")
    medians = {
        name: (statistics.median(cpu for cpu, _ in spent), statistics.median(wall for _, wall in spent))
        for name, spent in times.items()
    }
    ratios = []
    for name, (cpu_s, wall_s) in medians.items():
        plain_cpu_s, plain_wall_s = medians[f"{name.split()[0]} plain"]
        ratios.append(plain_cpu_s / cpu_s)
        print(
            f"{name:14}{num_bytes / cpu_s / 1e9:14.2f}{num_bytes / wall_s / 1e9:12.2f}"
            f"{100 * plain_cpu_s / cpu_s:14.0f} %{100 * plain_wall_s / wall_s:14.0f} %"
        )
    return ratios


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tier_storage", description="Host tier to file storage and back, by plain files."
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory; only its config is read")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads (default: %(default)s)")
    parser.add_argument("--pp", type=int, default=1, help="ranks that share layers (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=96, help="moved in each round (default: %(default)s)")
    parser.add_argument("--lanes", type=int, default=1, help="orders at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="in turns (default: %(default)s)")
    parser.add_argument("--directory", metavar="DIR", type=Path, help="for files; default: a temporary one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
