"""Guesses at the next tokens of a sequence, which the model checks all in one row.

    row          last token   draft 1   draft 2   draft 3
    sampled      A            B         C         D            one behind each
    right if                  = A       = B       = C          so draft 1 right and 2 wrong gives A and B

A guess is right if it is what is sampled there anyway. So the output is that without drafts, token by token: greedy
and with temperature, for every seed, with penalties.

How many are guessed is a matter of pay: of how often they are right, and of what a token more costs a step.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from raycache.types import PackedTokens

_WEIGHT = 0.1  # of the newest guess in what is known of a request
_SHARED_WEIGHT = 0.01  # and of all requests
_FIRST_SHARE = 0.7  # assumed to be right before anything is known
_TRY_EVERY = 16  # tokens, where it does not pay
_LONGEST_PAUSE = 4  # tokens, where there was no idea
_FORGET = 0.98  # of what a step told about costs, with each that follows
_LEAST_SPREAD = 1e-3  # of step sizes, for a line through them
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2  # tokens
_REACH = 32768  # tokens that are looked through


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def guess(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """Up to `most` next tokens, packed; none if it has no idea."""
        ...


class PromptLookup:
    """Whatever followed when the sequence's last few tokens stood in it before: no model, good at quoting."""

    def guess(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """See Drafter."""
        for length in range(_LONGEST_MATCH, _SHORTEST_MATCH - 1, -1):
            last = bytes(tokens[-4 * length :])
            begin, end = max(0, len(tokens) - 4 * _REACH), len(tokens) - 4
            # Numbers of four bytes: what is found between two of them is nothing.
            while (place := tokens.rfind(last, begin, end)) % 4 and place > 0:
                end = place + len(last) - 1
            if place >= 0 and len(last) == 4 * length:
                follows = bytes(tokens[place + len(last) :][: 4 * most])
                # At the end it goes on with itself, as what repeats does.
                return (follows * -(-4 * most // len(follows)))[: 4 * most]
        return b""


@dataclass(slots=True)
class Luck:
    """How often guesses are right, as a moving average.

    Attributes:
        share: of the guesses that were right, of those that had only right ones before them.
        num_idle: tokens since the last guess, or since one was asked for in vain.
        num_vain: times in a row that there was no idea.
    """

    share: float = _FIRST_SHARE
    num_idle: int = 0
    num_vain: int = 0

    def note(self, num_right: int, num_drafts: int, *, weight: float = _WEIGHT) -> None:
        """Take in what became of a row's guesses."""
        for _ in range(num_right):
            self.share += weight * (1 - self.share)
        if num_right < num_drafts:
            self.share -= weight * self.share


class StepCosts:
    """What steps take, fixed + per_token * tokens + per_pass * passes of a draft model, by forgetful least squares."""

    def __init__(self) -> None:
        self._moments = np.zeros((4, 4))  # of (1, tokens, passes, seconds)

    def note(self, seconds: float, num_tokens: int, num_passes: int = 0) -> None:
        """Take in a step of rows in decode."""
        values = np.array([1.0, num_tokens, num_passes, seconds])
        self._moments = _FORGET * self._moments + np.outer(values, values)

    def share_of_token(self, num_rows: int) -> float | None:
        """What a guess more for each row costs a step of so many rows of one token, over what the step costs; None if
        steps were too much alike to tell."""
        moments = self._moments
        if moments[0, 3] <= 0:
            return None
        means = moments[0] / moments[0, 0]
        spread = moments / moments[0, 0] - np.outer(means, means)
        if spread[1, 1] <= _LEAST_SPREAD * (spread[1, 1] + means[1] ** 2):
            return None
        # In units of a guess more for each row: so many tokens, and one pass. Where they went together only the sum of
        # their costs is known, and that is what is wanted: the smallest pair will do.
        unit = np.array([1 / num_rows, 1.0])
        together = np.linalg.pinv(spread[1:3, 1:3] * np.outer(unit, unit), rcond=1e-6, hermitian=True)
        of_tokens, of_pass = together @ (spread[1:3, 3] * unit)
        step_s = means[3] - of_tokens * (means[1] / num_rows - 1) - of_pass * means[2]
        return float(min(max((of_tokens + of_pass) / max(step_s, of_tokens, 1e-9), 0.0), 1.0))


@dataclass
class Drafts:
    """Guesses for all requests.

    Attributes:
        drafter: who guesses; None for no guesses, or where the ranks' draft model does.
        most: guesses of a row; 0 for none.
        are_told: whether guesses come with the answers of the ranks.
        is_adaptive: whether fewer are made where they do not pay.
        costs: of steps.
        num_made, num_right: guesses.
        made_at, right_at: the same by position behind the last known token, from 1.
    """

    drafter: Drafter | None = None
    most: int = 0
    are_told: bool = False
    is_adaptive: bool = True
    costs: StepCosts = field(default_factory=StepCosts)
    made_at: Counter[int] = field(default_factory=Counter)
    right_at: Counter[int] = field(default_factory=Counter)
    _luck: Luck = field(default_factory=Luck)
    _num_tried: int = 0

    @property
    def num_made(self) -> int:
        """Guesses that were checked."""
        return self.made_at.total()

    @property
    def num_right(self) -> int:
        """Those of them that were right."""
        return self.right_at.total()

    def new_luck(self) -> Luck:
        """Of a request of which nothing is known yet."""
        return Luck(self._luck.share)

    def guess(self, tokens: bytearray, luck: Luck, *, most: int, num_rows: int) -> PackedTokens:
        """Guess how a sequence in decode goes on.

        Args:
            tokens: of the sequence, packed.
            luck: of the request.
            most: guesses that there is room for.
            num_rows: of the step.
        """
        count = min(most, self.wanted(luck, num_rows=num_rows))
        if self.drafter is None or count <= 0:
            luck.num_idle += 1
            return b""
        found = self.drafter.guess(tokens, count)
        luck.num_idle, luck.num_vain = 0, 0 if found else luck.num_vain + 1
        return found

    def ask(self, luck: Luck, *, most: int, num_rows: int) -> int:
        """How many guesses the ranks should make at what follows a request's next row.

        Args:
            luck: of the request.
            most: that there is room for.
            num_rows: of the step.
        """
        count = max(0, min(most, self.wanted(luck, num_rows=num_rows)))
        luck.num_idle = 0 if count else luck.num_idle + 1
        return count

    def wanted(self, luck: Luck, *, num_rows: int) -> int:
        """Most guesses at a request's next tokens.

        Args:
            luck: of the request.
            num_rows: of the step.
        """
        if (self.drafter is None and not self.are_told) or luck.num_idle < min(luck.num_vain, _LONGEST_PAUSE):
            return 0
        return self._worth(luck, num_rows) if self.is_adaptive else self.most

    def note(self, luck: Luck, num_right: int, num_drafts: int) -> None:
        """Take in what became of a row's guesses."""
        luck.note(num_right, num_drafts)
        self._luck.note(num_right, num_drafts, weight=_SHARED_WEIGHT)
        self.made_at.update(range(1, num_drafts + 1))
        self.right_at.update(range(1, num_right + 1))

    def _worth(self, luck: Luck, num_rows: int) -> int:
        """Guesses that pay: the last of them is right more often than what it adds to the step's time."""
        cost = self.costs.share_of_token(num_rows)
        if cost is None:  # steps of all sizes tell what they take
            self._num_tried += 1
            return 1 + self._num_tried % self.most
        if luck.share <= cost or luck.share <= 0:
            return 1 if luck.num_idle >= _TRY_EVERY else 0
        if cost <= 0 or luck.share >= 1:
            return self.most
        return min(self.most, int(math.log(cost) / math.log(luck.share)))
