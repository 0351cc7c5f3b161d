"""What tiers cost where they are of no use: throughput of prompts that nobody has sent before, tiers on and off.

    python -m benchmarks.tier_overhead models/smollm2
    python -m benchmarks.tier_overhead models/smollm2 --prompts 8 --tokens 512 --rounds 9 --json out.json

Two engines in this process, one with host tier and file storage, take the same prompts in turns; which one goes first
changes from round to round. The tiers are full before the first round that counts, so that every page that is saved
evicts another. CPU time is that of all threads: what the tiers do beside the computing is in it. On a busy machine it
says more than the clock on the wall does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.figures import write_json
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.llm import LLM
from raycache.memory.component import FULL
from raycache.types import CacheAction, CacheCommand, SamplingParams

_PAGE_SIZE = 64
_WANTED_RATIO = 1.02
_FIRST_ROUNDS = 1
"""Not counted: they fill the tiers."""
_HELD_ROUNDS = 1.0
"""Rounds whose pages device, host and storage hold; less than that are there when a prompt comes."""


@dataclass(frozen=True)
class Spent:
    """What one round took.

    Attributes:
        cpu_s: of all threads of the process.
        wall_s: seconds.
    """

    cpu_s: float
    wall_s: float


def run(llm: LLM, prompts: Sequence[Sequence[int]], *, num_new: int) -> tuple[Spent, list[tuple[int, ...]]]:
    """Answer prompts in one batch, and wait until their pages are in all tiers.

    Raises:
        RuntimeError: something was cached, which is not what is to be measured.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    completions = llm.generate(prompts, sampling)
    wall_s = time.perf_counter() - wall_s
    llm.cache(CacheCommand(CacheAction.STATUS))  # what is on its way to lower tiers costs CPU time too
    spent = Spent(time.process_time() - cpu_s, wall_s)
    if any(completion.cached_tokens for completion in completions):
        raise RuntimeError(f"prompts nobody has sent were cached: {[c.cached_by_tier for c in completions]}")
    return spent, [completion.token_ids for completion in completions]


def measure(sides: Mapping[str, LLM], options: argparse.Namespace) -> dict[str, list[Spent]]:
    """All rounds of both sides.

    Raises:
        RuntimeError: they gave different answers.
    """
    draw = random.Random(0)
    spent: dict[str, list[Spent]] = {name: [] for name in sides}
    for number in range(_FIRST_ROUNDS + options.rounds):
        vocab_size = sides["off"].info.vocab_size
        prompts = [[draw.randrange(3, vocab_size) for _ in range(options.tokens)] for _ in range(options.prompts)]
        answers = {}
        for name in sorted(sides, reverse=bool(number % 2)):
            one, answers[name] = run(sides[name], prompts, num_new=options.new_tokens)
            if number >= _FIRST_ROUNDS:
                spent[name].append(one)
                print(f"round {number} {name:4} {one.cpu_s:8.3f} CPU s {one.wall_s:8.3f} s", flush=True)
        if answers["off"] != answers["on"]:
            raise RuntimeError(f"round {number}: answers differ between tiers on and off")
    for llm in sides.values():
        llm.check()
    return spent


def main(argv: Sequence[str] | None = None) -> int:
    """Print ratios; the exit code says whether CPU time stays within 2 %."""
    options = _options(argv)
    torch.set_num_threads(options.threads)
    settings = {"model": str(options.model), "device": "cpu", "page_size": _PAGE_SIZE, "max_running": options.prompts}
    config = Config.from_mapping(settings)
    page_bytes = deploy(config, device_type="cpu").envelope_layout().unit_bytes(FULL)
    num_pages = options.prompts * -(-(options.tokens + options.new_tokens) // _PAGE_SIZE)
    held_bytes = int(_HELD_ROUNDS * num_pages * page_bytes * 1.1)
    with tempfile.TemporaryDirectory() as folder:
        storage = f"file://{options.directory or folder}/overhead?size={held_bytes + (16 << 20)}"
        tiers = {"host_memory": f"{held_bytes}", "storage": storage, "prefetch": options.prefetch}
        with LLM(**settings, num_pages=num_pages + 1) as off, LLM(**settings, num_pages=num_pages + 1, **tiers) as on:
            spent = measure({"off": off, "on": on}, options)
            counts = on.cache(CacheCommand(CacheAction.STATUS))["tiers"]
    ratio = _print_ratios(spent, num_tokens=options.prompts * (options.tokens + options.new_tokens))
    print(
        f"host: {counts['host']['saved_pages']:.0f} pages saved, {counts['host']['evicted_pages']:.0f} evicted; ",
        end="",
    )
    print(f"file: {counts['storage']['stored']:.0f} stored, {counts['storage']['evicted']:.0f} evicted")
    if options.json:
        write_json(options.json, {name: [vars(one) for one in rounds] for name, rounds in spent.items()})
    return 0 if ratio <= _WANTED_RATIO else 1


def _print_ratios(spent: Mapping[str, Sequence[Spent]], *, num_tokens: int) -> float:
    """Returns: CPU time on by off, the median over rounds."""
    wall_s = {name: statistics.median(one.wall_s for one in rounds) for name, rounds in spent.items()}
    print(f"tokens per second: off {num_tokens / wall_s['off']:.1f}, on {num_tokens / wall_s['on']:.1f}")
    pairs = list(zip(spent["on"], spent["off"], strict=True))
    ratios = {
        "CPU time": sorted(on.cpu_s / off.cpu_s for on, off in pairs),
        "wall time": sorted(on.wall_s / off.wall_s for on, off in pairs),
    }
    for name, values in ratios.items():
        median = statistics.median(values)
        print(f"{name:10} on / off: {median:.4f} ({values[0]:.4f} to {values[-1]:.4f})")
    print(f"wanted at most {_WANTED_RATIO}")
    return statistics.median(ratios["CPU time"])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tier_overhead", description="Tiers that only miss.")
    parser.add_argument("model", metavar="MODEL", type=Path, help="directory")
    parser.add_argument("--prompts", type=int, default=2, help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="per prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=4, help="per prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="in turns (default: %(default)s)")
    parser.add_argument("--prefetch", default="wait_complete", help="as of raycache launch (default: %(default)s)")
    parser.add_argument("--directory", metavar="DIR", type=Path, help="of the file storage; default: a temporary one")
    parser.add_argument("--threads", type=int, default=1, help="that compute (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
