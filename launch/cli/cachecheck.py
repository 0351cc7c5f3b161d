"""`raycache cachecheck`: a black-box test of a server's prefix cache. Needs neither torch nor Ray."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from launch.environment import api_key, ca_file
from launch.flags import seconds
from raycache.errors import ConfigError

if TYPE_CHECKING:
    from raycache.cachecheck.check import Options, Result

MIN_BUDGET = 100  # that of raycache.cachecheck.check, which needs httpx2
SCENARIOS = ("repeated", "branched", "grown", "tenants", "tools", "cut", "drafts", "load", "needle", "evicted")
_EPILOG = """\
exit codes:
  0  no fault was found
  1  a fault was found
  2  could not be tested

examples:
  raycache cachecheck http://127.0.0.1:8000
  raycache cachecheck https://llm.example.com/v1 --model NAME --budget-requests 1000 --html report.html
"""


def add_cachecheck_flags(parser: argparse.ArgumentParser) -> None:
    """Add URL and the flags of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="server with an OpenAI API, such as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", metavar="NAME", help="model (default: the first that the server lists)")
    parser.add_argument("--api-key", default="", metavar="KEY", help="API key of the server (or set RAYCACHE_API_KEY)")
    parser.add_argument(
        "--budget-requests",
        type=int,
        default=400,
        metavar="N",
        help=f"requests to send, at least {MIN_BUDGET}; more find rarer faults (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all prompts (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=600,
        metavar="N",
        help="length of a typical prompt, longer than a page; long ones have six times as many (default: %(default)s)",
    )
    parser.add_argument(
        "--cold",
        choices=("auto", "salt", "off", "flush", "line"),
        default="auto",
        help="how a prompt avoids the cache: cache_salt, cache_prompt (llama.cpp), emptying the cache (for all users), "
        "or a unique first line; auto: the first of salt, off and line that works (default: %(default)s)",
    )
    parser.add_argument(
        "--salts",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether the server must honour cache_salt; auto: if it appears to know the field (default: %(default)s)",
    )
    parser.add_argument(
        "--scenario", action="append", default=[], choices=SCENARIOS, help="run only this one; repeatable"
    )
    parser.add_argument("--stop", action="store_true", help="stop at the first fault")
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time limit for one answer (default: %(default).0f s)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as an HTML page")


def run(options: argparse.Namespace) -> int:
    """Test the server and print the report.

    Returns:
        0: right, 1: a fault was found, 2: could not be tested.
    Raises:
        ConfigError: a flag cannot work.
    """
    wanted = _wanted(options)
    from raycache.cachecheck.report import as_json, as_text

    result = asyncio.run(_check(options, wanted))
    if options.html is not None:
        from raycache.cachecheck.page import as_html

        options.html.write_text(as_html(result), encoding="utf-8")
    print(json.dumps(as_json(result), indent=2) if options.json else as_text(result))
    return result.exit_code


def _wanted(options: argparse.Namespace) -> Options:
    url = urlsplit(options.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{options.url!r} is not a server; write it as http://HOST:PORT")
    if options.budget_requests < MIN_BUDGET:
        raise ConfigError(f"--budget-requests {options.budget_requests} is too small; use at least {MIN_BUDGET}")
    if options.prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens {options.prompt_tokens} must be at least 1")
    try:
        import httpx2  # noqa: F401  # told apart from an error of our own
    except ModuleNotFoundError as cause:
        raise ConfigError("cachecheck needs httpx2; install it with: pip install httpx2") from cause
    from raycache.cachecheck.check import Options
    from raycache.cachecheck.target import Cold

    return Options(
        model=options.model,
        seed=options.seed,
        budget=options.budget_requests,
        prompt_tokens=options.prompt_tokens,
        cold=None if options.cold == "auto" else Cold(options.cold),
        has_salts={"auto": None, "yes": True, "no": False}[options.salts],
        only=tuple(options.scenario),
        stops=options.stop,
    )


async def _check(options: argparse.Namespace, wanted: Options) -> Result:
    from raycache.cachecheck.check import check
    from raycache.cachecheck.client import Connection

    trusted = None
    if urlsplit(options.url).scheme == "https" and ca_file():
        import ssl

        try:
            trusted = ssl.create_default_context(cafile=ca_file())
        except OSError as cause:
            raise ConfigError(f"RAYCACHE_CA_FILE {ca_file()!r} cannot be read: {cause}") from cause
    connection = Connection(options.url, key=options.api_key or api_key(), timeout_s=options.timeout_s, trusted=trusted)

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        return await check(connection, wanted, on_progress=show)
    finally:
        show("")
