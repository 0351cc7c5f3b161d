"""Hostile requests for structured output beside running streams: python -m benchmarks.hostile models/smollm2

Some streams run without an end; for as long each, in turns, nothing else happens, and hostile requests come one after
the other. Each of these must be refused with a 4xx within a second, or be served. Shows the times between tokens of the
streams in both.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.client import complete
from benchmarks.figures import percentile, write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt

_TIMEOUT_S = 300.0
_REFUSED_WITHIN_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory")
    parser.add_argument("--streams", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    with launched(options.model) as endpoint:
        figures = asyncio.run(_run(endpoint, options))
    if options.json:
        write_json(options.json, figures)
    return 0 if not figures["wrong"] else 1


async def _run(endpoint: str, options: argparse.Namespace) -> dict[str, Any]:
    model, ids = status(endpoint)["model"], plain_token_ids(options.model)
    attacks = {name: json.dumps({"model": model, **body}).encode() for name, body in _attacks()}
    gaps: dict[str, list[float]] = {"calm": [], "attack": []}
    rows: dict[str, list[tuple[int, float]]] = {name: [] for name in attacks}
    phase, running = "warm-up", True
    drawn = random.Random(1)

    async def stream() -> None:
        while running:
            begun = phase
            prompt = Prompt(0.0, tuple(drawn.choices(ids, k=16)), 24)
            reply = await complete(endpoint, prompt, model=model, timeout_s=_TIMEOUT_S)
            if begun == phase and phase in gaps:  # a stream across two phases belongs to neither
                gaps[phase] += reply.gaps_s

    streams = [asyncio.create_task(stream()) for _ in range(options.streams)]
    await asyncio.to_thread(_post, endpoint, json.dumps({"model": model, **_chat(regex="[ab]")}).encode())
    for _ in range(options.rounds):
        phase, begin_s = "attack", time.perf_counter()
        for name, body in attacks.items():
            rows[name].append(await asyncio.to_thread(_post, endpoint, body))
        phase, took_s = "calm", time.perf_counter() - begin_s
        await asyncio.sleep(took_s)
    running = False
    await asyncio.gather(*streams)
    return _shown(rows, gaps)


def _shown(rows: dict[str, list[tuple[int, float]]], gaps: dict[str, Sequence[float]]) -> dict[str, Any]:
    wrong = []
    for name, answers in rows.items():
        is_right = all(code == 200 or (400 <= code < 500 and took_s < _REFUSED_WITHIN_S) for code, took_s in answers)
        wrong += [] if is_right else [name]
        told = ", ".join(f"{code} in {took_s:.2f} s" for code, took_s in answers)
        print(f"{name:<34} {told}{'' if is_right else '  WRONG'}")
    figures: dict[str, Any] = {"answers": rows, "wrong": wrong}
    for phase, each in gaps.items():
        figures[phase] = {f"p{share}_ms": 1e3 * percentile(each, share) for share in (50, 99, 100)} | {
            "gaps": len(each)
        }
        told = ", ".join(f"p{share} {figures[phase][f'p{share}_ms']:.0f} ms" for share in (50, 99, 100))
        print(f"streams, {phase}: {told} of {len(each)} gaps")
    return figures


def _post(endpoint: str, body: bytes) -> tuple[int, float]:
    """Status of an answer, and seconds until it was there; 0 for a connection that was closed."""
    url = urlsplit(endpoint)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=_TIMEOUT_S)
    begin_s = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        code = answer.status
    except ConnectionError:  # a server may close it while a body that is too large is still sent
        code = 413 if len(body) > 8 << 20 else 0
    finally:
        connection.close()
    return code, time.perf_counter() - begin_s


def _chat(**form: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 4, "structured_outputs": form}


def _attacks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies by name."""
    for name, schema in _schemas():
        yield name, _chat(json=schema)
    nested = "[" * 100_000 + "]" * 100_000
    yield "text of 100,000 brackets as schema", _chat(json=nested)
    for name, regex in {
        "regex: counted repetitions": "((a{1,1000}){1,1000}){1,1000}b",
        "regex: many stars": "(.*a){50}",
        "regex: far behind": "(a|b)*a(a|b){3000}",
        "regex: options": "a?" * 2000 + "a" * 2000,
        "regex: a million characters": "a?" * 500_000,
    }.items():
        yield name, _chat(regex=regex)
    for name, grammar in {
        "grammar: start: start": "start: start",
        "grammar: a circle": "start: a\na: b\nb: a",
        "grammar: ambiguous": 'start: start start start | "a" | ""',
        "grammar: 80,000 alternatives": "start: " + " | ".join(f'"{i}x"' for i in range(80_000)),
        "grammar: 20,000 parentheses": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    }.items():
        yield name, _chat(grammar=grammar)
    yield "choice of 500,000 characters", _chat(choice=["x" * 500_000])
    for megabytes in (7, 10):
        tool = {"name": "f", "parameters": {"type": "object", "properties": {}}, "description": "x" * 9_900}
        tools = [{"type": "function", "function": {**tool, "name": f"f{i}"}} for i in range(megabytes * 100)]
        messages = [{"role": "user", "content": "Go."}]
        yield f"{megabytes} MB of tools", {"messages": messages, "max_tokens": 4, "tools": tools}


def _schemas() -> Iterator[tuple[str, Any]]:
    def of(**properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties}

    patterns = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{i}}}b.*"} for i in range(20)]
    doubling = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = of(a=deep)
    yield "references that double 40 times", {"$defs": {**doubling, "d40": {}}, "$ref": "#/$defs/d0"}
    alternatives = [{"anyOf": [of(**{f"p{i}_{j}": {}}) for j in range(20)]} for i in range(20)]
    yield "20^20 combinations", {"allOf": alternatives}
    yield "20 merged patterns", {"allOf": patterns}
    yield "200 multiples", of(**{f"p{i}": {"type": "integer", "multipleOf": 9_973 - i} for i in range(200)})
    yield "10,000 objects as values", {"enum": [{"a": i, "b": [i] * 5} for i in range(10_000)]}
    yield "an array of 60,000 as a value", {"const": list(range(60_000))}
    yield "a value of 1,000,000 characters", {"const": "x" * 1_000_000}
    yield "5,000 optional properties", of(**{f"p{i}": {"type": "string"} for i in range(5_000)})
    yield "500 optional properties", of(**{f"p{i}": {"type": "string"} for i in range(500)})
    yield "nested 300 deep", deep
    yield "is its own definition", {"$ref": "#"}
    yield "arrays of a billion", {"type": "array", "minItems": 10**9, "items": {"minLength": 10**9, "type": "string"}}


if __name__ == "__main__":
    sys.exit(main())
