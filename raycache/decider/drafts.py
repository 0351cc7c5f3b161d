"""Draft tokens for decoding sequences, verified by the model in one row, and how many are worthwhile.

    row            last token   draft 1   draft 2   draft 3
    sampled        A            B         C         D            one after each input token
    accepted if                 = A       = B       = C          draft 1 accepted, 2 rejected: output A, B

A draft token is accepted if it equals the token sampled at its position. Output is identical to decoding without
drafts: greedy or with temperature, for every seed, with penalties.

The draft length follows from the acceptance rate and from what an additional token costs a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycache.types import PackedTokens

_WEIGHT = 0.1  # of the newest draft token in a request's acceptance rate
_SHARED_WEIGHT = 0.03  # and in the rate over all requests
_FIRST_RATE = 0.7  # assumed at the start
_TRY_EVERY = 16  # tokens between trial drafts where drafts do not pay
_LONGEST_PAUSE = 4  # most tokens between attempts after the drafter found nothing
_FORGET = 0.98  # decay of a step's weight in the cost estimate with each later step
_LEAST_STEPS = 4  # timed steps before costs are known
_TRIAL_STEPS = 4  # with the same draft length for all rows
_TRIAL_EVERY = 64  # steps between trials that refresh the cost estimate
_HOPELESS = 0.1  # acceptance rate below which costs do not matter
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2  # tokens
_REACH = 32768  # tokens searched for a match


class Drafter(Protocol):
    """Drafts tokens on the decider, without the ranks."""

    def draft(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """Return up to `most` next tokens, packed; empty if there is no proposal."""
        ...


class PromptLookup:
    """Proposes what followed an earlier occurrence of the last few tokens. Needs no model; good at quoting."""

    def draft(self, tokens: PackedTokens | bytearray, most: int) -> PackedTokens:
        """Propose what followed the longest earlier occurrence of the last 4 to 2 tokens."""
        for length in range(_LONGEST_MATCH, _SHORTEST_MATCH - 1, -1):
            last = bytes(tokens[-4 * length :])
            begin, end = max(0, len(tokens) - 4 * _REACH), len(tokens) - 4
            # Tokens are four bytes wide: ignore matches that are not aligned to a token.
            while (place := tokens.rfind(last, begin, end)) % 4 and place > 0:
                end = place + len(last) - 1
            if place >= 0 and len(last) == 4 * length:
                follows = bytes(tokens[place + len(last) :][: 4 * most])
                # A match that reaches the end continues with itself, as repetitions do.
                return (follows * -(-4 * most // len(follows)))[: 4 * most]
        return b""


@dataclass(slots=True)
class AcceptanceRate:
    """How often draft tokens are accepted, as a moving average.

    Attributes:
        value: probability that a draft token is accepted, given that those before it were.
        num_idle: tokens since the last draft, or since the drafter last found nothing.
        num_vain: consecutive times that the drafter found nothing.
    """

    value: float = _FIRST_RATE
    num_idle: int = 0
    num_vain: int = 0

    def note(self, num_accepted: int, num_drafts: int, *, weight: float = _WEIGHT) -> None:
        """Update with a verified row."""
        for _ in range(num_accepted):
            self.value += weight * (1 - self.value)
        if num_accepted < num_drafts:
            self.value -= weight * self.value


@dataclass(slots=True)
class DraftState:
    """Draft state of one request.

    Attributes:
        rate: this request's own acceptance rate.
        next_drafts: tokens that the ranks' draft model proposes after the last known one, packed.
        uncounted: accepted draft tokens that the ranks' penalties do not count yet, packed.
        num_in_row: draft tokens in the last planned row.
        num_asked: draft tokens that the ranks are to propose with that row.
        num_drafted, num_accepted: draft tokens verified, and accepted.
    """

    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    next_drafts: PackedTokens = b""
    uncounted: PackedTokens = b""
    num_in_row: int = 0
    num_asked: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def forget_rows(self) -> None:
        """Forget drafts in flight: the next row is the first in a new slot."""
        self.next_drafts = self.uncounted = b""

    def plan(self, num_in_row: int, num_asked: int) -> PackedTokens:
        """Record a planned row; return the tokens that the ranks' penalties must count before it."""
        self.num_in_row, self.num_asked = num_in_row, num_asked
        uncounted, self.uncounted = self.uncounted, b""
        return uncounted


