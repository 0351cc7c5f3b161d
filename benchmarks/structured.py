"""Answers under JSON schemas: how many the server takes, whether the answers are valid, and what masks cost.

    python -m benchmarks.structured models/smollm2 --schemas schemas/ --sample 500 --answers plain.jsonl
    python -m benchmarks.structured models/smollm2 --schemas schemas/ --sample 500 --draft ngram --same-as plain.jsonl
    python -m benchmarks.structured models/smollm2 --schemas schemas/ --sample 60 --tp 3
    python -m benchmarks.structured models/smollm2 --latency

Each schema is asked for once, at temperature 1 with a seed of its own, from a server that is started for the run. An
answer that ended by itself must parse and be valid for the package jsonschema; one that was cut by max_tokens is
counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from tokenizers import Tokenizer

from benchmarks.client import complete
from benchmarks.figures import percentile, write_json
from benchmarks.server import launched, status
from benchmarks.tokens import plain_token_ids
from benchmarks.trace import Prompt

_TIMEOUT_S = 900.0
_PROMPT = "Write a JSON document with short values."
CLOSING = ('"', "}", "]", '",', '"}', '"]', "},", "],", "}}", "]]")
_WITHOUT_TEXT = ("refused", "failed", "left")
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "home": {"type": "object", "properties": {"town": {"type": "string"}, "zip": {"pattern": "^[0-9]{5}$"}}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_MANY = {"type": "array", "items": _PERSON, "minItems": 1000}


@dataclass(frozen=True)
class Answer:
    """What came of one schema.

    Attributes:
        name: of the schema's file or line.
        outcome: "valid", "invalid", "cut", "refused", "failed", "unchecked" if jsonschema cannot read the schema, or
            "left" when the time was up.
        text: the answer, or the message of a refusal.
        detail: the refused keyword, or what jsonschema says.
        num_tokens: of the answer.
        took_s: from the request to the whole answer.
    """

    name: str
    outcome: str
    text: str
    detail: str = ""
    num_tokens: int = 0
    took_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schemas", type=Path, metavar="PATH", help="folder of .json files, or file with one per line")
    what.add_argument("--latency", action="store_true", help="time between tokens, with a grammar and without")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="as many of each folder, N in all; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample and of the answers (default: %(default)s)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="characters of the schema in its prompt")
    parser.add_argument(
        "--minutes", type=float, default=60, help="then what is not done is left (default: %(default)s)"
    )
    parser.add_argument(
        "--favour", type=float, default=0, metavar="BIAS", help="of tokens that close something, for untrained models"
    )
    parser.add_argument("--max-tokens", type=int, default=160, help="default: %(default)s")
    parser.add_argument("--concurrency", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="of --latency (default: %(default)s)")
    parser.add_argument("--batches", default="1,8", help="of --latency (default: %(default)s)")
    parser.add_argument("--draft", default="", help="as in raycache launch")
    for split in ("tp", "cp", "pp"):
        parser.add_argument(f"--{split}", type=int, default=1)
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keeps all answers, a line each")
    parser.add_argument("--same-as", type=Path, metavar="FILE", help="answers of another run, to compare with")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()

    flags = [word for name in ("tp", "cp", "pp") for word in (f"--{name}", str(getattr(options, name)))]
    flags += ["--draft", options.draft] if options.draft else []
    schemas = {} if options.latency else choose(read_schemas(options.schemas), options.sample, seed=options.seed)
    with launched(options.model, *flags, "--max-queue", "4096") as endpoint:
        if options.latency:
            figures = asyncio.run(_latency(endpoint, options))
            is_right = True
        else:
            figures, is_right = asyncio.run(_validity(endpoint, schemas, options))
    if options.json:
        kept = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        write_json(options.json, {"options": kept, **figures})
    return 0 if is_right else 1


def read_schemas(path: Path) -> dict[str, Any]:
    """JSON schemas by name, those of a folder by their path in it."""
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
        return {str(file.relative_to(path)): json.loads(file.read_text(encoding="utf-8")) for file in files}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {f"{path.name}/{number}": json.loads(line) for number, line in enumerate(lines, 1) if line.strip()}


def choose(schemas: Mapping[str, Any], count: int, *, seed: int) -> dict[str, Any]:
    """A sample that takes as many of each folder as possible; 0 takes all."""
    if not count:
        return dict(schemas)
    drawn = random.Random(seed)
    folders: dict[str, list[str]] = {}
    for name in schemas:
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    for names in folders.values():
        drawn.shuffle(names)
    chosen: list[str] = []
    while len(chosen) < count and any(folders.values()):
        chosen += [names.pop() for names in folders.values() if names]
    return {name: schemas[name] for name in chosen[:count]}


def keyword(message: str) -> str:
    """What a refusal names."""
    if " oneOf " in message:
        return "oneOf"
    found = re.search(r"the keyword '([^']+)'", message) or re.search(r"'(format|\$ref)'", message)
    if found:
        return found[1]
    told = message.partition("cannot be enforced: ")[2] or message
    return re.sub(r"\s+", " ", re.sub(r"#\S*|\d+", "_", told))[:100]


def check(text: str, schema: Any) -> tuple[str, str]:
    """Outcome of an answer that ended by itself, and what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return "invalid", f"not JSON: {error}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
    except Exception as cause:  # a schema that jsonschema does not read, such as one with an endless reference
        return "unchecked", f"{type(cause).__name__}: {str(cause)[:200]}"
    return ("valid", "") if error is None else ("invalid", f"{error.json_path}: {error.message[:200]}")


