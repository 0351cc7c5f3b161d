"""A result as text, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from raycache.cachecheck.check import Result, figures
from raycache.cachecheck.compare import as_json as difference_as_json
from raycache.cachecheck.floor import ASSUMED, ASSUMED_NATS
from raycache.cachecheck.judge import Fault
from raycache.cachecheck.lab import Comparison
from raycache.cachecheck.noise import ALPHA, FACTOR, MANY, ONCE, Noise


def verdict(result: Result) -> str:
    """In one sentence."""
    if result.faults:
        names = ", ".join(dict.fromkeys(fault.scenario for fault in result.faults))
        return f"{result.url}: {_count(len(result.faults), 'fault')} found ({names})"
    if result.untested:
        return f"{result.url}: could not be tested: {result.untested}"
    hits = sum(one.is_hit for one in result.comparisons)
    return f"{result.url}: no fault found, {_count(hits, 'answer')} from the cache compared with those without it"


def as_text(result: Result) -> str:
    """For a terminal."""
    parts = [verdict(result), ""]
    for fault in result.faults:
        parts += [
            f"FAULT  {fault.scenario} ({fault.test}), found after {fault.number} requests",
            f"       {fault.what}",
        ]
        parts += [f"       {line}" for line in told(fault)]
    if result.faults:
        parts.append("")
    parts += facts(result)
    if result.comparisons:
        parts += ["", *_table(result)]
    # What a server says must not control the terminal.
    return "\n".join("".join(char if char.isprintable() else "?" for char in part) for part in parts)


def _table(result: Result) -> list[str]:
    lines = [f"{'scenario':10} {'compared':>8} {'hits':>5} {'texts differ':>12} {'largest, nats':>13}"]
    for name, row in figures(result).items():
        if row["skipped"] == "not asked for":
            continue
        fault_note = "  FAULT" if row["faults"] else ""
        if row["skipped"]:
            lines.append(f"{name:10} skipped: {row['skipped']}{fault_note}")
            continue
        largest = "-" if row["largest_nats"] is None else f"{row['largest_nats']:.3g}"
        lines.append(
            f"{name:10} {row['comparisons']:8} {row['hits']:5} {row['texts_differ']:12} {largest:>13}{fault_note}"
        )
    return lines


def facts(result: Result) -> list[str]:
    """What was done, and how it was judged."""
    lines = [f"{_count(result.requests, 'request')}, seed {result.options.seed}"]
    if target := result.target:
        lines.append(f"model {target.model}, API {target.path}, --cold {target.cold}")
        lines += target.notes
    if result.noise is not None:
        lines += _statistics(result.noise)
    if result.timing is not None:
        lines.append(f"median time to the first token: {result.timing.text}")
    if facts_asked := [one.recalled for one in result.comparisons if one.recalled]:
        cold, cached = (sum(each) for each in zip(*facts_asked, strict=True))
        prompts = _count(len(facts_asked), "long prompt")
        lines.append(f"facts recalled from {prompts}: {cold} cold, {cached} from the cache")
    if result.refused:
        lines.append(f"{_count(len(result.refused), 'scenario')} ended early; the first: {result.refused[0]}")
    return lines


def told(fault: Fault) -> list[str]:
    """Both answers, where one shows the fault."""
    if fault.comparison is None:
        return []
    one = fault.comparison
    at, cached = one.difference.position, one.observed.cached_tokens
    lines = [
        f"cold:       {one.reference.text[:100]!r} (request {one.reference.number})",
        f"from cache: {one.observed.text[:100]!r} (request {one.observed.number}, cached tokens: "
        f"{'not reported' if cached is None else cached} of {one.observed.prompt_tokens})",
    ]
    if one.difference.diverged_at is None:
        lines.append(f"the same tokens; the largest change is at output token {at}")
    else:
        lines.append(f"other tokens from output token {one.difference.diverged_at} on")
    return lines


def as_json(result: Result) -> dict[str, Any]:
    """Plain values; infinite thresholds are null."""
    noise, target = result.noise, result.target
    return {
        "url": result.url,
        "exit_code": result.exit_code,
        "verdict": verdict(result),
        "requests": result.requests,
        "options": dataclasses.asdict(result.options),
        "target": None if target is None else {**dataclasses.asdict(target), "forms": dict(target.forms or {})},
        "noise": None if noise is None else {**_noise_as_json(noise), "statistics": _statistics(noise)},
        "faults": [
            {
                "scenario": fault.scenario,
                "test": fault.test,
                "what": fault.what,
                "requests": fault.number,
                "details": told(fault),
            }
            for fault in result.faults
        ],
        "scenarios": figures(result),
        "timing": None if result.timing is None else {**dataclasses.asdict(result.timing), "text": result.timing.text},
        "refused": result.refused,
        "comparisons": [_comparison_as_json(one) for one in result.comparisons],
    }


def _comparison_as_json(one: Comparison) -> dict[str, Any]:
    return {
        "scenario": one.scenario,
        "what": one.what,
        "requests": [one.reference.number, one.observed.number],
        "cached_tokens": one.observed.cached_tokens,
        "prompt_tokens": one.observed.prompt_tokens,
        "recalled": one.recalled,
        **difference_as_json(one.difference),
    }


def _noise_as_json(noise: Noise) -> dict[str, Any]:
    found = dataclasses.asdict(noise)
    return {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in found.items()}


def _statistics(noise: Noise) -> list[str]:
    """Tests and thresholds, in words."""
    rarely = f"a correct server is called faulty in less than 1 of {1 / ALPHA:,.0f} runs"
    repeated = (
        f"so many rounds in which {noise.rule}, that Binomial(rounds, {noise.chance:.2g}) reaches as many with p <= "
        f"{noise.per_look:.1g}"
    )
    if not noise.has_numbers:
        (found,) = noise.samples.values()
        part = "texts" if noise.characters is None else f"first {noise.characters} characters"
        return [
            f"noise: no log-probabilities; asked again, {sum(found):.0f} of {len(found)} cold prompts give other "
            f"{part}, so up to {noise.chance:.0%} may (Clopper-Pearson)",
            f"tests: a fault is {repeated}",
            f"error: {rarely} (Bonferroni over {noise.looks} looks)",
        ]
    kinds = ", ".join(f"{len(values)} {kind}" for kind, values in noise.samples.items() if values and kind != ASSUMED)
    assumed = f"noise: no cold prompt was computed in pieces as a hit is, so changes of {ASSUMED_NATS} nats are assumed"
    steps = f"noise: log-probabilities lie multiples of {noise.step:g} nats apart, so a few such steps are no fault"
    return [
        *([assumed] if ASSUMED in noise.samples else []),
        *([steps] if noise.step else []),
        f"noise: log-probabilities of cold prompts asked again ({kinds}) change by about {noise.scale:.2g} nats, with "
        f"a log-spread of {noise.spread:.2g}",
        f"tests: a fault is one change above {noise.gross:.3g} nats, or {repeated}, or, at the end, so many "
        f"prompts whose hits move by more than {noise.most:.3g} nats on average, twice the most of "
        f"{len(noise.questions)} cold ones, that chance chooses as many with p <= {ONCE:.1g} (Rosenbaum's exceedance "
        f"test), while {MANY:.0%} of texts or more differ",
        f"thresholds: log-normal prediction bounds (Student's t) of the noisiest kind, times {FACTOR:g}",
        f"error: {rarely} (Bonferroni over {noise.looks} looks and three tests)",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
