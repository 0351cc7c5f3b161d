"""Judges comparisons: which differences does no noise explain? The statistics are those of noise.py."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from raycache.cachecheck.lab import Comparison
from raycache.cachecheck.noise import MANY, ONCE, Noise, Rounds

ALL = "all scenarios"
"""Name of all scenarios together, where none alone has shown the fault."""


@dataclass(frozen=True)
class Fault:
    """Something wrong with the server's cache.

    Attributes:
        scenario: that found it; `ALL`: several together.
        test: "gross", "repeated", "typical" or "claim".
        what: in a sentence.
        number: requests sent until it was found.
        comparison: that shows it; None: a claim that cannot be, or many comparisons.
    """

    scenario: str
    test: str
    what: str
    number: int
    comparison: Comparison | None = None


class Judge:
    """Counts what was compared. Each method gives the faults that it shows, also those that were given before."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._rounds: defaultdict[str, Rounds] = defaultdict(Rounds)
        self._hits: list[Comparison] = []
        self._changes: list[float] = []

    def one(self, found: Comparison) -> list[Fault]:
        """Judge a comparison by itself."""
        nats, noise = found.difference.nats, self._noise
        if nats is None or not noise.is_gross(nats):
            return []
        what = f"{found.what}: a log-probability moved by {nats:.3g} nats, noise explains at most {noise.gross:.3g}"
        return [Fault(found.scenario, "gross", what, found.number, found)]

    def round(self, found: Sequence[Comparison]) -> list[Fault]:
        """Judge a round of a scenario, together with its rounds before and with those of all scenarios.

        Answers of a round are to prompts that have much in common, so they are one trial.
        """
        noise = self._noise
        found = [one for one in found if noise.can_judge(one.difference.nats)]
        if not found:
            return []
        self._hits += (one for one in found if one.is_hit)
        self._changes += _by_prompt(found)
        over = [noise.is_over(nats=one.difference.nats, place=one.difference.diverged_at) for one in found]
        shown = next((one for one, is_over in zip(found, over, strict=True) if is_over), None)
        faults = []
        for key in (found[0].scenario, ALL):
            rounds = self._rounds[key]
            if rounds.add(over, noise=noise):
                what = f"in {rounds.exceeded} of {rounds.count} rounds {noise.rule}"
                faults.append(Fault(key, "repeated", what, found[-1].number, shown))
        return faults

    def end(self, *, number: int) -> list[Fault]:
        """Judge all rounds; once, as each look has its share of false alarms.

        Args:
            number: of requests sent.
        """
        noise, hits, changes = self._noise, self._hits, self._changes
        differ = sum(one.difference.diverged_at is not None for one in hits)
        above = sum(change > noise.most for change in changes)
        chance = noise.chance_of(above, of=len(changes))
        if not above or differ < MANY * len(hits) or chance > ONCE:
            return []
        what = (
            f"{differ} of {len(hits)} texts differ, and hits of {above} of {len(changes)} prompts moved by more than "
            f"{noise.most:.2g} nats on average, twice the most of {len(noise.questions)} cold ones (p = {chance:.1g})"
        )
        return [Fault(ALL, "typical", what, number)]


def _by_prompt(found: Sequence[Comparison]) -> list[float]:
    """Median of the mean changes of each prompt's hits, nats."""
    changes = defaultdict(list)
    for one in found:
        if one.is_hit and one.difference.nats is not None:
            changes[one.topic].append(one.difference.mean)
    return [statistics.median(each) for each in changes.values()]
