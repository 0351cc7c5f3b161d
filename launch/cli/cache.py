"""`raycache cache`: inspects and changes the cache of a running server, over the API in launch/http/cache.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launch.cli.server import add_server_flags, send
from launch.table import human_bytes, render
from raycache.errors import ConfigError
from raycache.types import TIERS

_MARGIN_S = 60.0
"""Added to the time limit of flush and scrub, to wait for the response."""
_EXAMPLES = """\
examples:
  raycache cache status
  raycache cache attach 'file:///var/cache/raycache?size=50GiB'
  raycache cache inspect 'The capital of France is'
  raycache cache inspect --file request.json       the body of a completion or a chat
"""


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands. Imports nothing heavy, so that --help is fast."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")

    def add(name: str, text: str, show: Callable[[Mapping[str, Any]], str] = _show) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_server_flags(added, timeout_s=600.0)
        added.add_argument("--replica", metavar="NAME", default="", help="only this replica (default: all)")
        added.set_defaults(show=show)
        return added

    add("status", "show settings, contents and counters of each tier, and warnings", _show_status)
    attach = add("attach", "start using a storage tier; needs a host tier")
    attach.add_argument("storage_url", metavar="STORAGE", help="URL, such as file:///var/cache/raycache?size=50GiB")
    attach.add_argument("--size", metavar="SIZE", help="size limit, if the URL has none")
    add("detach", "stop using the storage tier; its contents stay")
    clear = add("clear", "clear the cache, except what running requests use")
    clear.add_argument("--tier", action="append", choices=TIERS, dest="tiers", help="only this tier; repeatable")
    add("resize", "change the size limit of the storage tier").add_argument(
        "size", metavar="SIZE", help="such as 50GiB"
    )
    add("scrub", "check all objects in the storage tier and delete damaged ones, within --timeout-s")
    add("flush", "write device and host tier to the storage tier, within --timeout-s")
    inspect = add(
        "inspect", "show how many tokens of a prompt each tier would hit, and the reason for a miss", _show_inspected
    )
    inspect.add_argument("prompt", metavar="PROMPT", nargs="?", help="text of the prompt")
    inspect.add_argument(
        "--file",
        metavar="FILE",
        type=Path,
        help="file with the prompt, or with a whole request if its name ends in .json",
    )
    inspect.add_argument("--cache-salt", metavar="SALT", default="", help="cache_salt of the request")


def run(options: argparse.Namespace) -> int:
    """Send a command, print the response and return the exit code.

    Raises:
        RayCacheError: the server cannot be reached, or rejected the command.
    """
    is_status = options.action == "status"
    return send(
        options,
        path=f"/cache{'' if is_status else '/' + options.action}{_only(options)}",
        body=None if is_status else _body(options),
        show=options.show,
        margin_s=_MARGIN_S if options.action in ("flush", "scrub") else 0.0,
    )


def _only(options: argparse.Namespace) -> str:
    return f"?replica={quote(options.replica)}" if options.replica else ""


def _body(options: argparse.Namespace) -> dict[str, Any]:
    match options.action:
        case "attach":
            return {"url": options.storage_url, "size": options.size}
        case "clear":
            return {"tiers": options.tiers}
        case "resize":
            return {"size": options.size}
        case "flush" | "scrub":
            return {"timeout_s": options.timeout_s}
        case "inspect":
            return _inspected(options)
    return {}


def _inspected(options: argparse.Namespace) -> dict[str, Any]:
    if (options.prompt is None) == (options.file is None):
        raise ConfigError("inspect needs either a PROMPT or --file FILE")
    body: Any = {"prompt": options.prompt}
    if options.file is not None:
        try:
            text = options.file.read_text(encoding="utf-8")
            body = json.loads(text) if options.file.suffix == ".json" else {"prompt": text}
        except (OSError, ValueError) as cause:
            raise ConfigError(f"cannot read the prompt in {options.file}: {' '.join(str(cause).split())}") from cause
    if not isinstance(body, dict):
        raise ConfigError(f'{options.file} must hold the body of a request, such as {{"prompt": "..."}}')
    return {**body, "cache_salt": options.cache_salt} if options.cache_salt else body


def _show(answer: Mapping[str, Any]) -> str:
    """Format any response as a table."""
    if not answer:
        return "done"
    return render(("WHAT", "VALUE"), rows=[(name, _value(name, value)) for name, value in _flat(answer)])


def _show_status(answer: Mapping[str, Any]) -> str:
    settings = answer.get("settings", {})
    tiers = answer.get("tiers", {})
    rows = [(tier, name, _value(name, value)) for tier in tiers for name, value in _flat(tiers[tier])]
    parts = [
        "settings   " + "  ".join(f"{name}={value}" for name, value in settings.items()),
        *summary(answer.get("capacity", {})),
        "",
        render(("TIER", "WHAT", "VALUE"), rows=rows),
    ]
    if warnings := answer.get("warnings"):
        parts += ["", *(f"warning: {text}" for text in warnings)]
    return "\n".join(parts)


def _show_inspected(answer: Mapping[str, Any]) -> str:
    num_tokens = answer.get("prompt_tokens", 0)
    tiers: Mapping[str, int] = answer.get("tiers", {})
    rows = [(tier, hit, f"{100 * hit / num_tokens:.1f} %" if num_tokens else "-") for tier, hit in tiers.items()]
    by = f" ({answer['cut_by']})" if answer.get("cut_by") else ""
    why = f"reason for the miss: {answer['miss']}{by}" if answer.get("miss") else "all whole pages are cached"
    table = render(("TIER", "TOKENS HIT", "OF THE PROMPT"), rows=rows)
    return f"{num_tokens} tokens\n\n{table}\n\n{why}"


def summary(tiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line per tier of EngineInfo.tiers, such as "host  131,072 tokens, 1.0 GiB (full 0.9 GiB, state 0.1 GiB)"."""
    lines = []
    for tier, facts in tiers.items():
        name, tokens, size = facts.get("name"), facts.get("tokens"), facts.get("bytes")
        components = facts.get("components", {})
        parts = ", ".join(f"{part} {human_bytes(count)}" for part, count in components.items())
        told = [str(name)] if name else []
        told += [f"{tokens:,} tokens"] if tokens else []
        told += [human_bytes(size)] if size else []
        lines.append(f"{tier:<9}  {', '.join(told)}" + (f" ({parts})" if len(components) > 1 else ""))
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested mappings into (dotted name, value)."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def _value(name: str, value: object) -> str:
    """Format a value for people."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "bytes" in name:
            return human_bytes(value)
        return f"{value:,.0f}" if isinstance(value, int) or value.is_integer() else f"{value:.3f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
