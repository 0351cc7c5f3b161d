"""Guesses at the next tokens of a sequence, which the model checks all in one row.

    row          last token   draft 1   draft 2   draft 3
    sampled      A            B         C         D            one behind each
    right if                  = A       = B       = C          so draft 1 right and 2 wrong gives A and B

A guess is right if it is what is sampled there anyway. So the output is that without drafts, token by token: greedy
and with temperature, for every seed, with penalties.

How many are guessed is a matter of pay: of how often they are right, and of what a token more costs a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycache.types import PackedTokens

_WEIGHT = 0.1  # of the newest guess in what is known of a request
_SHARED_WEIGHT = 0.03  # and of all requests
_FIRST_SHARE = 0.7  # assumed to be right before anything is known
_TRY_EVERY = 16  # tokens, where it does not pay
_LONGEST_PAUSE = 4  # tokens, where there was no idea
_FORGET = 0.98  # of what a step told about costs, with each that follows
_LEAST_STEPS = 4  # that say something about costs
_TRIAL_STEPS = 4  # with one number of guesses for all
_TRIAL_EVERY = 64  # steps, so that costs stay known
_HOPELESS = 0.1  # share of right guesses below which costs do not matter
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
    """What steps of rows in decode take: a line over their rows without drafts; with drafts, a plane over their tokens
    and the passes of a draft model. Apart, for what a second token costs may be more than all that follow it."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Fit(1), _Fit(2)

    def note(self, seconds: float, num_tokens: int, *, num_rows: int, num_passes: int = 0) -> None:
        """Take in a step."""
        if num_tokens > num_rows or num_passes:
            self._drafted.note(seconds, num_tokens, num_passes)
        else:
            self._plain.note(seconds, num_rows)

    @property
    def are_known(self) -> bool:
        """Whether there were enough steps of either kind."""
        return min(self._plain.num_steps, self._drafted.num_steps) >= _LEAST_STEPS

    def seconds(self, num_rows: int, num_drafts: int, *, num_passes: int = 0) -> float:
        """Of a step in which so many rows have so many guesses each, once costs are known."""
        if num_drafts:
            return self._drafted.at(num_rows * (1 + num_drafts), num_passes)
        return self._plain.at(num_rows)


class _Fit:
    """Forgetful least squares: what n numbers add, none of them less than nothing.

    Args:
        count: n.
    Attributes:
        num_steps: that were noted.
    """

    def __init__(self, count: int) -> None:
        self.num_steps = 0
        self._moments = np.zeros((count + 2, count + 2))  # of (1, the numbers, the seconds)
        self._slopes: NDArray[np.float64] | None = None

    def note(self, seconds: float, *numbers: float) -> None:
        values = np.array([1.0, *numbers, seconds])
        self._moments = _FORGET * self._moments + np.outer(values, values)
        self.num_steps, self._slopes = self.num_steps + 1, None

    def at(self, *numbers: float) -> float:
        assert self.num_steps, "nothing is known"
        means = self._moments[0] / self._moments[0, 0]
        if self._slopes is None:
            spread = self._moments / self._moments[0, 0] - np.outer(means, means)
            # Where two numbers went together it is not known whose the seconds are: whose does not matter then.
            slopes = np.linalg.pinv(spread[1:-1, 1:-1], rcond=1e-6, hermitian=True) @ spread[1:-1, -1]
            self._slopes = np.maximum(slopes, 0)
        return max(float(means[-1] + (np.array(numbers) - means[1:-1]) @ self._slopes), 1e-9)


@dataclass
class Drafts:
    """Guesses for all requests.

    Attributes:
        drafter: who guesses; None for no guesses, or where the ranks' draft model does.
        most: guesses of a row; 0 for none.
        are_told: whether guesses come with the answers of the ranks.
        is_adaptive: whether fewer are made where they do not pay.
        stages: of the pipeline; so many plans are in flight.
        costs: of steps.
        num_made, num_right: guesses.
        made_at, right_at: the same by position behind the last known token, from 1.
    """

    drafter: Drafter | None = None
    most: int = 0
    are_told: bool = False
    is_adaptive: bool = True
    stages: int = 1
    costs: StepCosts = field(default_factory=StepCosts)
    made_at: Counter[int] = field(default_factory=Counter)
    right_at: Counter[int] = field(default_factory=Counter)
    _luck: Luck = field(default_factory=Luck)
    _num_steps: int = 0
    _trial: int | None = None
    _seconds: list[float] = field(default_factory=list)

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

    def begin_step(self, num_rows: int) -> None:
        """A plan of up to so many rows is made. Now and then all rows that want guesses get the same number of them for
        some steps on end, while costs are unknown from none to the most in turns: so the costs of each are seen."""
        if not (self.most and self.is_adaptive and num_rows):
            return
        length = _TRIAL_STEPS * self.stages
        every = _TRIAL_EVERY * self.stages if self.costs.are_known else length
        turn, place = divmod(self._num_steps, every)
        self._trial = turn % (self.most + 1) if place < length else None
        self._seconds = []
        if self.costs.are_known:
            counts = range(self.most + 1)
            self._seconds = [self.costs.seconds(num_rows, n, num_passes=n if self.are_told else 0) for n in counts]

    def end_step(self) -> None:
        """A plan was made of rows in decode alone, whose pace will be known."""
        self._num_steps += 1

    def guess(self, tokens: bytearray, luck: Luck, *, most: int) -> PackedTokens:
        """Guess how a sequence in decode goes on.

        Args:
            tokens: of the sequence, packed.
            luck: of the request.
            most: guesses that there is room for.
        """
        count = min(most, self.wanted(luck))
        if self.drafter is None or count <= 0:
            luck.num_idle += 1
            return b""
        found = self.drafter.guess(tokens, count)
        luck.num_idle, luck.num_vain = 0, 0 if found else luck.num_vain + 1
        return found

    def ask(self, luck: Luck, *, most: int) -> int:
        """How many guesses the ranks should make at what follows a request's next row.

        Args:
            luck: of the request.
            most: that there is room for.
        """
        count = max(0, min(most, self.wanted(luck)))
        luck.num_idle = 0 if count else luck.num_idle + 1
        return count

    def wanted(self, luck: Luck) -> int:
        """Most guesses at a request's next tokens."""
        if not self.most or luck.num_idle < min(luck.num_vain, _LONGEST_PAUSE):
            return 0
        return self._worth(luck) if self.is_adaptive else self.most

    def note(self, luck: Luck, num_right: int, num_drafts: int) -> None:
        """Take in what became of a row's guesses."""
        luck.note(num_right, num_drafts)
        self._luck.note(num_right, num_drafts, weight=_SHARED_WEIGHT)
        self.made_at.update(range(1, num_drafts + 1))
        self.right_at.update(range(1, num_right + 1))

    def _worth(self, luck: Luck) -> int:
        """Guesses with which a row is expected to give the most tokens per second."""
        rarely = 1 if luck.num_idle >= _TRY_EVERY else 0
        if not self._seconds:
            return (self._trial or 0) if luck.share > _HOPELESS else rarely
        best = max(range(self.most + 1), key=lambda count: _expected(luck.share, count) / self._seconds[count])
        if not best:
            return rarely
        return best if self._trial is None else self._trial


def _expected(share: float, num_drafts: int) -> float:
    """Tokens of a row, each of whose guesses is right so often behind right ones."""
    return sum(share**place for place in range(num_drafts + 1))
