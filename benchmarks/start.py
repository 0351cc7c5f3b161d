"""Where the seconds of a start go: `raycache launch` as a person runs it, phase by phase, to the first answer.

    python -m benchmarks.start --tp 8 --cp 4              a tiny model that it makes itself
    python -m benchmarks.start --model DIR --tp 2 --json FILE

All other flags go to `raycache launch`.

Wall time says how long somebody waits on this machine at this moment; CPU time, of all processes together, says what
there is to do, and is the one to compare on a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.figures import write_json

_END_S = 60.0
_PHASES = (
    "checking the model",
    "starting Ray",
    "waiting for Ray",
    "starting the engine",
    "making the host tier",
    "starting ranks",
    "joining groups",
    "loading weights",
    "making pools",
)
"""As `raycache launch` tells them, a line each; the library's own import comes before."""


@dataclass
class Mark:
    """A phase's begin.

    Attributes:
        phase: its name.
        wall_s: since the start.
        cpu_s: used by all processes until then.
    """

    phase: str
    wall_s: float
    cpu_s: float


class Usage:
    """CPU time and memory of a process and all below it, dead ones included as far as they were seen.

    Args:
        process: at the top.
    """

    def __init__(self, process: psutil.Process) -> None:
        self._top = process
        self._seen: dict[int, float] = {}
        self._lock = threading.Lock()

    def cpu_s(self) -> float:
        with self._lock:
            for process in self._all():
                try:
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._seen[process.pid] = times.user + times.system
            return sum(self._seen.values())

    def own_bytes(self) -> list[int]:
        """Memory that each of the rank processes does not share, in bytes."""
        return [one.memory_full_info().uss for one in self._all() if "RankActor" in one.name()]

    def _all(self) -> list[psutil.Process]:
        try:
            return [self._top, *self._top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def measure(model: Path, *, flags: list[str], timeout_s: float) -> tuple[list[Mark], list[int]]:
    """Start, ask once, stop.

    Returns:
        Phases in order, the last one "stopped"; own bytes of each rank.
    """
    begin = time.monotonic()
    command = [sys.executable, "-u", "-m", "raycache", "launch", str(model), "--port", "auto", "--no-dashboard", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(timeout_s, process.send_signal, [signal.SIGTERM])
    watchdog.start()
    usage = Usage(psutil.Process(process.pid))
    marks = [Mark("command", 0.0, 0.0)]
    said = []

    def mark(phase: str) -> None:
        marks.append(Mark(phase, time.monotonic() - begin, usage.cpu_s()))

    try:
        assert process.stdout is not None
        endpoint = ""
        for line in process.stdout:
            said.append(line)
            if line.startswith("endpoint"):
                endpoint = line.split()[1]
                break
            if line.startswith(_PHASES):
                mark(line.strip()[:40])
        if not endpoint:
            raise SystemExit("no endpoint was printed:\n" + "".join(said))
        mark("first answer")
        body = {"model": model.name, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{endpoint}/completions", json=body, timeout=120)
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == 4
        mark("stop")
        own = usage.own_bytes()
        process.send_signal(signal.SIGINT)
        process.wait(_END_S)
        marks.append(Mark("stopped", time.monotonic() - begin, marks[-1].cpu_s))
        return marks, own
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


def report(marks: list[Mark], own: list[int]) -> None:
    print(f"{'phase':42} {'wall s':>7} {'CPU s':>7}")
    for here, after in itertools.pairwise(marks):
        print(f"{here.phase:42} {after.wall_s - here.wall_s:7.1f} {after.cpu_s - here.cpu_s:7.1f}")
    ready = next(mark for mark in marks if mark.phase == "first answer")
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(f"\nready after {ready.wall_s:.1f} s, {ready.cpu_s:.1f} s of CPU on {cores} cores, load average {load:.1f}")
    if own:
        print(f"{len(own)} ranks, {max(own) / 2**20:.0f} MiB of its own at most, {sum(own) / 2**30:.1f} GiB in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory; default: a tiny one that is made for it")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            from tests.oracle import tiny_tokenizers
            from tests.oracle.tiny import make_tiny

            model = tiny_tokenizers.byte_level(make_tiny(Path(folder) / "tiny", "qwen3"))
            flags = ["--num-pages", "64", "--device", "cpu", *flags]
        marks, own = measure(model, flags=flags, timeout_s=options.timeout_s)
    report(marks, own)
    if options.json:
        write_json(options.json, {"marks": [mark.__dict__ for mark in marks], "own_bytes": own})


if __name__ == "__main__":
    main()
