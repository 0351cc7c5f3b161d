"""A model that is a hash: its next token depends on every token before it, read back from simulated pages, and on its
number in the output, as that of a sampled one does.

An executor of plans that shares no code with the ranks. Each computed token is kept at its (page, offset); a page is
wiped when it is handed out. So a wrong page, a page that is used twice or too early, or a token that was never computed
fails at once or gives another next token.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from raycache.engine.plan import Admit, Row, RowResult, StepPlan
from raycache.errors import RankLostError
from raycache.types import FinishReason, SamplingParams, TokenLogprob

VOCAB = 13
EOS = 0


def next_token(tokens: Sequence[int], *, position: int) -> int:
    """What the model says after a sequence, as token number `position` of the output."""
    return _number([*tokens, -3, position]) % VOCAB


def logprob(tokens: Sequence[int], token: int, *, num_top: int) -> TokenLogprob:
    """A made-up log-probability of `token` after a sequence, and made-up alternatives."""
    top = tuple((i, -_number([*tokens, -1, i]) / 2**64) for i in range(num_top))
    return TokenLogprob(token, -_number([*tokens, token, -2]) / 2**64, top)


def continuation(prompt: Sequence[int], sampling: SamplingParams, *, max_len: int) -> tuple[list[int], FinishReason]:
    """The output of a request that runs alone and without a cache, and why it ends."""
    tokens = list(prompt)
    most = max_len if sampling.max_tokens is None else min(max_len, len(prompt) + sampling.max_tokens)
    while True:
        tokens.append(next_token(tokens, position=len(tokens) - len(prompt)))
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not sampling.ignore_eos):
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) >= most:
            return tokens[len(prompt) :], FinishReason.LENGTH


def prompt_scores(prompt: Sequence[int], *, num_top: int) -> tuple[TokenLogprob | None, ...]:
    """One entry per token of a prompt."""
    return (None, *(logprob(prompt[:i], prompt[i], num_top=num_top) for i in range(1, len(prompt))))


class TwinExecutor:
    """Executes plans on simulated pages.

    Args:
        num_pages, page_size: of the pool.
        depth: plans that may be in flight.

    Attributes:
        plans: all that were executed.
        is_lost: set it, and the gang is lost at the next collect.
    """

    def __init__(self, *, num_pages: int, page_size: int, depth: int = 1) -> None:
        self.depth = depth
        self.plans: list[StepPlan] = []
        self.is_lost = False
        self._num_pages, self._page_size = num_pages, page_size
        self._waiting: deque[tuple[StepPlan, bytes]] = deque()
        self._memory: dict[int, dict[int, tuple[int, int]]] = {}
        self._tables: dict[int, list[int]] = {}

    def submit(self, plan: StepPlan) -> None:
        assert len(self._waiting) < self.depth, "more plans in flight than stages"
        # As the wire does it: what the decider changes afterwards does not arrive.
        self._waiting.append((plan, plan.pack()))

    def collect(self, plan: StepPlan) -> list[RowResult]:
        sent, packed = self._waiting.popleft()
        assert sent is plan, "plans are collected in order"
        if self.is_lost:
            raise RankLostError(1, "pp=0 cp=0 tp=1", plan.step, "killed by the test")
        return self._execute(StepPlan.unpack(packed))

    def close(self) -> None:
        self._waiting.clear()

    def _execute(self, plan: StepPlan) -> list[RowResult]:
        assert not self.plans or plan.step == self.plans[-1].step + 1, "a step was left out"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows of one slot in a plan"
        self.plans.append(plan)
        for admit in plan.admits:
            self._tables[admit.slot] = list(admit.pages)
        for row in plan.rows:
            self._write(row)
        samplings = {admit.slot: admit for admit in plan.admits}
        return [self._read(row, plan, samplings.get(row.slot)) for row in plan.rows]

    def _write(self, row: Row) -> None:
        table = self._tables[row.slot]
        for page in row.new_pages:
            assert 0 <= page < self._num_pages, f"page {page} is not in the pool"
            self._memory[page] = {}
            table.append(page)
        assert len(set(table)) == len(table), "a page is twice in a table"
        assert row.num_tokens >= 1, "a row computes something"
        for position, token in enumerate(np.frombuffer(row.tokens, np.int32).tolist(), start=row.start):
            page = self._memory[table[position // self._page_size]]
            assert position % self._page_size not in page, "a token is computed into a place that is taken"
            page[position % self._page_size] = (position, token)
        assert len(table) == -(-(row.start + row.num_tokens) // self._page_size), "pages are handed out when needed"

    def _read(self, row: Row, plan: StepPlan, admit: Admit | None) -> RowResult:
        if admit is not None:
            assert row.start == len(admit.pages) * self._page_size, "computing starts behind the cached prefix"
        tokens = []
        for position in range(row.start + row.num_tokens):
            found, token = self._memory[self._tables[row.slot][position // self._page_size]][position % self._page_size]
            assert found == position, "a page holds other positions than it is used for"
            tokens.append(token)
        result = RowResult()
        targets = np.frombuffer(row.targets, np.int32).tolist()
        for i, target in enumerate(targets):
            assert plan.num_top is not None
            result.scores.append(logprob(tokens[: row.start + i + 1], target, num_top=plan.num_top))
        if row.output_position >= 0:
            result.token = next_token(tokens, position=row.output_position)
            if plan.num_top is not None:
                result.logprob = logprob(tokens, result.token, num_top=plan.num_top)
        return result


def _number(tokens: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest(), "little")
