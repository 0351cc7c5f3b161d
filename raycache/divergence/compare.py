"""What two prompts share behind the place where they part.

    this    [a b][X X X][c d e f g]         X replaces Y, then both go on alike:
    other   [a b][Y][c d e f g h]           Rejoin(here=3, there=1, length=5)

Only places that their own content chooses are compared, one in 8 or fewer, so that a part which has
moved is found without looking at every pair of places.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from raycache.divergence.seen import Tokens, common

LEAST_SHARED = 32
"""Tokens that must agree: shorter agreements, such as the marks around a message, are in any two prompts."""
_GRAM = 8
_MOST_TOKENS = 16_384
_MOST_PLACES = 2048
_MOST_TRIES = 32
_SPREAD = np.uint32(0x9E3779B1)
_STEPS = np.arange(_GRAM)
_FACTORS = np.array([(0x9E3779B97F4A7C15 * (2 * index + 1)) % 2**63 for index in range(_GRAM)], dtype=np.int64)


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


def rejoin(this: Tokens, other: Tokens, *, least: int = LEAST_SHARED) -> Rejoin | None:
    """Find the first place of `this` behind which many tokens stand in `other` too.

    Of each, the first _MOST_TOKENS tokens are looked at.

    Args:
        least: tokens that must agree; what is shorter than four times as many may be missed.
    """
    if min(len(this), len(other)) < least:
        return None
    share = 1 << max(3, min(8, (least // 4).bit_length() - 1))
    grams_here, here = _places(this[:_MOST_TOKENS], share)
    grams_there, there = _places(other[:_MOST_TOKENS], share)
    if set(grams_there).isdisjoint(grams_here):
        return None  # nearly always, and found out faster than by what follows
    known = dict(zip(reversed(grams_there), reversed(there), strict=True))
    candidates = ((known[gram], begin) for gram, begin in zip(grams_here, here, strict=True) if gram in known)
    for at, begin in islice(candidates, _MOST_TRIES):
        behind = common(this[begin:], other[at:])
        before = _common_end(this[:begin], other[:at])
        if before + behind >= least:
            return Rejoin(begin - before, at - before, before + behind)
    return None


def _places(tokens: Tokens, share: int) -> tuple[list[int], list[int]]:
    """Hashes of the tokens from each place that the content chooses, one of `share`, and the places."""
    size = len(tokens) - _GRAM + 1
    # By a product: ids of frequent tokens are neighbours, and multiples of small numbers.
    (places,) = (tokens[:size].view(np.uint32) * _SPREAD < np.uint32(2**32 // share)).nonzero()
    if len(places) > _MOST_PLACES:
        places = places[:_MOST_PLACES]
    grams = tokens[places[:, None] + _STEPS].astype(np.int64) @ _FACTORS
    return grams.tolist(), places.tolist()


def _common_end(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    return common(one[::-1][:length], other[::-1][:length])
