"""What the ingress by Ray Serve adds to the time to the first token and between tokens, against the server of `launch`.

    python -m benchmarks.serve_ingress MODEL --streams 1 8 32 --rounds 3

Two services of the same settings, one of each kind, asked in turns with the same prompts; ratios are those of
neighbours, the median of all rounds. The processes of the one that is not asked are idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import Reply, replay
from benchmarks.figures import percentile, write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt

KINDS = ("builtin", "serve")
_TIMEOUT_S = 600.0


def main() -> int:
    options = _options()
    flags = ["--device", "cpu", f"--num-pages={options.num_pages}", "--page-size=16"]
    token_ids = plain_token_ids(options.model)
    runs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as services:
        endpoints = {kind: services.enter_context(launched(options.model, *flags, "--ingress", kind)) for kind in KINDS}
        for number in range(-1, options.rounds):  # the first one warms up
            for streams in options.streams if number >= 0 else options.streams[:1]:
                prompts = _prompts(options, token_ids, seed=1000 * number + streams, count=max(4, 2 * streams))
                found = {kind: _ask(endpoints[kind], prompts, streams=streams) for kind in KINDS}
                if number >= 0:
                    runs.append({"streams": streams, **found})
                    print(f"{streams} streams: {_told(found)}", flush=True)
    ratios = {streams: _ratios([run for run in runs if run["streams"] == streams]) for streams in options.streams}
    print("\nserve / builtin, medians")
    for streams, each in ratios.items():
        print(f"{streams:3} streams  " + "  ".join(f"{name} {value:.2f}" for name, value in each.items()))
    if options.json:
        write_json(options.json, {"runs": runs, "ratios": ratios})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_ingress", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", metavar="MODEL", help="directory of a model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="at the same time")
    parser.add_argument("--rounds", type=int, default=3, help="of all numbers of streams (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--num-pages", type=int, default=512, help="of either pool (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    return parser.parse_args()


def _prompts(options: argparse.Namespace, token_ids: Sequence[int], *, seed: int, count: int) -> list[Prompt]:
    draw = random.Random(seed)
    return [
        Prompt(0.0, tuple(draw.choices(token_ids, k=options.prompt_tokens)), options.output_tokens)
        for _ in range(count)
    ]


def _ask(endpoint: str, prompts: Sequence[Prompt], *, streams: int) -> dict[str, float]:
    model = status(endpoint)["model"]
    replies: list[Reply] = asyncio.run(
        replay(endpoint, prompts, model=model, concurrency=streams, speed=0.0, timeout_s=_TIMEOUT_S)
    )
    gaps = [gap for reply in replies for gap in reply.gaps_s]
    seconds = max(reply.token_times_s[-1] for reply in replies) - min(reply.start_s for reply in replies)
    return {
        "ttft_p50_ms": 1e3 * percentile([reply.first_token_s for reply in replies], 50),
        "itl_p50_ms": 1e3 * percentile(gaps, 50),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
        "tokens_per_s": sum(len(reply.token_times_s) for reply in replies) / seconds,
    }


def _told(found: dict[str, dict[str, float]]) -> str:
    return "; ".join(
        f"{kind} " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
        for kind, figures in found.items()
    )


def _ratios(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        name: statistics.median(run["serve"][name] / run["builtin"][name] for run in runs)
        for name in runs[0]["builtin"]
    }


if __name__ == "__main__":
    sys.exit(main())
