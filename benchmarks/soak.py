"""Does anything grow? The highest steady load for half an hour, and what every process and the cache hold meanwhile.

    python -m benchmarks.soak MODEL --minutes 30 --cp 2 --storage 'file:///tmp/store?size=512MiB'

Clients ask one request after the other: conversations with shared prefixes that are drawn anew for ever, so that all
tiers evict. A part of them goes away in the middle of an answer. Afterwards nothing may run, be locked or be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.client import complete
from benchmarks.figures import write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt

_PAGE = 16
_IDLE_S = 30.0
_MOST_GROWTH_MB = 8.0
"""Of a process between the second quarter of the time and the last; the first one warms up."""


@dataclass(frozen=True)
class Sample:
    """What one process holds at one time.

    Attributes:
        at_s: since the begin.
        own_mb: memory of its own, 10**6 bytes: resident, without what is shared.
        files: open file descriptors.
        threads: of the process.
    """

    at_s: float
    own_mb: float
    files: int
    threads: int


Samples = dict[tuple[str, int], list[Sample]]
"""By name and pid."""


def main() -> int:
    options = _options()
    flags = [f"--{axis}={getattr(options, axis)}" for axis in ("tp", "pp", "cp")]
    flags += [f"--page-size={_PAGE}", f"--num-pages={options.num_pages}", f"--host-memory={options.host_memory}"]
    flags += [f"--storage={options.storage}"] if options.storage else []
    with launched(options.model, *flags, *options.flag) as endpoint:
        figures = asyncio.run(_run(options, endpoint))
    for line in _table(figures):
        print(line)
    if options.json:
        write_json(options.json, figures)
    return 1 if figures["grown"] or figures["leaked"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory of a model")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--topics", type=int, default=24, help="prefixes in use at a time; one in 40 draws is new")
    parser.add_argument("--gone", type=float, default=0.05, help="share of clients that go away (default: 0.05)")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two looks (default: %(default)s)")
    for axis in ("tp", "pp", "cp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--num-pages", type=int, default=256)
    parser.add_argument("--host-memory", default="64MiB")
    parser.add_argument("--storage", default="")
    parser.add_argument("--flag", action="append", default=[], help="of raycache launch, such as --flag=--replicas=2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    return parser.parse_args()


class Load:
    """Clients that never stop asking.

    Args:
        options: of the command.
        endpoint: of the server.
    """

    def __init__(self, options: argparse.Namespace, endpoint: str) -> None:
        self._endpoint, self._gone = endpoint, options.gone
        self._model = status(endpoint)["model"]
        self._ids = plain_token_ids(options.model)
        self._draw = random.Random(options.seed)
        self._topics = [self._text(200) for _ in range(options.topics)]
        self.tokens = self.answers = self.left = 0
        self.failed: list[str] = []
        self.is_over = False

    async def run_client(self) -> None:
        """Ask until it is over."""
        while not self.is_over:
            leaves = self._draw.random() < self._gone
            prompt = Prompt(0.0, self._prompt(), 24)
            try:
                reply = await complete(self._endpoint, prompt, model=self._model, timeout_s=0.3 if leaves else 300)
            except TimeoutError:
                self.left += leaves
                if not leaves:
                    self.failed.append("no answer within 300 s")
            except (RuntimeError, OSError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(1)
            else:
                self.answers += 1
                self.tokens += len(reply.token_times_s)

    def _prompt(self) -> list[int]:
        number = self._draw.randrange(len(self._topics))
        if self._draw.random() < 1 / 40:
            self._topics[number] = self._text(200)
        return [*self._topics[number], *self._text(self._draw.randrange(1, 60))]

    def _text(self, length: int) -> list[int]:
        return [self._draw.choice(self._ids) for _ in range(length)]


async def _run(options: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    load = Load(options, endpoint)
    clients = [asyncio.create_task(load.run_client()) for _ in range(options.clients)]
    samples, shared = Samples(), list[float]()
    begin_s = time.monotonic()
    while (at_s := time.monotonic() - begin_s) < options.minutes * 60:
        await asyncio.sleep(options.every_s)
        shared.append(_shared_mb())
        for key, sample in _look(at_s):
            samples.setdefault(key, []).append(sample)
    load.is_over = True
    await asyncio.gather(*clients)
    after = await _idle(endpoint)
    processes = [_summary(key, seen) for key, seen in sorted(samples.items())]
    return {
        "minutes": options.minutes,
        "answers": load.answers,
        "left": load.left,
        "failed": load.failed,
        "tokens_per_s": load.tokens / (time.monotonic() - begin_s),
        "processes": [found for found in processes if found is not None],
        "short_lived": sum(found is None for found in processes),
        "grown": [found for found in processes if found and found["growth_mb"] > _MOST_GROWTH_MB],
        "shared_mb": {"least": min(shared), "most": max(shared), "last": shared[-1]},
        "leaked": _leaked(after),
        "status": after,
    }


def _look(at_s: float) -> Iterator[tuple[tuple[str, int], Sample]]:
    """Every process of the service; the load is not among them."""
    for process in psutil.Process().children(recursive=True):
        try:
            with process.oneshot():
                memory = process.memory_info()
                own = (memory.rss - memory.shared) / 1e6
                name = (process.name() if "ray::" in process.name() else Path(process.cmdline()[0]).name)[:24]
                yield (name, process.pid), Sample(at_s, own, process.num_fds(), process.num_threads())
        except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):  # it has ended, or is ending
            continue


def _shared_mb() -> float:
    return psutil.disk_usage("/dev/shm").used / 1e6


def _summary(key: tuple[str, int], seen: Sequence[Sample]) -> dict[str, Any] | None:
    """Of one process; None for one that did not live long enough to tell."""
    if len(seen) < 8:
        return None
    quarters = [seen[len(seen) * part // 4 : len(seen) * (part + 1) // 4] for part in range(4)]
    own = [statistics.median(sample.own_mb for sample in quarter) for quarter in quarters]
    files = [statistics.median(sample.files for sample in quarter) for quarter in quarters]
    threads = [statistics.median(sample.threads for sample in quarter) for quarter in quarters]
    return {
        "name": key[0],
        "pid": key[1],
        "own_mb": own,
        "growth_mb": own[3] - own[1],
        "files": files,
        "threads": threads,
    }


async def _idle(endpoint: str) -> dict[str, Any]:
    """Figures once nothing runs and nothing moves."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        await asyncio.sleep(1)
        found = status(endpoint)
        moving = sum(tier.get("pages_moving", 0) for tier in found["tiers"].values())
        if not (found["running"] or found["waiting"] or moving) or time.monotonic() > deadline:
            return found


