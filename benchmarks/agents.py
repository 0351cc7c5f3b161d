"""How many agents a deployment carries: sessions of turns and subagents are replayed, by more and more agents at once.

    python -m benchmarks.agents --endpoint http://127.0.0.1:8000
    python -m benchmarks.agents models/smollm2 --scale 0.01 --case "" --case "--host-memory 1GiB"
    python -m benchmarks.agents --shape qwen3-8b --scale 0.2 -- --max-model-len 65536

Any server with OpenAI's /v1/completions that takes token ids is measured with --endpoint; others are started, one after
the other for each --case, with the flags behind `--`. Sessions are drawn, or read with --sessions. See README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.agent_load import Agents, Play, Target, Trial, bisect
from benchmarks.client import Reply, complete
from benchmarks.figures import write_json
from benchmarks.server import launched
from benchmarks.sessions import Session, describe, read_sessions, synthetic_sessions, within
from benchmarks.trace import Prompt

_COLUMNS = (
    ("agents", 6, "agents", "d"),
    ("requests", 9, "requests", "d"),
    ("first token s p50", 18, "first_token_p50_s", ".2f"),
    ("p95", 7, "first_token_p95_s", ".2f"),
    ("tokens/s p50", 13, "tokens_per_s_p50", ".1f"),
    ("p90", 7, "tokens_per_s_p90", ".1f"),
    ("between tokens ms p50", 22, "between_tokens_p50_s", ".1f"),
    ("p99", 8, "between_tokens_p99_s", ".1f"),
    ("cached", 7, "cached", ".1%"),
)


class Endpoint:
    """A server with OpenAI's API.

    Args:
        url: such as "http://127.0.0.1:8000".
        model: name that it knows.
        timeout_s: for one answer.
    """

    def __init__(self, url: str, *, model: str, timeout_s: float) -> None:
        self._url, self._model, self._timeout_s = url, model, timeout_s

    async def ask(self, tokens: Sequence[int], output_len: int) -> Reply:
        """Send token ids; see `complete`."""
        prompt = Prompt(0.0, tuple(tokens), output_len)
        return await complete(self._url, prompt, model=self._model, timeout_s=self._timeout_s)


def model_card(url: str) -> dict[str, Any]:
    """Facts of the first model of a server: "id", and often "max_model_len".

    Raises:
        OSError: it does not answer, or with an error.
    """
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("RAYCACHE_API_KEY")) else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=30) as answer:
        card: dict[str, Any] = json.load(answer)["data"][0]
    return card


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each case, print a line per trial."""
    options, flags = _options(argv)
    sessions = read_sessions(options.sessions) if options.sessions else synthetic_sessions(100, seed=options.seed)
    known = describe(sessions)
    target = Target(options.tokens_per_s, options.first_token_s)
    print(
        f"{known.sessions} sessions, {known.requests:,} requests; medians: {known.turns:.0f} turns, "
        f"{known.prompt_tokens:,.0f} tokens in, {known.output_tokens:.0f} out; {known.reusable:.1%} reusable; "
        f"lengths times {options.scale:g}\n"
        f"target: 90 % of the agents get at least {target.tokens_per_s:g} tokens/s, 95 % of the first tokens come "
        f"within {target.first_token_s:g} s"
    )
    cases = []
    for name, endpoint in _endpoints(options, flags):
        print(f"\n{name}\n{' '.join(f'{title:>{width}}' for title, width, _, _ in _COLUMNS)}  met", flush=True)
        trials = asyncio.run(_measure(endpoint, sessions, target, options))
        carried = max((trial.agents for trial in trials if trial.meets(target)), default=0)
        is_limit = not options.agents and carried == options.most
        print(f"agents carried: {carried}{' or more, see --most' if is_limit else ''}")
        lines = [{**trial.figures(), "met": trial.meets(target)} for trial in trials]
        cases.append({"case": name, "carried": carried, "trials": lines})
    if options.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        write_json(options.json, {"settings": settings, "flags": flags, "sessions": asdict(known), "cases": cases})
    return 0


