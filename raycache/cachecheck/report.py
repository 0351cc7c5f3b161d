"""A result as text, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from raycache.cachecheck.check import Fault, Result, figures
from raycache.cachecheck.compare import as_json as difference_as_json
from raycache.cachecheck.lab import Comparison
from raycache.cachecheck.noise import ALPHA, FACTOR, Noise

_VERDICTS = ("answers from the cache are the answers without it", "the cache is at fault", "could not be tested")


def verdict(result: Result) -> str:
    """In one sentence."""
    return f"{result.url}: {_VERDICTS[result.exit_code]}" + (f": {result.untested}" if result.exit_code == 2 else "")


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
    rows = [(name, row) for name, row in figures(result).items() if row["skipped"] != "not asked for"]
    parts += ["", f"{'scenario':10} {'compared':>8} {'hits':>5} {'texts differ':>12} {'largest, nats':>13}"]
    for name, row in rows:
        if row["skipped"]:
            parts.append(f"{name:10} skipped: {row['skipped']}")
            continue
        largest = "-" if row["largest_nats"] is None else f"{row['largest_nats']:.3g}"
        fault_note = "  FAULT" if row["faults"] else ""
        parts.append(
            f"{name:10} {row['comparisons']:8} {row['hits']:5} {row['texts_differ']:12} {largest:>13}{fault_note}"
        )
    # What a server says must not control the terminal.
    return "\n".join("".join(char if char.isprintable() else "?" for char in part) for part in parts)


def facts(result: Result) -> list[str]:
    """What was done, and how it was judged."""
    lines = [f"{result.requests} requests, seed {result.options.seed}"]
    if target := result.target:
        lines.append(f"model {target.model}, API {target.path}, cold by {target.cold}")
        lines += target.notes
    if result.noise is not None:
        lines += _statistics(result.noise)
    if result.timing is not None:
        lines.append(f"time to the first token: {result.timing.text}")
    if facts_asked := [one.recalled for one in result.comparisons if one.recalled]:
        cold, cached = (sum(each) for each in zip(*facts_asked, strict=True))
        lines.append(f"facts in long prompts: of {len(facts_asked)}, {cold} recalled cold, {cached} from the cache")
    if result.refused:
        lines.append(f"{len(result.refused)} scenarios ended early; the first: {result.refused[0]}")
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
        f"{'not told' if cached is None else cached} of {one.observed.prompt_tokens})",
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
    count = sum(map(len, noise.samples.values()))
    kinds = ", ".join(f"{len(values)} {kind}" for kind, values in noise.samples.items())
    if math.isinf(noise.gross):
        return [
            f"noise: no log-probabilities; of {count} pairs of cold answers, at most {noise.chance:.0%} would differ "
            "(Clopper-Pearson)",
            f"tests: a binomial test per scenario on texts that differ; a right server is called faulty in less than "
            f"1 of {1 / ALPHA:,.0f} runs (Bonferroni over {noise.looks} looks)",
        ]
    return [
        f"noise: {count} pairs of cold answers ({kinds}); typical change {noise.scale:.2g} nats, log-spread "
        f"{noise.spread:.2g}",
        f"tests: a fault is one change above {noise.gross:.3g} nats, or as many above {noise.some:.3g} nats in one "
        f"scenario as Binomial(n, {noise.chance:g}) reaches with p <= {noise.per_look:.1g}",
        f"thresholds: log-normal prediction bounds (Student's t) of the noisiest kind, times {FACTOR:g}; a right "
        f"server is called faulty in less than 1 of {1 / ALPHA:,.0f} runs (Bonferroni over {noise.looks} looks and two "
        "tests)",
    ]
