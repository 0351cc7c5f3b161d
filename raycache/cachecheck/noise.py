"""The noise floor, and the two thresholds that are derived from it.

A right server's answers differ by rounding: of another batch, and of a prompt that was computed in other pieces. Both
can be measured without a cache hit, on cold prompts: asked twice alone, asked alone and in a batch, and asked again
with the first tokens of the answer as a part of the prompt (computed in one piece instead of token by token, as a hit
is computed in other pieces than a whole prompt). The largest change of a log-probability in each pair is a sample.

Model: the logarithm of a sample is normally distributed, with a mean per kind of pair and one spread for all. Its upper
tail is wider than that of a maximum of many rounding errors. A new sample exceeds

    2 * max(largest sample, exp(mean + t(p, n - kinds + PRIOR) * spread * sqrt(1 + 1 / n_kind)))

with a probability of at most p: the one-sided prediction bound of Student's t, of the noisiest kind, with a factor of 2
for kinds of rounding that no cold pair shows. Kinds of pairs that never differ (n counts the others) say nothing about
the spread. To the others come PRIOR degrees of freedom with a spread of PRIOR_SPREAD, which is more than that of a
maximum of normal errors (a moderated t), so that a few samples that happen to agree do not make a narrow bound.

Where logits are rounded, as to bfloat16, or the server shows few decimals, cold pairs may happen to show no change and
a hit a step or two. With steps of s, the bounds are at least GROSS_STEPS s for one comparison and SOME_STEPS s for most
of a round. The steps of large logits are up to four times those of small ones, by which s is read.

A run looks at most k times, once per request of its budget. Of three tests, two look each time and have a quarter of
ALPHA each; the last looks once, at the end, and has half:

    gross       one comparison exceeds the bound of p = ALPHA / 4k
    repeated    in so many rounds most comparisons exceed the bound of p = SOME, that Binomial(n, CHANCE) reaches that
                many with a probability of at most ALPHA / 4k
    typical     hits of so many prompts move by more than FACTOR times the most that a cold prompt does, that chance
                would choose as many with a probability of at most ALPHA / 2 (Rosenbaum's exceedance test), and at least
                MANY of all hits' texts differ

A round is one pass of a scenario. Its prompts have much in common, and one that rounding changes much has large changes
each time; so a round is one trial, and so is a question of the samples. The prompts of two rounds are drawn apart. That
most comparisons of a round exceed the bound has a probability of at most 2 SOME (Markov), however they depend on each
other; CHANCE is more, because the few samples may be smaller than most. Rounds are counted per scenario and for all
scenarios together; each takes two requests or more, so that both counts are looked at k times at most.

The third test is for servers whose noise is large, such as 0.2 nats in 4-bit blocks: there the first two bounds lie
above what a fault can change. It compares the mean change over all tokens, which varies less than the largest. If all
m + n values of m prompts with hits and n cold prompts are from one distribution, each order of them is equally likely,
so that the largest t are all of hits with a probability of C(m + n - t, n) / C(m + n, n), whatever the distribution.

Three things keep it from what is no fault. The factor: one token computed alone is rounded otherwise than a hundred
together, a little and always, which ranks alone would show. The median of a prompt's hits stands against the largest of
up to four cold pairs. And texts must differ, so that on a server with hardly any noise a change which matters to
nobody is none. How many texts differ is not tested by itself: of a right server's hits a fifth do, beside few of its
cold pairs, all at near ties.

By the union bound, a right server is called faulty in at most ALPHA of all runs.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALPHA = 0.001
"""Share of runs in which a right server may be called faulty."""

LOOKING, ONCE = ALPHA / 4, ALPHA / 2
"""Parts for each of the two tests that look many times, and for the one that looks once."""

MANY = 1 / 3
"""Least share of texts that differ, where most hits are wrong."""

SOME = 0.01
"""Share of a right server's comparisons that exceed the lower of the two thresholds."""

CHANCE = 0.05
"""The share that is assumed."""

PRIOR, PRIOR_SPREAD = 16, 0.5
FACTOR = 2.0
RESOLUTION = 1e-4
"""Nats; smaller changes are one value. Servers round the log-probabilities that they show."""

GROSS_STEPS, SOME_STEPS = 8, 4
"""A change of so many steps of the logits is no fault: in one comparison, and in most of a round."""

MAX_FLOOR = 3.0
"""Nats; where the lower threshold is above this, nothing can be said."""