async def _measure(url: str, sessions: Sequence[Session], target: Target, options: argparse.Namespace) -> list[Trial]:
    """Trials of one server, printed as they end."""
    card = model_card(url)
    play = Play(
        options.seconds,
        options.scale,
        options.think,
        options.longest_think_s,
        range(options.vocab_size // 16, options.vocab_size),
        options.seed,
    )
    if longest := options.max_context or card.get("max_model_len"):
        sessions = [cut for each in sessions if (cut := within(each, int(longest), scale=options.scale)).turns]
    if not sessions:
        raise SystemExit(f"no prompt fits the server's {longest} tokens; use a smaller --scale")
    agents = Agents(Endpoint(url, model=card["id"], timeout_s=options.timeout_s), sessions, play)
    trials: list[Trial] = []

    async def try_(count: int) -> Trial:
        trials.append(await agents.trial(count))
        print(line(trials[-1], target), flush=True)
        return trials[-1]

    if options.agents:
        for count in options.agents:
            await try_(count)
    else:
        await bisect(try_, target, first=options.first, most=options.most, step=options.step)
    return trials


def line(trial: Trial, target: Target) -> str:
    """A trial as a line of the table."""
    figures = trial.figures()
    times = {name: 1e3 * value for name, value in figures.items() if name.startswith("between_tokens")}
    cells = [f"{{:>{width}{form}}}".format({**figures, **times}[name]) for _, width, name, form in _COLUMNS]
    return f"{' '.join(cells)}  {'yes' if trial.meets(target) else trial.failure or 'no'}"


@contextmanager
def _model(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """A model directory, and the flags that it needs."""
    if options.model:
        yield options.model, []
        return
    import torch

    from benchmarks.model_shape import ModelShape

    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.float32 if options.tiny else torch.bfloat16
        device_type = "cpu" if options.tiny else "cuda"
        shape = ModelShape.make(
            options.shape,
            Path(folder),
            layers=2 if options.tiny else 0,
            is_tiny=options.tiny,
            dtype=dtype,
            device_type=device_type,
        )
        yield str(shape.model_dir), ["--dummy-weights", "--device", device_type]


def _endpoints(options: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each case and where its server is."""
    if options.endpoint:
        yield options.endpoint, options.endpoint.rstrip("/").removesuffix("/v1")
        return
    with _model(options) as (model, needed):
        for case in options.case or [""]:
            more = [*needed, *flags, *shlex.split(case)]
            with launched(model, *more) as endpoint:
                yield " ".join((Path(model).name, *more)), endpoint


def _options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    given = list(sys.argv[1:] if argv is None else argv)
    given, flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=(__doc__ or "").splitlines()[0])
    server = parser.add_argument_group("server")
    server.add_argument("model", metavar="MODEL", nargs="?", help="model directory; a server is started for it")
    server.add_argument("--endpoint", metavar="URL", help="measure this server as it is (http only)")
    server.add_argument("--shape", metavar="NAME", help="file of benchmarks/shapes; a server with random weights")
    server.add_argument("--tiny", action="store_true", help="shrink the shape, on the CPU")
    server.add_argument("--case", metavar="FLAGS", action="append", help="more flags of a server; once per case")
    load = parser.add_argument_group("load")
    load.add_argument("--sessions", metavar="PATH", type=Path, help="trace to replay, see README.md (default: drawn)")
    load.add_argument("--scale", type=float, default=1.0, help="factor of lengths in tokens (default: %(default)s)")
    load.add_argument("--think", type=float, default=1.0, help="factor of think times (default: %(default)s)")
    load.add_argument(
        "--longest-think-s", metavar="S", type=float, default=10.0, help="limit of think times (default: %(default)s)"
    )
    load.add_argument(
        "--max-context", metavar="TOKENS", type=int, help="end sessions there (default: as the server says)"
    )
    load.add_argument("--vocab-size", type=int, help="token ids are below (default: 32000; 512 with --tiny)")
    load.add_argument("--seed", type=int, default=0)
    trial = parser.add_argument_group("trials")
    trial.add_argument("--seconds", type=float, default=60.0, help="of each trial (default: %(default)s)")
    trial.add_argument("--tokens-per-s", type=float, default=20.0, help="target per agent (default: %(default)s)")
    trial.add_argument("--first-token-s", type=float, default=2.0, help="target (default: %(default)s)")
    trial.add_argument("--first", metavar="N", type=int, default=1, help="agents to begin with (default: %(default)s)")
    trial.add_argument("--most", metavar="N", type=int, default=1024, help="agents at most (default: %(default)s)")
    trial.add_argument("--step", type=float, default=0.1, help="resolution, as a share (default: %(default)s)")
    trial.add_argument("--agents", metavar="N,...", help="trials of so many agents instead of a search")
    trial.add_argument("--timeout-s", type=float, default=600.0, help="of one answer (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    options = parser.parse_args(given)
    if sum(map(bool, (options.model, options.endpoint, options.shape))) != 1:
        parser.error("give one of MODEL, --endpoint URL and --shape NAME")
    if not 0 < options.scale <= 1:
        parser.error("--scale must be above 0 and up to 1")
    options.vocab_size = options.vocab_size or (512 if options.tiny else 32_000)
    options.agents = [int(count) for count in options.agents.split(",")] if options.agents else None
    return options, flags


if __name__ == "__main__":
    sys.exit(main())
