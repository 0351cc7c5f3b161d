"""Draft tokens of sequences in decode, which the model verifies all in one row, and how many of them pay.

    row            last token   draft 1   draft 2   draft 3
    sampled        A            B         C         D            one after each
    accepted if                 = A       = B       = C          so with draft 1 accepted and 2 rejected: A and B

A draft token is accepted if it is what is sampled there anyway. Output is identical to decoding without drafts: greedy
and with temperature, for every seed, with penalties.

How many tokens are drafted follows from their acceptance rate and from what one token more costs a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycache.types import PackedTokens

_WEIGHT = 0.1  # of the newest draft token in the rate of a request
_SHARED_WEIGHT = 0.03  # and in that of all requests
_FIRST_RATE = 0.7  # assumed before anything is known
_TRY_EVERY = 16  # tokens, where drafts do not pay
_LONGEST_PAUSE = 4  # tokens, where the drafter found nothing
_FORGET = 0.98  # of what a step told about costs, with each that follows
_LEAST_STEPS = 4  # that say something about costs
_TRIAL_STEPS = 4  # with one number of draft tokens for all
_TRIAL_EVERY = 64  # steps, so that costs stay known
_HOPELESS = 0.1  # acceptance rate below which costs do not matter
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2  # tokens
_REACH = 32768  # tokens that are looked through


class Drafter(Protocol):
    """Drafts next tokens on the decider."""

    def draft(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """Up to `most` next tokens, packed; empty if it finds none."""
        ...


class PromptLookup:
    """Whatever followed when the sequence's last few tokens stood in it before: no model, good at quoting."""

    def draft(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """What followed the longest of the last 4 to 2 tokens that stood there before."""
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
class AcceptanceRate:
    """How often draft tokens are accepted, as a moving average.

    Attributes:
        value: share of draft tokens that were accepted, of those after accepted ones only.
        num_idle: tokens since the last draft, or since the drafter last found nothing.
        num_vain: times in a row that the drafter found nothing.
    """

    value: float = _FIRST_RATE
    num_idle: int = 0
    num_vain: int = 0

    def note(self, num_accepted: int, num_drafts: int, *, weight: float = _WEIGHT) -> None:
        """Take in how many of a row's draft tokens were accepted."""
        for _ in range(num_accepted):
            self.value += weight * (1 - self.value)
        if num_accepted < num_drafts:
            self.value -= weight * self.value


@dataclass(slots=True)
class DraftState:
    """Drafts of one request.

    Attributes:
        rate: of this request.
        next_drafts: packed, what the ranks' draft model proposes after the last known token.
        uncounted: packed draft tokens that were accepted and that the ranks' penalties do not know of yet.
        num_in_row: draft tokens in the last row that was planned.
        num_asked: of the ranks, with that row.
        num_drafted, num_accepted: draft tokens that were verified, and those of them that were accepted.
    """

    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    next_drafts: PackedTokens = b""
    uncounted: PackedTokens = b""
    num_in_row: int = 0
    num_asked: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def forget_rows(self) -> None:
        """The next row is the first of a new slot."""
        self.next_drafts = self.uncounted = b""

    def plan(self, num_in_row: int, num_asked: int) -> PackedTokens:
        """A row is planned, with what the ranks' penalties have to count before it."""
        self.num_in_row, self.num_asked = num_in_row, num_asked
        uncounted, self.uncounted = self.uncounted, b""
        return uncounted


class StepCosts:
    """Time of decode steps: linear in their rows without drafts; with drafts, linear in their tokens and in the passes
    of a draft model. Two fits, because a second token may cost more than all that follow it."""

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
        """Time of a step in which each row has `num_drafts`, once costs are known."""
        if num_drafts:
            return self._drafted.at(num_rows * (1 + num_drafts), num_passes)
        return self._plain.at(num_rows)


class _Fit:
    """Least squares with exponential forgetting, of seconds over `count` numbers; no slope is negative."""

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
    """How many tokens are drafted for each request, and how many of them are accepted.

    Attributes:
        drafter: None without drafts, or where the ranks' draft model makes them.
        most: draft tokens per row; 0 for none.
        are_from_ranks: whether draft tokens come with the results of the ranks.
        is_adaptive: whether fewer are made where they do not pay.
        stages: of the pipeline; so many plans are in flight.
        costs: of decode steps.
        drafted_at, accepted_at: draft tokens verified and accepted, by position after the last known token, from 1.
    """

    drafter: Drafter | None = None
    most: int = 0
    are_from_ranks: bool = False
    is_adaptive: bool = True
    stages: int = 1
    costs: StepCosts = field(default_factory=StepCosts)
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    _rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    _num_steps: int = 0
    _trial: int | None = None
    _seconds: list[float] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        """Draft tokens that were verified."""
        return self.drafted_at.total()

    @property
    def num_accepted(self) -> int:
        """Those of them that were accepted."""
        return self.accepted_at.total()

    def new_state(self) -> DraftState:
        """For a new request, whose acceptance rate is assumed to be that of all."""
        return DraftState(AcceptanceRate(self._rate.value))

    def begin_step(self, num_rows: int) -> None:
        """A plan of up to `num_rows` is made. At intervals all rows that want drafts get the same number of them for
        some steps, and all the time while costs are unknown, so that the cost of each number is measured."""
        if not (self.most and self.is_adaptive and num_rows):
            return
        length = _TRIAL_STEPS * self.stages
        every = _TRIAL_EVERY * self.stages if self.costs.are_known else length
        turn, place = divmod(self._num_steps, every)
        self._trial = turn % (self.most + 1) if place < length else None
        self._seconds = []
        if self.costs.are_known:
            counts = range(self.most + 1)
            self._seconds = [
                self.costs.seconds(num_rows, n, num_passes=n if self.are_from_ranks else 0) for n in counts
            ]

    def end_step(self) -> None:
        """A plan was made of rows in decode alone, whose pace will be known."""
        self._num_steps += 1

    def draft(self, tokens: bytearray, rate: AcceptanceRate, *, most: int) -> PackedTokens:
        """Draft the next tokens of a sequence in decode, at most `most`; packed, as `tokens` are."""
        count = min(most, self.wanted(rate))
        if self.drafter is None or count <= 0:
            rate.num_idle += 1
            return b""
        found = self.drafter.draft(tokens, count)
        rate.num_idle, rate.num_vain = 0, 0 if found else rate.num_vain + 1
        return found

    def ask(self, rate: AcceptanceRate, *, most: int) -> int:
        """How many tokens the ranks should draft after a request's next row, at most `most`."""
        count = max(0, min(most, self.wanted(rate)))
        rate.num_idle = 0 if count else rate.num_idle + 1
        return count

    def wanted(self, rate: AcceptanceRate) -> int:
        """Most draft tokens for a request's next row."""
        if not self.most or rate.num_idle < min(rate.num_vain, _LONGEST_PAUSE):
            return 0
        return self._worth(rate) if self.is_adaptive else self.most

    def note(self, state: DraftState, num_accepted: int, num_drafts: int) -> None:
        """Take in how many of a row's draft tokens were accepted."""
        state.num_drafted += num_drafts
        state.num_accepted += num_accepted
        state.rate.note(num_accepted, num_drafts)
        self._rate.note(num_accepted, num_drafts, weight=_SHARED_WEIGHT)
        self.drafted_at.update(range(1, num_drafts + 1))
        self.accepted_at.update(range(1, num_accepted + 1))

    def _worth(self, rate: AcceptanceRate) -> int:
        """Draft tokens with which a row is expected to give the most tokens per second."""
        rarely = 1 if rate.num_idle >= _TRY_EVERY else 0
        if not self._seconds:
            return (self._trial or 0) if rate.value > _HOPELESS else rarely
        best = max(range(self.most + 1), key=lambda count: _expected(rate.value, count) / self._seconds[count])
        if not best:
            return rarely
        return best if self._trial is None else self._trial


def _expected(rate: float, num_drafts: int) -> float:
    """Tokens that a row with `num_drafts` gives on average."""
    return sum(rate**place for place in range(num_drafts + 1))