class StepCosts:
    """Estimates decode step time: without drafts linear in rows; with drafts linear in tokens and draft passes.

    Two separate fits, because the second token of a row may cost more than all later ones."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Fit(1), _Fit(2)

    def note(self, seconds: float, num_tokens: int, *, num_rows: int, num_passes: int = 0) -> None:
        """Add the measured time of a step."""
        if num_tokens > num_rows or num_passes:
            self._drafted.note(seconds, num_tokens, num_passes)
        else:
            self._plain.note(seconds, num_rows)

    @property
    def are_known(self) -> bool:
        """Whether enough steps of both kinds were measured."""
        return min(self._plain.num_steps, self._drafted.num_steps) >= _LEAST_STEPS

    def seconds(self, num_rows: int, num_drafts: int, *, num_passes: int = 0) -> float:
        """Estimate the time of a step with `num_drafts` per row; needs `are_known`."""
        if num_drafts:
            return self._drafted.at(num_rows * (1 + num_drafts), num_passes)
        return self._plain.at(num_rows)


class _Fit:
    """Fits seconds to `count` variables by least squares with exponential forgetting; slopes are non-negative."""

    def __init__(self, count: int) -> None:
        self.num_steps = 0
        self._moments = np.zeros((count + 2, count + 2))  # of (1, variables, seconds)
        self._slopes: NDArray[np.float64] | None = None

    def note(self, seconds: float, *numbers: float) -> None:
        values = np.array([1.0, *numbers, seconds])
        self._moments = _FORGET * self._moments + np.outer(values, values)
        self.num_steps, self._slopes = self.num_steps + 1, None

    def at(self, *numbers: float) -> float:
        assert self.num_steps, "no step was measured"
        means = self._moments[0] / self._moments[0, 0]
        if self._slopes is None:
            spread = self._moments / self._moments[0, 0] - np.outer(means, means)
            # Where two variables are collinear any split of the seconds between them predicts the same.
            slopes = np.linalg.pinv(spread[1:-1, 1:-1], rcond=1e-6, hermitian=True) @ spread[1:-1, -1]
            self._slopes = np.maximum(slopes, 0)
        return max(float(means[-1] + (np.array(numbers) - means[1:-1]) @ self._slopes), 1e-9)


@dataclass
class Drafts:
    """Drafting over all steps: its costs, and how many draft tokens are accepted.

    Attributes:
        drafter: None without drafts, or if the ranks run a draft model.
        most: limit of draft tokens per row; 0: no drafts.
        are_from_ranks: whether the ranks return draft tokens with their results.
        is_adaptive: whether fewer tokens are drafted where they do not pay.
        stages: pipeline stages, as many as plans in flight.
        costs: estimated time of decode steps.
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

    @property
    def num_drafted(self) -> int:
        """Draft tokens verified so far."""
        return self.drafted_at.total()

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted so far."""
        return self.accepted_at.total()

    def new_state(self) -> DraftState:
        """State of a new request; starts with the acceptance rate over all requests."""
        return DraftState(AcceptanceRate(self._rate.value))

    def step(self, num_rows: int, *, num_decodes: int) -> DraftStep:
        """Choose draft lengths for a plan of up to `num_rows` rows, the first after `num_decodes` plans of decode rows.

        While costs are unknown, and later at intervals, all rows get the same draft length for some steps, so that
        the cost of each length is measured."""
        if not (self.most and self.is_adaptive):
            return DraftStep(self)
        length = _TRIAL_STEPS * self.stages
        every = _TRIAL_EVERY * self.stages if self.costs.are_known else length
        turn, place = divmod(num_decodes, every)
        trial = turn % (self.most + 1) if place < length else None
        if not self.costs.are_known:
            return DraftStep(self, trial)
        counts = range(self.most + 1)
        seconds = [self.costs.seconds(num_rows, n, num_passes=n if self.are_from_ranks else 0) for n in counts]
        return DraftStep(self, trial, seconds)

    def note(self, state: DraftState, num_accepted: int, num_drafts: int) -> None:
        """Take in how many of a row's draft tokens were accepted."""
        state.num_drafted += num_drafts
        state.num_accepted += num_accepted
        state.rate.note(num_accepted, num_drafts)
        self._rate.note(num_accepted, num_drafts, weight=_SHARED_WEIGHT)
        self.drafted_at.update(range(1, num_drafts + 1))
        self.accepted_at.update(range(1, num_accepted + 1))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Drafts for the rows of one step.

    Attributes:
        trial: draft length of all rows, if the step is to measure its cost.
        seconds: estimated time of the step by draft length; empty while costs are unknown.
    """

    drafts: Drafts
    trial: int | None = None
    seconds: Sequence[float] = ()

    def draft(self, tokens: bytearray, rate: AcceptanceRate, *, most: int) -> PackedTokens:
        """Draft up to `most` next tokens of a decoding sequence; packed, as are `tokens`."""
        count = min(most, self.wanted(rate))
        drafter = self.drafts.drafter
        if drafter is None or count <= 0:
            rate.num_idle += 1
            return b""
        found = drafter.draft(tokens, count)
        rate.num_idle, rate.num_vain = 0, 0 if found else rate.num_vain + 1
        return found

    def ask(self, rate: AcceptanceRate, *, most: int) -> int:
        """Number of tokens, up to `most`, that the ranks should draft after a request's next row."""
        count = max(0, min(most, self.wanted(rate)))
        rate.num_idle = 0 if count else rate.num_idle + 1
        return count

    def wanted(self, rate: AcceptanceRate) -> int:
        """Preferred number of draft tokens for a request's next row."""
        if not self.drafts.most or rate.num_idle < min(rate.num_vain, _LONGEST_PAUSE):
            return 0
        return self._worth(rate) if self.drafts.is_adaptive else self.drafts.most

    def _worth(self, rate: AcceptanceRate) -> int:
        """Number of draft tokens that maximises a row's expected tokens per second."""
        rarely = 1 if rate.num_idle >= _TRY_EVERY else 0
        if not self.seconds:
            return (self.trial or 0) if rate.value > _HOPELESS else rarely
        best = max(range(self.drafts.most + 1), key=lambda count: _expected(rate.value, count) / self.seconds[count])
        if not best:
            return rarely
        return best if self.trial is None else self.trial


def _expected(rate: float, num_drafts: int) -> float:
    """Expected number of tokens from a row with `num_drafts` draft tokens."""
    return sum(rate**place for place in range(num_drafts + 1))