async def _validity(endpoint: str, schemas: Mapping[str, Any], options: argparse.Namespace) -> tuple[dict, bool]:
    model, bias = status(endpoint)["model"], _closing_bias(options) if options.favour else {}
    begin = time.perf_counter()
    slots = asyncio.Semaphore(options.concurrency)
    async with httpx.AsyncClient(base_url=endpoint, timeout=_TIMEOUT_S, trust_env=False) as client:

        async def one(number: int, name: str) -> Answer:
            try:
                async with asyncio.timeout_at(end_s), slots:
                    return await _ask(
                        client, name, schemas[name], model=model, bias=bias, number=number, options=options
                    )
            except TimeoutError:
                return Answer(name, "left", "")

        end_s = asyncio.get_running_loop().time() + 60 * options.minutes
        answers = await asyncio.gather(*(one(number, name) for number, name in enumerate(schemas)))
    took_s = time.perf_counter() - begin
    if options.answers:
        lines = (json.dumps(asdict(answer), ensure_ascii=False) for answer in answers)
        options.answers.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    figures: dict[str, Any] = {"seconds": took_s, **_counts(answers)}
    if options.same_as:
        figures |= _compared(answers, options.same_as)
    if options.draft:
        stats = status(endpoint)
        figures["drafted"] = {key: value for key, value in _flat(stats) if "draft" in key or "accepted" in key}
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    wrong = [answer for answer in answers if answer.outcome in ("invalid", "failed", "unchecked")]
    for answer in wrong:
        print(f"{answer.outcome}: {answer.name}: {answer.detail}: {answer.text[:300]!r}")
    is_right = not any(answer.outcome in ("invalid", "failed") for answer in answers)
    return figures, is_right and not figures.get("other_answers")


async def _ask(
    client: httpx.AsyncClient,
    name: str,
    schema: Any,
    *,
    model: str,
    bias: Mapping[str, float],
    number: int,
    options: argparse.Namespace,
) -> Answer:
    shown = json.dumps(schema, ensure_ascii=False)[: options.show]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{_PROMPT}\n{shown}".strip()}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "logit_bias": bias,
        "temperature": 1.0,
        "seed": 1000 * options.seed + number,
        "max_tokens": options.max_tokens,
    }
    begin = time.perf_counter()
    answer = await client.post("/v1/chat/completions", json=body)
    took_s = time.perf_counter() - begin
    content = answer.json()
    if answer.status_code != 200:
        message = content["error"]["message"]
        outcome = "refused" if answer.status_code < 500 else "failed"
        return Answer(name, outcome, message, keyword(message), took_s=took_s)
    choice, num_tokens = content["choices"][0], content["usage"]["completion_tokens"]
    text = choice["message"]["content"] or ""
    outcome, detail = ("cut", "") if choice["finish_reason"] == "length" else check(text, schema)
    return Answer(name, outcome, text, detail, num_tokens, took_s)


