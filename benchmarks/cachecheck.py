"""How often `raycache cachecheck` finds faults, and how often it calls a right server faulty, over many seeds.

    python -m benchmarks.cachecheck faults                          # faults planted in a small server
    python -m benchmarks.cachecheck simulated                       # modelled noise, without a server
    python -m benchmarks.cachecheck right MODEL [-- --tp 2 ...]     # raycache launch MODEL with these flags
    python -m benchmarks.cachecheck right llama                     # the same with a tiny random model of a family
    python -m benchmarks.cachecheck right http://127.0.0.1:8000     # a running server, which is known to be right
    python -m benchmarks.cachecheck tiers [--servers smollm2-cp2]   # those of right_servers.py: hits from each tier

Each seed is a run of its own, with other prompts. For right servers it also shows how close they came: the share of
comparisons above the lower threshold, of which the test assumes at most 5 %, the largest change as a part of the upper
threshold, comparisons of each scenario, and with RayCache the tiers that hits came from. A tier that was asked for and
served no tokens was not tested: that is an error, as a false alarm is. Prompts of random families have few tokens, as
their tokens are bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.right_servers import SERVERS
from benchmarks.server import launched, status
from raycache.cachecheck.check import Options, Result, check, figures
from raycache.cachecheck.client import Connection
from raycache.cachecheck.report import verdict
from raycache.types import TIERS

_SMALL = 100
"""Pages of a cache that long prompts fill."""

_AGAIN = ("branched", "grown", "tools", "load", "evicted")
"""Scenarios that ask for prefixes again after others."""

_AGAIN_BUDGET = 165
"""Requests of two rounds of these, and of what comes before them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all seeds.

    Returns:
        1: a fault was not found, a right server was called faulty, or a tier of it was not tested.
    """
    options = _parsed(sys.argv[1:] if argv is None else argv)
    found = {"faults": _faults, "simulated": _simulated, "right": _right, "tiers": _tiers}[options.command](options)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return int(found["exit_code"])


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    """Options; what follows "--" is for raycache launch.

    It is cut off first: argparse gives a positional of any number its arguments, none, before options are read.
    """
    at = list(given).index("--") if "--" in given else len(given)
    return argparse.Namespace(**vars(_parser().parse_args(given[:at])), flags=list(given[at + 1 :]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    faults = commands.add_parser("faults")
    simulated = commands.add_parser("simulated")
    simulated.add_argument("--runs", type=int, default=5000, help="of each model")
    simulated.add_argument("--json", type=Path, help="keep the figures")
    right = commands.add_parser("right")
    right.add_argument("target", help="URL, directory of a model, or family in tests/oracle/families.py")
    tiers = commands.add_parser("tiers")
    tiers.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), metavar="NAME")
    tiers.add_argument("--smollm2", type=Path, default=Path("models/smollm2"), help="directory of the converted model")
    for command, budget, seeds in ((faults, 400, 20), (right, 120, 20), (tiers, _AGAIN_BUDGET, 3)):
        command.add_argument("--seeds", type=int, default=seeds, help="runs")
        command.add_argument("--first-seed", type=int, default=0)
        command.add_argument("--budget-requests", type=int, default=budget)
        command.add_argument("--prompt-tokens", type=int, default=60)
        command.add_argument("--output-tokens", type=int, default=6)
        command.add_argument("--json", type=Path, help="keep the figures")
    return parser


def _seeds(options: argparse.Namespace) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _options(options: argparse.Namespace, seed: int, **others: Any) -> Options:
    return Options(
        seed=seed,
        budget=options.budget_requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        **others,
    )


def _faults(options: argparse.Namespace) -> dict[str, Any]:
    """How many requests each planted fault takes until it is found."""
    from tests.oracle.cached_server import CachedServer, Planted

    rows: dict[str, Any] = {}
    print(f"{'planted fault':40} {'found':>9}  requests: median, most   found by")
    for fault in Planted:
        taken, by = [], collections.Counter[str]()
        for seed in _seeds(options):
            server = CachedServer(fault, pages=_SMALL if fault is Planted.STALE_PAGE else 4000)
            connection = Connection("http://127.0.0.1", transport=httpx2.ASGITransport(server.app), clock=server.clock)
            result = asyncio.run(check(connection, _options(options, seed, stops=True)))
            if result.faults:
                taken.append(result.faults[0].number)
                by[f"{result.faults[0].scenario} ({result.faults[0].test})"] += 1
        rows[fault] = {"runs": options.seeds, "requests": taken, "by": by}
        middle = f"{statistics.median(taken):8.0f}, {max(taken)}" if taken else "-"
        ways = ", ".join(f"{count} {way}" for way, count in by.most_common())
        print(f"{fault:40} {len(taken):3} of {options.seeds:2}  {middle:24} {ways}", flush=True)
    missed = sum(row["runs"] - len(row["requests"]) for row in rows.values())
    return {"exit_code": min(1, missed), "faults": rows}


def _simulated(options: argparse.Namespace) -> dict[str, Any]:
    """How often modelled noise is called a fault, and how often a modelled fault is found."""
    from raycache.cachecheck.noise import ALPHA
    from tests.oracle.noise_models import FAULTY, RIGHT

    rows: dict[str, Any] = {}
    print("| model | runs | called faulty | by |\n|---|---|---|---|")
    for name, model in {**RIGHT, **FAULTY}.items():
        draw = random.Random(name)
        found = [model.run(draw, rounds=12 + 12 * (at % 2)) for at in range(options.runs)]
        by = collections.Counter(faults[0].test for faults in found if faults)
        rows[name] = dict(by)
        ways = ", ".join(f"{count} {test}" for test, count in by.most_common())
        print(f"| {name} | {options.runs:,} | {by.total():,} | {ways or '-'} |", flush=True)
    alarms = sum(sum(rows[name].values()) for name in RIGHT)
    print(f"{alarms} false alarms in {len(RIGHT) * options.runs:,} runs")
    return {"exit_code": int(alarms > ALPHA * len(RIGHT) * options.runs), "models": rows}


def _right(options: argparse.Namespace) -> dict[str, Any]:
    """How often a right server is called faulty, and how close it came."""
    flags = {flag.split("=")[0] for flag in options.flags}
    wanted = [tier for tier, flag in (("host", "--host-memory"), ("storage", "--storage")) if flag in flags]
    with _served(options.target, options.flags) as url:
        found = _measured(options, url, wanted=wanted)
    runs, tiers = found["runs"], found["cached_by_tier"]
    codes = collections.Counter(run["exit_code"] for run in runs)
    print(
        f"{len(runs)} runs: {codes[0]} right, {codes[1]} called faulty, {codes[2]} could not be tested; "
        f"{found['compared']} answers compared, {found['hits']} of them hits with {found['cached_tokens']:,} cached "
        f"tokens, {found['over']} above the lower threshold; "
        f"largest change {found['closest']:.0%} of the upper threshold"
    )
    by_scenario = sum((collections.Counter(run["scenarios"]) for run in runs), collections.Counter[str]())
    print("answers compared: " + ", ".join(f"{count:,} {name}" for name, count in by_scenario.items()))
    if tiers:
        print("cached tokens: " + ", ".join(f"{count:,} from {tier}" for tier, count in tiers.items()))
    if found["unserved"]:
        print(f"NOT TESTED: no tokens came from {' and '.join(found['unserved'])}; make the pools above smaller")
    return found


def _tiers(options: argparse.Namespace) -> dict[str, Any]:
    """The same for servers with small pools, in scenarios that ask for prefixes again."""
    print("| server | runs | answers compared | hits | closest | tokens from device, host, storage | result |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = {}
    for name in options.servers:
        with (
            tempfile.TemporaryDirectory() as work,
            SERVERS[name].served(Path(work), smollm2=options.smollm2) as url,
        ):
            rows[name] = row = _measured(options, url, wanted=TIERS, only=_AGAIN)
        said = row["said"] + [f"NOT TESTED: {tier}" for tier in row["unserved"]]
        tokens = ", ".join(f"{row['cached_by_tier'].get(tier, 0):,}" for tier in TIERS)
        print(
            f"| {name} | {len(row['runs'])} | {row['compared']} | {row['hits']} | {row['closest']:.1%} | {tokens} "
            f"| {'; '.join(said) or 'right'} |",
            flush=True,
        )
    return {"exit_code": max(row["exit_code"] for row in rows.values()), "servers": rows}


def _measured(
    options: argparse.Namespace, url: str, *, wanted: Sequence[str], only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """All seeds against one server.

    Args:
        wanted: tiers that must serve tokens.
        only: as in `Options`.
    """
    runs = []
    for seed in _seeds(options):
        result = asyncio.run(check(Connection(url), _options(options, seed, only=only)))
        runs.append(_figures(result, seed))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    tiers = _tokens_by_tier(url)
    unserved = [tier for tier in wanted if not tiers.get(tier)]
    return {
        "exit_code": int(bool(unserved) or any(run["exit_code"] == 1 for run in runs)),
        "runs": runs,
        **{name: sum(run[name] for run in runs) for name in ("compared", "hits", "cached_tokens", "over")},
        "closest": max((run["closest"] for run in runs), default=0.0),
        "said": sorted({run["said"] for run in runs if run["said"]}),
        "cached_by_tier": tiers,
        "unserved": unserved,
    }


def _tokens_by_tier(url: str) -> dict[str, int]:
    """Cached tokens by the tier that they came from, since the server started; empty: not a RayCache server."""
    try:
        tiers: dict[str, int] = status(url).get("cached_by_tier", {})
    except (OSError, ValueError):
        return {}
    return tiers


@contextmanager
def _served(target: str, flags: Sequence[str]) -> Iterator[str]:
    if target.startswith(("http://", "https://")):
        yield target
        return
    with tempfile.TemporaryDirectory() as work:
        model, more = target, list(flags)
        if not Path(target).is_dir():
            from tests.oracle import tiny_tokenizers
            from tests.oracle.families import make_family

            made = make_family(Path(work) / "model", target, vocab_size=400)
            tiny_tokenizers.byte_level(made)
            model, more = str(made), ["--page-size", "16", "--num-pages", "400", *flags]
        with launched(model, *more) as url:
            yield url


def _figures(result: Result, seed: int) -> dict[str, Any]:
    noise = result.noise
    changes = [one.difference.nats for one in result.comparisons if one.difference.nats is not None]
    return {
        "seed": seed,
        "exit_code": result.exit_code,
        "requests": result.requests,
        "compared": len(result.comparisons),
        "hits": sum(one.is_hit for one in result.comparisons),
        "cached_tokens": sum(one.observed.cached_tokens or 0 for one in result.comparisons),
        "scenarios": {name: row["comparisons"] for name, row in figures(result).items() if row["comparisons"]},
        "over": 0 if noise is None else sum(change > noise.some for change in changes),
        "closest": max(changes, default=0.0) / noise.gross if noise is not None else 0.0,
        "scale": None if noise is None else noise.scale,
        "said": verdict(result) if result.exit_code else "",
        "faults": [fault.what for fault in result.faults],
        "refused": result.refused,
    }


if __name__ == "__main__":
    raise SystemExit(main())
