"""What two prompts share behind the place where they part.

    this    [a b][X X X][c d e f g]         X replaces Y, then both go on alike:
    other   [a b][Y][c d e f g h]           Rejoin(here=3, there=1, length=5)

Only places that their own content chooses are compared (one in 8, or fewer in long texts), so that a part which has
moved is found without looking at every pair of places.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from raycache.divergence.seen import Tokens, common

LEAST_SHARED = 32
"""Tokens that must agree: shorter agreements, such as the marks around a message, are in any two prompts."""
_GRAM = 8
_MOST_PLACES = 1024
_MOST_TRIES = 32
_FACTORS = np.array([0x9E3779B1 * (2 * index + 1) for index in range(_GRAM)], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Where two texts agree again.

    Attributes:
        here, there: tokens of each before it.
        length: tokens that agree there.
    """

    here: int
    there: int
    length: int


def rejoin(this: Tokens, other: Tokens) -> Rejoin | None:
    """Find the first place of `this` behind which at least LEAST_SHARED tokens stand in `other` too."""
    if min(len(this), len(other)) < LEAST_SHARED:
        return None
    mask = _mask(max(len(this), len(other)))
    here, grams_here = _places(this, mask)
    there, grams_there = _places(other, mask)
    known = dict(zip(reversed(grams_there.tolist()), reversed(there.tolist()), strict=True))
    candidates = (
        (begin, known[gram]) for gram, begin in zip(grams_here.tolist(), here.tolist(), strict=True) if gram in known
    )
    for begin, at in islice(candidates, _MOST_TRIES):
        behind = common(this[begin:], other[at:])
        before = _common_end(this[:begin], other[:at])
        length = before + behind
        if length >= LEAST_SHARED:
            return Rejoin(begin - before, at - before, length)
    return None


def _places(tokens: Tokens, mask: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Places that the content chooses, and a hash of the tokens from there."""
    wide = tokens.astype(np.uint64)
    size = len(tokens) - _GRAM + 1
    grams = wide[:size] * _FACTORS[0]
    for index in range(1, _GRAM):
        grams = grams + wide[index : index + size] * _FACTORS[index]
    grams ^= grams >> np.uint64(29)
    places = np.flatnonzero((grams & np.uint64(mask)) == 0)
    return places, grams[places]


def _mask(size: int) -> int:
    share = 8
    while size > share * _MOST_PLACES:
        share *= 2
    return share - 1


def _common_end(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    return common(one[::-1][:length], other[::-1][:length])
