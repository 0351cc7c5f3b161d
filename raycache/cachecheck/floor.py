"""Measures the noise floor: pairs of cold answers to the same question, which differ by rounding only."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from raycache.cachecheck.answers import Answer, Question
from raycache.cachecheck.client import CannotTestError
from raycache.cachecheck.compare import LEAST_LOGPROB, Difference, difference
from raycache.cachecheck.lab import Lab
from raycache.cachecheck.noise import RESOLUTION, Noise, noise_of, noise_of_texts
from raycache.cachecheck.pressure import AT_ONCE
from raycache.cachecheck.target import CHAT, Cold

_SHARE = 8
"""One of so many requests of the budget is for the noise floor, times the five of each question."""

_LEAST_QUESTIONS, _MOST_QUESTIONS = 8, 16
_ALONE, _PIECES, _BATCH = "alone", "in other pieces", "in batches"

ASSUMED, ASSUMED_NATS = "assumed", 0.25
"""Kind and size of changes, in nats, where no prompt was computed in other pieces and batches change nothing: then
nothing shows how a hit is rounded. As measured in bfloat16."""

_FEW = 3

_STEPS, _SHOWN = [2.0**-exponent for exponent in range(1, 11)], (0.1, 0.01, 0.001)
"""Steps to look for: of logits in half precision, and of a server that shows few decimals."""

_MIN_GAPS, _MIN_SIZES, _IN_STEP = 16, 5, 0.95
"""So many gaps between log-probabilities, of so many sizes, and this share of them must be multiples of a step."""


async def measure(lab: Lab, *, budget: int) -> Noise:
    """Ask questions cold: twice alone, twice in a batch, and with a part of the answer in the prompt.

    Args:
        budget: most requests of the run.
    Raises:
        CannotTestError: the answers differ so much that no fault could be seen.
    """
    write = lab.writer
    has_numbers = bool((lab.target.forms or {}).get(lab.target.path))
    count = min(_MOST_QUESTIONS, max(_LEAST_QUESTIONS, budget // _SHARE // 5))
    if not has_numbers:  # texts say less
        count = min(2 * _MOST_QUESTIONS, max(_MOST_QUESTIONS, budget // 20))
    lengths = [write.length() for _ in range(count - 2)] + [4 * write.num_records] * 2
    questions = [write.question(length) for length in lengths]
    firsts: list[Answer] = []
    alone: dict[str, Difference] = {}
    pieces: dict[str, Difference] = {}
    for question in questions:
        first = await lab.cold(question)
        firsts.append(first)
        alone[question.topic] = difference(first, await lab.cold(question))
        if (found := await _in_other_pieces(lab, question, first)) is not None:
            pieces[question.topic] = found
    batched = await _in_batches(lab, list(zip(questions, firsts, strict=True)))
    step = step_of(firsts)
    noise = _noise_of_numbers(alone, _of_one_tokenisation(pieces), batched, looks=budget, step=step)
    if noise is None:
        noise = noise_of_texts([_first([alone[topic], *found]) for topic, found in batched.items()], looks=budget)
    if noise is None or not noise.is_usable:
        raise CannotTestError(_too_noisy(noise, lab.target.cold))
    return noise


def step_of(answers: Iterable[Answer]) -> float:
    """The smallest step of a server's logits, or of the log-probabilities that it shows, in nats; 0.0: none is found.

    The log-probabilities of a position are as far apart as its logits. Those of bfloat16 are multiples of a power of
    two, which is larger for larger logits.
    """
    orders = [
        sorted(value for value in token.top.values() if value > LEAST_LOGPROB)
        for answer in answers
        for token in answer.tokens
    ]
    values = [value for order in orders for value in order]
    shown = next((step for step in _SHOWN if values and _are_multiples(values, step, 1e-6)), 0.0)
    tolerance = max(RESOLUTION, shown)
    gaps = [high - low for order in orders for low, high in pairwise(order) if high - low > tolerance]
    if len(gaps) < _MIN_GAPS or len({round(gap / tolerance) for gap in gaps}) < _MIN_SIZES:
        return shown
    found = (step for step in _STEPS if step > 4 * tolerance and _are_multiples(gaps, step, tolerance))
    return next(found, shown)


def _are_multiples(values: Sequence[float], step: float, tolerance: float) -> bool:
    """Whether nearly all of the values are multiples of the step."""
    return sum(abs(value - step * round(value / step)) <= tolerance for value in values) >= _IN_STEP * len(values)


async def _in_other_pieces(lab: Lab, question: Question, first: Answer) -> Difference | None:
    """Tokens that were computed one by one, computed again as a part of the prompt; None: that cannot be done."""
    if lab.target.path == CHAT or len(first.tokens) < 3:
        return None
    at = lab.writer.choose(1, len(first.tokens) - 2)
    told = "".join(token.text for token in first.tokens[:at])
    if not first.text.startswith(told):
        return None
    second = await lab.cold(dataclasses.replace(question, text=question.text + told))
    if first.prompt_tokens is None or second.prompt_tokens != first.prompt_tokens + at:
        return None  # the text is other tokens there
    return difference(first, second, skip=at)


async def _in_batches(lab: Lab, asked: Sequence[tuple[Question, Answer]]) -> Mapping[str, Sequence[Difference]]:
    """Each question twice, together with others."""
    batched: defaultdict[str, list[Difference]] = defaultdict(list)
    for batch in (*_batches(asked), *_batches(asked[::-1])):
        spaces = [await lab.cold_space() for _ in batch]
        answers = await lab.together([(question, space) for (question, _), space in zip(batch, spaces, strict=True)])
        for (question, first), answer in zip(batch, answers, strict=False):
            batched[question.topic].append(difference(first, answer))
    return batched


def _batches(asked: Sequence[tuple[Question, Answer]]) -> list[Sequence[tuple[Question, Answer]]]:
    """Of at most AT_ONCE, about equally long."""
    count = -(-len(asked) // AT_ONCE)
    size = -(-len(asked) // count)
    return [asked[start : start + size] for start in range(0, len(asked), size)]


def _of_one_tokenisation(pairs: Mapping[str, Difference]) -> dict[str, Difference]:
    """Without pairs, at most a quarter, whose text became other tokens, though as many."""
    nats = [found.nats for found in pairs.values() if found.nats is not None]
    if not nats:
        return {}
    limit = max(0.3, 50 * max(RESOLUTION, statistics.median(nats)))
    kept = {topic: found for topic, found in pairs.items() if found.nats is not None and found.nats <= limit}
    return kept if len(kept) >= 0.75 * len(pairs) else {}


def _noise_of_numbers(
    alone: Mapping[str, Difference],
    pieces: Mapping[str, Difference],
    batched: Mapping[str, Sequence[Difference]],
    *,
    looks: int,
    step: float,
) -> Noise | None:
    """From changes of log-probabilities; None: too few.

    Args:
        alone, pieces, batched: topic of a question -> its pairs.
        looks: number of comparisons that a run can have.
        step: see `step_of`.
    """
    pairs = {_ALONE: _single(alone), _PIECES: _single(pieces), _BATCH: batched}
    samples = {kind: _largest(found.values()) for kind, found in pairs.items()}
    # A question that was not computed in other pieces may show no noise where a hit would.
    topics = pieces if len(samples[_PIECES]) >= _FEW else alone
    means = [max(one.mean for found in pairs.values() for one in found.get(topic, ())) for topic in topics]
    if samples[_ALONE] and len(samples[_PIECES]) < _FEW and sum(nats > 0 for nats in samples[_BATCH]) < _FEW:
        samples[ASSUMED] = [ASSUMED_NATS] * _LEAST_QUESTIONS
        means = [max(mean, ASSUMED_NATS) for mean in means]
    return noise_of(samples, looks=looks, questions=means, step=step)


def _single(pairs: Mapping[str, Difference]) -> Mapping[str, list[Difference]]:
    return {topic: [found] for topic, found in pairs.items()}


def _largest(pairs: Iterable[Sequence[Difference]]) -> list[float]:
    """Largest change of each question, of which all pairs are one sample."""
    each = ([one.nats for one in found if one.nats is not None] for found in pairs)
    return [max(nats) for nats in each if nats]


def _first(pairs: Sequence[Difference]) -> int | None:
    """First place where texts of a question differ."""
    return min((one.diverged_at for one in pairs if one.diverged_at is not None), default=None)


def _too_noisy(noise: Noise | None, cold: Cold) -> str:
    hint = "; try --cold flush, if the server can empty its cache and nobody else uses it" if cold is Cold.LINE else ""
    if noise is None:
        return f"too few cold answers could be compared{hint}"
    if noise.scale == 0.0:
        return f"cold answers differ among themselves too often to see a fault{hint}"
    return (
        f"cold answers of this server differ among themselves by {noise.scale:.2g} nats, so that a difference below "
        f"{noise.some:.2g} means nothing{hint}"
    )
