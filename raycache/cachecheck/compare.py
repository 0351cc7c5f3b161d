"""How far two answers to the same question are apart.

The tokens are greedy, so both answers are one text until the first place where they choose differently; behind it their
contexts differ, and nothing more is compared.

    reference    the   amber   falcon   keeps   48 ...
    observed     the   amber   falcon   has     ...
    compared     |-------- log-probabilities ---|  at the last one: by how much the order of "keeps" and "has" moved

A tie that rounding decides is therefore a small difference: what counts is how far log-probabilities moved, not that
the texts differ.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from raycache.cachecheck.answers import Answer, Token

LEAST_LOGPROB = -20.0
"""Less likely tokens are not compared, as some servers show -9999 for what cannot be.

Unlikely ones are: a trained model is sure of most of its tokens, and rounding shows in the others only, so that without
them the noise floor would be too low.
"""


@dataclass(frozen=True)
class Difference:
    """Between two answers.

    Attributes:
        nats: largest change of a log-probability; None: the server gives none.
        mean: of the largest changes of all positions, nats.
        position: of that change, in output tokens from 0.
        diverged_at: first position with another token; None: all compared tokens are the same.
        compared: number of positions compared.
    """

    nats: float | None
    position: int
    diverged_at: int | None
    compared: int
    mean: float = 0.0


def difference(reference: Answer, observed: Answer, *, skip: int = 0) -> Difference:
    """Compare two answers.

    Args:
        skip: tokens at the start of the reference that are part of the observed answer's prompt.
    """
    ours, theirs = reference.tokens[skip:], observed.tokens
    if not ours or not theirs:
        return _of_texts(reference, observed, skip=skip)
    changes, diverged_at = [], None
    has_numbers = False
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        has_numbers |= one.logprob is not None and other.logprob is not None
        changes.append(_change(one, other))
        if one.text != other.text:
            diverged_at = place
            break
    nats = max(changes)
    mean = statistics.fmean(changes)
    return Difference(nats if has_numbers else None, changes.index(nats), diverged_at, len(changes), mean)


def as_json(found: Difference) -> dict[str, Any]:
    """For the report."""
    return {
        "nats": found.nats,
        "mean_nats": None if found.nats is None else found.mean,
        "position": found.position,
        "diverged_at": found.diverged_at,
        "compared_tokens": found.compared,
    }


def _of_texts(reference: Answer, observed: Answer, *, skip: int) -> Difference:
    """Where no tokens are shown, characters stand for them; a continued prompt cannot be compared."""
    if skip or not (reference.text or observed.text):
        return Difference(None, 0, None, 0)
    pairs = zip(reference.text, observed.text, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    return Difference(None, place or 0, place, min(len(reference.text), len(observed.text)))


def _change(one: Token, other: Token) -> float:
    shared = one.top.keys() & other.top.keys()
    moves = [
        abs(one.top[name] - other.top[name]) for name in shared if max(one.top[name], other.top[name]) > LEAST_LOGPROB
    ]
    if one.text != other.text and one.logprob is not None and other.logprob is not None:
        # Each preferred its own token; the sum of both preferences moved, at least half of it in one of the two tokens.
        moves.append((_lead(one, other.text) + _lead(other, one.text)) / 2)
    return max(moves, default=0.0)


def _lead(token: Token, rival: str) -> float:
    """By how much a token was preferred to a rival; at least, if the rival is not among those shown."""
    assert token.logprob is not None, "only called with log-probabilities"
    return max(0.0, token.logprob - token.top.get(rival, min(token.top.values())))
