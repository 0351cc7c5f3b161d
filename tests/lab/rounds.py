"""Fault rounds over a lab: python -m tests.lab.rounds --rounds 20 --seed 1

A service runs over several hosts under a steady load of streams with shared prefixes. Each round draws a fault and a
host that has ranks, waits until all clients are served again, and repairs the host. Every token is compared with what
transformers answers, every request has a deadline, and the share of prompts that the cache still has is measured.

The deadline of a request: Ray calls a silent host dead after NODE_DEAD_S, ranks call a silent peer lost after RANK_S,
and a new gang has START_S to start. Twice, because one fault can strike while another is being repaired.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from tests.lab.answers import Load, prompts_with_answers
from tests.lab.hosts import CONTROL_ADDRESS, Lab, lab_of, missing
from tests.lab.load import Answer
from tests.lab.service import PAGE, Launched, launched, tiny_model
from tests.lab.started import StartedRay, environment
from tests.unit.storage_media import redis_binary

NODE_DEAD_S = 20.0
RANK_S = 20.0
START_S = 120.0
DEADLINE_S = 2 * (max(NODE_DEAD_S, RANK_S) + START_S)
_ENDPOINT_PORT = 8000
_STORAGE_PORT = 6379
_READY_S = 600.0


@dataclass(frozen=True)
class Fault:
    """Something that happens to a host.

    Attributes:
        name: for the table.
        strike: does it; returns when it is over, or lasts.
        is_lasting: whether the host has to be repaired afterwards.
    """

    name: str
    strike: Callable[[Lab, int], None]
    is_lasting: bool


def _cut_short(lab: Lab, host: int) -> None:
    lab.cut(host)
    time.sleep(2.0)
    lab.heal(host)


def _freeze(lab: Lab, host: int) -> None:
    lab.hosts[host].freeze()
    time.sleep(5.0)
    lab.hosts[host].thaw()


def _slow(lab: Lab, host: int) -> None:
    lab.slow(host, kilobytes_per_s=64)
    time.sleep(8.0)
    lab.slow(host, kilobytes_per_s=0)


def _delay(lab: Lab, host: int) -> None:
    lab.delay(host, milliseconds=100)
    time.sleep(8.0)
    lab.delay(host, milliseconds=0)


def _kill_rank(lab: Lab, host: int) -> None:
    ranks = [process for process in lab.hosts[host].processes() if "ray::RankActor" in " ".join(_words(process))]
    if ranks:
        ranks[0].kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


FAULTS = (
    Fault("link cut for 2 s", _cut_short, is_lasting=False),
    Fault("link cut for good", lambda lab, host: lab.cut(host), is_lasting=True),
    Fault("host frozen for 5 s", _freeze, is_lasting=False),
    Fault("link of 64 kB/s for 8 s", _slow, is_lasting=False),
    Fault("rank killed", _kill_rank, is_lasting=False),
    Fault("host killed", lambda lab, host: lab.hosts[host].kill(), is_lasting=True),
)
_DELAY = Fault("100 ms each way for 8 s", _delay, is_lasting=False)


@dataclass(frozen=True)
class Counts:
    """Answers; a wrong one may have failed, too."""

    right: int
    wrong: int
    failed: int


@dataclass(frozen=True)
class Row:
    """One round in the table."""

    fault: str
    host: str
    counts: Counts
    pause_s: float
    kept: float
    errors: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4, help="that can have ranks (default: %(default)s)")
    parser.add_argument("--split", default="2.1.2", help="tp.pp.cp (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--only", default="", help="draw only faults whose names have this in them")
    options = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    with lab_of(options.hosts + 1, **environment(RAYCACHE_API_KEY="lab")) as lab:
        ray = StartedRay(lab, num_cpus=2, head_cpus=0)
        ray.start()
        _start_storage(lab)
        command = lab.ssh_command(0, _launch_command(lab, split=options.split), is_terminal=True)
        with launched(command, log=lab.folder / "launch.log") as service:
            try:
                rows, every = _rounds(lab, ray, service, options)
            finally:
                print(service.said[-20_000:], file=sys.stderr)
    print(_table(rows))
    print(f"\nAll answers, those while hosts were repaired too: {every.right} / {every.wrong} / {every.failed}")
    return 1 if every.wrong or every.failed else 0


def _start_storage(lab: Lab) -> None:
    """A server beside the hosts, which ends with the lab."""
    server = [redis_binary(), "--port", str(_STORAGE_PORT), "--bind", CONTROL_ADDRESS, "--protected-mode", "no"]
    command = lab.control.command([*server, "--save", "", "--dir", "/tmp"])
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    lab.await_port(_STORAGE_PORT, address=CONTROL_ADDRESS)


def _launch_command(lab: Lab, *, split: str) -> str:
    model = tiny_model(lab)
    tp, pp, cp = split.split(".")
    flags = [
        f"--tp {tp} --pp {pp} --cp {cp} --device cpu --page-size {PAGE} --num-pages 96 --host-memory 16MiB",
        f"--host {lab.address(0)} --port {_ENDPOINT_PORT} --rank-timeout-s {RANK_S:.0f}",
        f"--start-timeout-s {START_S:.0f} --address auto --storage redis://{CONTROL_ADDRESS}:{_STORAGE_PORT}/0",
        "--prefetch wait_complete --prefetch-timeout-s 5",
    ]
    return f"exec raycache launch {model} {' '.join(flags)}"


def _rounds(lab: Lab, ray: StartedRay, service: Launched, options: argparse.Namespace) -> tuple[list[Row], Counts]:
    """A row per round, and what became of all answers."""
    draw = random.Random(options.seed)
    faults = [fault for fault in (*FAULTS, *[_DELAY] * lab.can_delay()) if options.only in fault.name]
    service.await_line("endpoint", within_s=_READY_S)
    endpoint = f"http://{lab.address(0)}:{_ENDPOINT_PORT}"
    work = prompts_with_answers(lab.folder / "shared" / "tiny", seed=options.seed)
    rows: list[Row] = []
    with Load(lab, endpoint, work, clients=options.clients, deadline_s=DEADLINE_S) as load:
        load.await_all_served(since_s=time.monotonic(), within_s=DEADLINE_S)
        for number in range(options.rounds):
            host = draw.choice(load.hosts_with_ranks())
            row = _round(lab, load, draw.choice(faults), host, repair=lambda number: _repair(lab, ray, number))
            rows.append(row)
            print(f"{number + 1}: {_line(row)}", file=sys.stderr, flush=True)
        every = _counts(load, load.between(0.0, time.monotonic()))
    return rows, every


def _counts(load: Load, answers: Sequence[Answer]) -> Counts:
    return Counts(
        right=sum(load.is_right(answer) for answer in answers if not answer.error),
        wrong=sum(not load.is_right(answer) for answer in answers),
        failed=sum(bool(answer.error) for answer in answers),
    )


def _round(lab: Lab, load: Load, fault: Fault, host: int, *, repair: Callable[[int], None]) -> Row:
    begin = time.monotonic()
    fault.strike(lab, host)
    over = time.monotonic()
    load.await_all_served(since_s=over, within_s=DEADLINE_S + 60)
    seen = load.between(begin, time.monotonic())
    row = Row(
        fault=fault.name,
        host=f"h{host}",
        counts=_counts(load, seen),
        pause_s=load.pause_s(begin),
        kept=load.kept(since_s=over),
        errors=tuple(sorted({answer.error for answer in seen if answer.error})),
    )
    if fault.is_lasting:
        repair(host)
        load.await_all_served(since_s=time.monotonic(), within_s=DEADLINE_S + 60)
    return row


def _repair(lab: Lab, ray: StartedRay, number: int) -> None:
    if lab.hosts[number].pid:
        lab.heal(number)
    else:
        lab.start_host(number)
    ray.join(number)
    ray.await_nodes()


def _line(row: Row) -> str:
    counts = f"{row.counts.right} / {row.counts.wrong} / {row.counts.failed}"
    return f"{row.fault} | {row.host} | {counts} | {row.pause_s:.1f} | {row.kept:.0%} | {'; '.join(row.errors)}"


def _table(rows: list[Row]) -> str:
    lines = [
        f"Deadline of a request: {DEADLINE_S:.0f} s.",
        "",
        "| round | fault | host | right / wrong / failed | longest pause, s | prompts' pages still cached | errors |",
        "|---|---|---|---|---|---|---|",
        *(f"| {number} | {_line(row)} |" for number, row in enumerate(rows, start=1)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