def _closing_bias(options: argparse.Namespace) -> dict[str, float]:
    """More of the tokens that close strings, arrays and objects."""
    vocabulary = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json")).get_vocab()
    return {str(number): options.favour for text, number in vocabulary.items() if text in CLOSING}


def _counts(answers: Sequence[Answer]) -> dict[str, Any]:
    refused = [answer for answer in answers if answer.outcome == "refused"]
    folders: dict[str, Counter[str]] = {}
    for answer in answers:
        folders.setdefault(answer.name.rpartition("/")[0], Counter())[answer.outcome] += 1
    return {
        "schemas": len(answers),
        "outcomes": dict(Counter(answer.outcome for answer in answers)),
        "refused_by": dict(Counter(answer.detail for answer in refused).most_common()),
        "refusal_p99_s": percentile([answer.took_s for answer in refused], 99),
        "output_tokens": sum(answer.num_tokens for answer in answers),
        "by_folder": {name: dict(counts) for name, counts in folders.items()},
    }


def _compared(answers: Sequence[Answer], path: Path) -> dict[str, Any]:
    """How many answers are those of another run."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    before = {line["name"]: line["text"] for line in lines if line["outcome"] not in _WITHOUT_TEXT}
    common = [answer for answer in answers if answer.name in before and answer.outcome not in _WITHOUT_TEXT]
    other = [answer.name for answer in common if answer.text != before[answer.name]]
    return {"compared": len(common), "other_answers": other}


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, each in value.items():
        pairs += _flat(each, f"{prefix}{key}.") if isinstance(each, Mapping) else [(f"{prefix}{key}", each)]
    return pairs


async def _latency(endpoint: str, options: argparse.Namespace) -> dict[str, Any]:
    """Gaps between tokens of streams with a grammar and without, in turns."""
    model, ids, rows = status(endpoint)["model"], plain_token_ids(options.model), []
    drawn = random.Random(options.seed)
    kinds: dict[str, dict[str, Any]] = {"free": {}, "grammar": {"structured_outputs": {"json": _MANY}}}
    for batch in map(int, options.batches.split(",")):
        gaps: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 1):
            for kind, more in list(kinds.items())[:: 1 if number % 2 else -1]:
                prompts = [Prompt(0.0, tuple(drawn.choices(ids, k=32)), options.max_tokens) for _ in range(batch)]
                more = {**more, "temperature": 1.0, "seed": number}
                sent = [complete(endpoint, p, model=model, timeout_s=_TIMEOUT_S, more=more) for p in prompts]
                replies = await asyncio.gather(*sent)
                gaps[kind].append([gap for reply in replies for gap in reply.gaps_s])
        rounds = {kind: each[1:] for kind, each in gaps.items()}  # the first warms up
        medians = {kind: [statistics.median(gaps) for gaps in each] for kind, each in rounds.items()}
        ratios = [with_ / free for with_, free in zip(medians["grammar"], medians["free"], strict=True)]
        row = {"batch": batch, "ratio": statistics.median(ratios), "ratios": ratios}
        for kind, each in rounds.items():
            together = [1e3 * gap for gaps in each for gap in gaps]
            row |= {f"{kind}_p50_ms": percentile(together, 50), f"{kind}_p99_ms": percentile(together, 99)}
        rows.append(row)
        print(
            f"batch {batch}: p50 {row['free_p50_ms']:.1f} ms free, {row['grammar_p50_ms']:.1f} ms with a grammar; "
            f"p99 {row['free_p99_ms']:.1f} and {row['grammar_p99_ms']:.1f} ms; ratio {row['ratio']:.3f} "
            f"(each round {' '.join(f'{ratio:.3f}' for ratio in ratios)})",
            flush=True,
        )
    return {"latency": rows}


if __name__ == "__main__":
    sys.exit(main())
