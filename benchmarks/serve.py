"""Replays a trace of conversations against the server, with the prefix cache on and off, next to plain transformers.

    python -m benchmarks.serve models/smollm2 --trace conversation_trace.jsonl --requests 64 --cp 2
    python -m benchmarks.serve models/smollm2 --synthetic --requests 32
    python -m benchmarks.serve models/smollm2 --compare-transformers

Every configuration has a server of its own, started by the command line and stopped after its replay. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import Reply, replay
from benchmarks.figures import percentile, write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt, bound, choose, expand, read_trace, synthetic_trace

_ONE_BY_ONE = "transformers, one by one"


@dataclass(frozen=True)
class Run:
    """One replay.

    Attributes:
        name: of the configuration.
        replies: one per request.
        evicted_pages: by the server, while it ran; None where there is none.
    """

    name: str
    replies: list[Reply]
    evicted_pages: int | None = None

    def figures(self) -> dict[str, Any]:
        """Times in milliseconds."""
        first_ms = [1e3 * reply.first_token_s for reply in self.replies]
        gaps_ms = [1e3 * gap for reply in self.replies for gap in reply.gaps_s]
        start_s = min(reply.start_s for reply in self.replies)
        seconds = max(reply.token_times_s[-1] for reply in self.replies) - start_s
        output_tokens = sum(len(reply.token_times_s) for reply in self.replies)
        return {
            "requests": len(self.replies),
            "seconds": seconds,
            "ttft_p50_ms": percentile(first_ms, 50),
            "ttft_p99_ms": percentile(first_ms, 99),
            "itl_p50_ms": percentile(gaps_ms, 50),
            "itl_p99_ms": percentile(gaps_ms, 99),
            "output_tokens_per_s": output_tokens / seconds,
            "hit_rate": sum(reply.cached_tokens for reply in self.replies)
            / sum(reply.prompt_tokens for reply in self.replies),
            "evicted_pages": self.evicted_pages,
        }


def main() -> int:
    options = _options()
    if options.compare_transformers:
        from benchmarks import compare

        return compare.main([options.model, *(["--json", str(options.json)] if options.json else [])])
    page_size = options.page_size or options.block_tokens
    prompts, title = _prompts(options)
    best = bound([prompt.tokens for prompt in prompts], page_size=page_size)
    prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    longest = max(len(prompt.tokens) for prompt in prompts)
    output_tokens = sum(prompt.output_len for prompt in prompts)
    print(
        f"{title}: {len(prompts)} requests, {prompt_tokens} prompt tokens (longest {longest}), {output_tokens} output "
        f"tokens\nbound of the hit rate, pages of {page_size} tokens, unlimited pool: {best:.1%}\n\n{_header()}",
        flush=True,
    )
    figures: dict[str, list[dict[str, Any]]] = {}
    for run in _runs(options, prompts, page_size=page_size):
        found = run.figures()
        figures.setdefault(run.name, []).append(found)
        print(_line(run.name, found), flush=True)
    if options.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        write_json(options.json, {"settings": settings, "bound": best, "runs": figures})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory of a model, such as `raycache demo-model` writes")
    trace = parser.add_argument_group("requests")
    trace.add_argument("--trace", metavar="FILE", type=Path, help="of the format that README.md names")
    trace.add_argument("--synthetic", action="store_true", help="make a trace instead")
    trace.add_argument("--requests", type=int, default=48, help="about so many (default: %(default)s)")
    trace.add_argument("--block-tokens", type=int, default=32, help="instead of 512 (default: %(default)s)")
    trace.add_argument("--seed", type=int, default=0, help="of the choice of prefix trees")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, default=16, help="requests under way (default: %(default)s)")
    load.add_argument("--speed", type=float, default=0.0, help="keep the trace's times, so many times faster")
    load.add_argument("--timeout-s", type=float, default=600.0, help="of one request (default: %(default)s)")
    load.add_argument("--transformers", type=int, default=8, metavar="N", help="first requests that it runs, 0: none")
    load.add_argument("--rounds", type=int, default=1, help="of all configurations in turn (default: %(default)s)")
    server = parser.add_argument_group("server")
    server.add_argument("--endpoint", metavar="URL", help="ask this one, as it is, instead of starting any")
    for axis in ("tp", "pp", "cp"):
        server.add_argument(f"--{axis}", type=int, default=1)
    server.add_argument(
        "--num-pages", metavar="N|auto", default="auto", help="as of raycache launch (default: %(default)s)"
    )
    server.add_argument("--page-size", type=int, metavar="TOKENS", help="default: the tokens of a block")
    parser.add_argument("--compare-transformers", action="store_true", help="benchmarks.compare with its defaults")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    options = parser.parse_args()
    if not options.compare_transformers and (options.trace is None) != options.synthetic:
        parser.error("give one of --trace FILE, --synthetic and --compare-transformers")
    return options


def _prompts(options: argparse.Namespace) -> tuple[list[Prompt], str]:
    if options.synthetic:
        chosen, title = synthetic_trace(options.requests, seed=options.seed), "synthetic trace"
    else:
        whole = read_trace(options.trace)
        chosen = choose(whole, count=options.requests, seed=options.seed)
        title = f"{options.trace.name} (of {len(whole)} requests)"
    token_ids = plain_token_ids(options.model)
    return expand(chosen, block_tokens=options.block_tokens, token_ids=token_ids), title


def _runs(options: argparse.Namespace, prompts: Sequence[Prompt], *, page_size: int) -> Iterator[Run]:
    """All configurations, one after the other, as often as there are rounds."""
    flags = [f"--{axis}={getattr(options, axis)}" for axis in ("tp", "pp", "cp")]
    flags += [f"--page-size={page_size}", f"--num-pages={options.num_pages}"]
    theirs = _theirs(options)
    for _ in range(options.rounds):
        if options.endpoint:
            yield _replay("as it runs", options.endpoint, prompts, options=options)
        else:
            for name, flag in (("cache on", "--prefix-cache"), ("cache off", "--no-prefix-cache")):
                with launched(options.model, *flags, flag) as endpoint:
                    yield _replay(name, endpoint, prompts, options=options)
        if theirs:
            yield Run(_ONE_BY_ONE, theirs.generate(prompts[: options.transformers]))


def _theirs(options: argparse.Namespace) -> Any:
    if not options.transformers:
        return None
    from benchmarks.oracle import Transformers

    return Transformers(options.model)


def _replay(name: str, endpoint: str, prompts: Sequence[Prompt], *, options: argparse.Namespace) -> Run:
    before = status(endpoint)
    longest = max(len(prompt.tokens) + prompt.output_len for prompt in prompts)
    if longest > before["max_model_len"]:
        sys.exit(
            f"the longest request has {longest} tokens, the server takes {before['max_model_len']}; use fewer "
            "--block-tokens, more --num-pages, or another --seed"
        )
    warm_up = [Prompt(0.0, prompts[0].tokens[:1] * 3, 4)]
    load: dict[str, Any] = {"model": before["model"], "timeout_s": options.timeout_s}
    asyncio.run(replay(endpoint, warm_up, concurrency=1, speed=0.0, **load))
    replies = asyncio.run(replay(endpoint, prompts, concurrency=options.concurrency, speed=options.speed, **load))
    after = status(endpoint)
    if after["pages_in_use"] or after["running"]:
        print(f"{name}: {after['pages_in_use']} pages are still in use", file=sys.stderr)
    return Run(name, replies, evicted_pages=after["evicted_pages"] - before["evicted_pages"])


def _header() -> str:
    times = f"{'TTFT ms p50':>11} {'p99':>8} {'ITL ms p50':>11} {'p99':>8}"
    return f"{'':26} {times} {'tokens/s':>9} {'hit rate':>9} {'evicted':>8}"


def _line(name: str, figures: dict[str, Any]) -> str:
    evicted = "-" if figures["evicted_pages"] is None else figures["evicted_pages"]
    return (
        f"{name:26} {figures['ttft_p50_ms']:11.0f} {figures['ttft_p99_ms']:8.0f} {figures['itl_p50_ms']:11.1f} "
        f"{figures['itl_p99_ms']:8.1f} {figures['output_tokens_per_s']:9.1f} {figures['hit_rate']:9.1%} {evicted:>8}"
    )


if __name__ == "__main__":
    sys.exit(main())