PAIRS = 3
"""Cold pairs of a question: twice alone, and twice in a batch."""

_CHARACTERS = (None, 24, 12, 6)
"""Lengths of texts to choose from, the whole text first."""

_MIN_SAMPLES, _MIN_CHANGED = 6, 3
_LEAST = math.log(RESOLUTION)


@dataclass(frozen=True)
class Noise:
    """The noise floor of a server.

    Attributes:
        samples: kind of pair -> largest changes, nats.
        scale: typical change of the noisiest kind, nats.
        spread: standard deviation of the logarithm of a change.
        some: threshold that a right server's comparison exceeds with a probability of at most `chance`, nats.
        gross: threshold that in no comparison of a run may be exceeded, nats.
        chance: see `some`.
        looks: number of looks that the error is divided by.
        questions: mean change of each cold prompt, nats; empty: only texts are compared.
        step: of the logits, or of what the server shows, nats; 0: none is known.
        characters: of two texts that are compared, where there are no log-probabilities; None: all.
    """

    samples: Mapping[str, Sequence[float]]
    scale: float
    spread: float
    some: float
    gross: float
    chance: float
    looks: int
    questions: Sequence[float] = ()
    step: float = 0.0
    characters: int | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a fault could be told from noise."""
        return self.some <= MAX_FLOOR and self.chance <= 0.5

    @property
    def per_look(self) -> float:
        """Probability of a false alarm, per look and test; without log-probabilities there is one test."""
        return (LOOKING if self.has_numbers else ALPHA / 2) / self.looks

    def is_gross(self, nats: float | None) -> bool:
        """Whether one comparison alone shows a fault."""
        return nats is not None and nats > self.gross

    @property
    def has_numbers(self) -> bool:
        """Whether log-probabilities are compared, and not texts."""
        return not math.isinf(self.gross)

    @property
    def rule(self) -> str:
        """What is counted of a round, in words."""
        if self.has_numbers:
            return f"most answers differ by more than {self.some:.3g} nats"
        part = "" if self.characters is None else f"the first {self.characters} characters of "
        return f"{part}one of the first {PAIRS} answers differ{'s' if self.characters is None else ''}"

    def can_judge(self, nats: float | None) -> bool:
        """Whether a comparison has what is compared."""
        return nats is not None or not self.has_numbers

    def is_over(self, *, nats: float | None, place: int | None) -> bool:
        """Whether a comparison exceeds the lower threshold; without log-probabilities, whether the texts differ.

        Args:
            place: where the texts part; None: nowhere.
        """
        if self.has_numbers:
            return nats is not None and nats > self.some
        return _differ(place, self.characters)

    def is_repeated(self, *, exceeded: int, of: int) -> bool:
        """Whether so many rounds above the lower threshold show a fault."""
        return binomial_tail(exceeded, of, self.chance) <= self.per_look

    @property
    def most(self) -> float:
        """Mean change that a right server's prompts rarely exceed if they have FACTOR times the noise, nats."""
        return FACTOR * max(RESOLUTION, *self.questions) if self.questions else math.inf

    def chance_of(self, above: int, *, of: int) -> float:
        """Probability that hits of so many prompts exceed `most`, on a right server."""
        return math.comb(of + len(self.questions) - above, of - above) / math.comb(of + len(self.questions), of)


class Rounds:
    """Counts rounds, and those that exceed the lower threshold: most of their comparisons do.

    Without log-probabilities it is enough if one of the first PAIRS does, as many as a question of the samples has.
    """

    def __init__(self) -> None:
        self.count = 0
        self.exceeded = 0

    def add(self, over: Sequence[bool], *, noise: Noise) -> bool:
        """Count a round; whether all rounds so far show a fault.

        Args:
            over: of each comparison, whether it exceeds the threshold; not empty.
        """
        self.count += 1
        self.exceeded += 2 * sum(over) > len(over) if noise.has_numbers else any(over[:PAIRS])
        return noise.is_repeated(exceeded=self.exceeded, of=self.count)