def _leaked(after: dict[str, Any]) -> dict[str, float]:
    """What should be 0 when nothing runs."""
    host = after["tiers"].get("host", {})
    balances = {
        "running": after["running"],
        "waiting": after["waiting"],
        "pages in use": after["pages_in_use"],
        "pages locked": after["pages_locked"],
        "pages missing": after["pages_total"] - after["pages_free"] - after["pages_cached"] - after["pages_in_use"],
        "host pages moving": host.get("pages_moving", 0),
        "host pages missing": host.get("pages_total", 0)
        - sum(host.get(f"pages_{kind}", 0) for kind in ("free", "cached", "moving")),
    }
    return {name: value for name, value in balances.items() if value}


def _table(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['minutes']:g} min, {figures['answers']} answers, {figures['left']} clients went away, "
        f"{len(figures['failed'])} failed, {figures['tokens_per_s']:.0f} tokens/s"
    )
    yield f"shared memory MB: {figures['shared_mb']}; leaked: {figures['leaked'] or 'nothing'}"
    yield "| process | n | own MB per quarter | worst growth, 2nd to last quarter | open files per quarter |"
    yield "|---|---|---|---|---|"
    by_name = defaultdict[str, list[dict[str, Any]]](list)
    for process in figures["processes"]:
        by_name[process["name"]].append(process)
    for name, processes in by_name.items():
        own = " / ".join(f"{max(process['own_mb'][part] for process in processes):.0f}" for part in range(4))
        files = " / ".join(f"{max(process['files'][part] for process in processes):g}" for part in range(4))
        growth = max(process["growth_mb"] for process in processes)
        yield f"| {name} | {len(processes)} | {own} | {growth:+.1f} | {files} |"


if __name__ == "__main__":
    sys.exit(main())
