"""RayCache and transformers in one process, in turns, so that a busy machine slows both alike.

    python -m benchmarks.compare models/smollm2

Three ratios, each the median over rounds:

single stream   inter-token latency, ours by theirs
concurrent      output tokens per second of 16 requests in one batch, ours, by theirs one after the other
prefix          time to the first token over a prefix of 1,000 tokens, the first time by the second
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.client import Reply
from benchmarks.figures import write_json
from benchmarks.oracle import Transformers
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt
from raycache.config import Config
from raycache.decider.engine import Engine
from raycache.deployment.deployment import deploy
from raycache.gang.build import build_engine
from raycache.gang.executors import LocalExecutor
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.types import GenerateRequest, SamplingParams

_NUM_PAGES = 512
_PREFIX_LEN = 1000
_QUESTION_LEN = 24
_THEIRS_OF_CONCURRENT = 4
"""Requests of a concurrent round that transformers runs: its tokens per second do not depend on how many there are."""


class InProcess:
    """The engine and one rank in this process, as `LLM` puts them together, with the time of every token.

    Args:
        model: directory.
    """

    def __init__(self, model: str) -> None:
        config = Config(model=model, device="cpu", num_pages=_NUM_PAGES)
        deployment = deploy(config, device_type="cpu")
        loaded = load(deployment, alone())
        num_pages = loaded.measure()
        self._engine: Engine = build_engine(LocalExecutor(loaded.build(num_pages)), deployment, num_pages=num_pages)
        self._count = 0

    def generate(self, prompts: Sequence[Prompt]) -> list[Reply]:
        """Greedy, all in one batch."""
        start_s = time.perf_counter()
        cached: dict[str, int] = {}
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self._count += 1
            sampling = SamplingParams(temperature=0.0, max_tokens=prompt.output_len, ignore_eos=True)
            self._engine.add(GenerateRequest(str(self._count), prompt.tokens, sampling))
            times[str(self._count)] = []
        while self._engine.has_requests:
            for output in self._engine.step():
                times[output.request_id] += [time.perf_counter()] * len(output.token_ids)
                cached[output.request_id] = output.cached_tokens
        return [
            Reply(start_s, tuple(times[name]), len(prompt.tokens), cached[name])
            for name, prompt in zip(times, prompts, strict=True)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    torch.set_num_threads(options.threads)
    print(f"{options.model}, float32 on {options.threads} CPU threads, {options.rounds} rounds")
    bench = Comparison(options)
    ours, theirs = bench.ours, bench.theirs
    for side in (ours, theirs):  # the first pass of either is slower than all others
        side.generate([bench.prompt(32, output_len=4)])
    figures = {
        "single": bench.single_stream(),
        "concurrent": bench.concurrent(),
        "prefix": bench.prefix(),
    }
    if options.json:
        write_json(options.json, figures)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description="RayCache and transformers, in turns."
    )
    parser.add_argument("model", metavar="MODEL", help="directory of a model")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    # With a thread per core, any other process makes all threads of a parallel region wait for the one that it stops.
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests in one batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


class Comparison:
    """Both sides, and prompts for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.ours = InProcess(options.model)
        self.theirs = Transformers(options.model)
        self._options = options
        self._draw = random.Random(options.seed)
        self._token_ids = plain_token_ids(options.model)

    def prompt(self, length: int, *, output_len: int, after: Prompt | None = None) -> Prompt:
        """A new random prompt, below another one's tokens."""
        head = after.tokens if after else ()
        return Prompt(0.0, (*head, *self._draw.choices(self._token_ids, k=length)), output_len)

    def single_stream(self) -> dict[str, Any]:
        ours, theirs = [], []
        for _ in range(self._options.rounds):
            prompt = self.prompt(self._options.prompt_len, output_len=self._options.output_len)
            ours.append(statistics.median(self.ours.generate([prompt])[0].gaps_s))
            theirs.append(statistics.median(self.theirs.generate([prompt])[0].gaps_s))
        return _told("single stream, ms between tokens", ours, theirs, unit=1e3, bar="at most 1.15")

    def concurrent(self) -> dict[str, Any]:
        ours, theirs = [], []
        for _ in range(self._options.rounds):
            prompts = [
                self.prompt(self._options.prompt_len, output_len=self._options.output_len)
                for _ in range(self._options.concurrency)
            ]
            ours.append(_tokens_per_s(self.ours.generate(prompts)))
            theirs.append(_tokens_per_s(self.theirs.generate(prompts[:_THEIRS_OF_CONCURRENT])))
        return _told(f"{self._options.concurrency} requests, tokens/s", ours, theirs, unit=1, bar="at least 4")

    def prefix(self) -> dict[str, Any]:
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(self._options.rounds):
            prefix = self.prompt(_PREFIX_LEN, output_len=1)
            for times in (cold, warm):
                question = self.prompt(_QUESTION_LEN, output_len=1, after=prefix)
                times.append(self.ours.generate([question])[0].first_token_s)
        return _told(
            f"prefix of {_PREFIX_LEN}, ms to the first token", cold, warm, unit=1e3, bar="at least 5", names=_COLD_WARM
        )


_SIDES = ("raycache", "transformers")
_COLD_WARM = ("first time", "second time")


def _tokens_per_s(replies: Sequence[Reply]) -> float:
    start_s = min(reply.start_s for reply in replies)
    end_s = max(reply.token_times_s[-1] for reply in replies)
    return sum(len(reply.token_times_s) for reply in replies) / (end_s - start_s)


def _told(
    title: str, a: list[float], b: list[float], *, unit: float, bar: str, names: tuple[str, str] = _SIDES
) -> dict[str, Any]:
    """Print and return the medians, and the median of the rounds' ratios."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"{title:36} {names[0]} {unit * statistics.median(a):8.1f}   {names[1]} {unit * statistics.median(b):8.1f}   "
        f"ratio {ratio:.2f} ({spread}), wanted {bar}",
        flush=True,
    )
    return {names[0]: a, names[1]: b, "ratio": ratio, "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main())