def noise_of(
    samples: Mapping[str, Sequence[float]], *, looks: int, questions: Sequence[float] = (), step: float = 0.0
) -> Noise | None:
    """Estimate the noise floor; None: too few samples.

    Args:
        samples: kind of pair -> largest changes, nats.
        looks: number of comparisons that a run can have.
        questions: mean change of each cold prompt, nats.
        step: of the logits, or of what the server shows, nats; 0: none is known.
    """
    kinds = {kind: _logs(values) for kind, values in samples.items() if len(values) >= 2}
    if sum(len(samples[kind]) for kind in kinds) < _MIN_SAMPLES:
        return None
    largest = max(max(values) for values in samples.values() if values)
    means = {kind: statistics.fmean(values) for kind, values in kinds.items()}
    kinds = {kind: values for kind, values in kinds.items() if max(values) > _LEAST} or kinds
    freedom = sum(map(len, kinds.values())) - len(kinds)
    squares = sum((value - means[kind]) ** 2 for kind, values in kinds.items() for value in values)
    spread = max(PRIOR_SPREAD, math.sqrt((squares + PRIOR * PRIOR_SPREAD**2) / (freedom + PRIOR)))
    noisiest = max(kinds, key=lambda kind: means[kind])

    def bound(tail: float) -> float:
        reach = t_quantile(tail, freedom + PRIOR) * spread * math.sqrt(1 + 1 / len(kinds[noisiest]))
        return FACTOR * max(largest, math.exp(min(means[noisiest] + reach, 700.0)))

    some, gross = max(bound(SOME), SOME_STEPS * step), max(bound(LOOKING / looks), GROSS_STEPS * step)
    return Noise(samples, math.exp(means[noisiest]), spread, some, gross, CHANCE, looks, questions, step)


def noise_of_texts(places: Sequence[int | None], *, looks: int) -> Noise | None:
    """The same for a server without log-probabilities: how often two cold answers differ, None: too few.

    The chance is the upper limit of Clopper and Pearson for the share of cold pairs that differ, at 1 - ALPHA / 2 for
    all lengths together; the other half of ALPHA is for the binomial test. Greedy texts that part once stay apart, so
    the shorter the beginnings that are compared, the fewer differ: of several lengths, the one with the lowest limit.

    Args:
        places: where the first of the PAIRS of each question parts, in characters; None: nowhere.
        looks: number of comparisons that a run can have.
    """
    if len(places) < _MIN_SAMPLES:
        return None
    differ = {length: [_differ(place, length) for place in places] for length in _CHARACTERS}
    length = min(_CHARACTERS, key=lambda length: sum(differ[length]))
    found = differ[length]
    chance = _upper_limit(sum(found), len(found), error=ALPHA / 2 / len(_CHARACTERS))
    samples = {"texts that differ": [float(one) for one in found]}
    return Noise(samples, 0.0, 0.0, 0.0, math.inf, chance, looks, characters=length)


def _differ(place: int | None, length: int | None) -> bool:
    return place is not None and (length is None or place < length)


def _upper_limit(seen: int, count: int, *, error: float) -> float:
    """Of Clopper and Pearson: the largest chance with which at most `seen` of `count` have a probability of `error`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_likely = 1 - binomial_tail(seen + 1, count, middle) > error
        low, high = (middle, high) if is_likely else (low, middle)
    return high


def _logs(values: Sequence[float]) -> list[float]:
    """Logarithms, of which answers without any change must not widen the upper tail.

    They are left out if enough others have changed: a bound for those that change is one for all. What is far below the
    largest is raised.
    """
    changed = [value for value in values if value > RESOLUTION]
    least = max(RESOLUTION, max(values) / 10)
    return [math.log(max(value, least)) for value in (changed if len(changed) >= _MIN_CHANGED else values)]


def binomial_tail(least: int, of: int, chance: float) -> float:
    """Probability of at least so many successes."""
    return sum(math.comb(of, k) * chance**k * (1 - chance) ** (of - k) for k in range(least, of + 1))


@functools.cache
def t_quantile(tail: float, freedom: int) -> float:
    """Value that Student's t exceeds with a probability of `tail`.

    Args:
        tail: above 0, at most 0.5.
        freedom: degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > tail:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > tail else (low, middle)
    return high


def _t_tail(value: float, freedom: int) -> float:
    """P(T > value), value >= 0: with T = sqrt(freedom) * tan(angle) the density is a power of a cosine."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    start, steps = math.atan(value / math.sqrt(freedom)), 400
    width = (math.pi / 2 - start) / steps
    heights = [max(0.0, math.cos(start + width * step)) ** (freedom - 1) for step in range(steps + 1)]
    simpson = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    return constant * simpson * width / 3
