"""A model that is a hash: its next token depends on every token before it, read back from simulated pages, and on its
number in the output, as that of a sampled one does.

An executor of plans that shares no code with the ranks. Each computed token is kept at its (page, offset), once more in
the pages of a window if the twin has one; a recurrent state is the list of all tokens that went into it. A page is
wiped when it is handed out. So a wrong page or state, one that is used twice or too early, or a token that was never
computed fails at once or gives another next token.

What a failed load should have brought is garbage: a row that sees any says a token that no model says.

Plans are executed in order, some when they are sent and some only when their answer is waited for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from raycache.cache.spaces import SpaceSizes
from raycache.errors import RankLostError
from raycache.memory.component import FULL
from raycache.parallel.board import Acks
from raycache.types import FinishReason, SamplingParams, TokenLogprob
from raycache.wire.plan import NO_MASKS, UNKNOWN, Admit, Masks, Row, StepPlan, unknown_drafts
from raycache.wire.results import RowResult, SampledTokens, are_single
from tests.oracle.drafters import KnownTexts
from tests.oracle.twin_host import Content, TwinHost, TwinMover

VOCAB = 13
EOS = 0


def next_token(tokens: Sequence[int], *, position: int, allows: Callable[[int], bool] = lambda token: True) -> int:
    """What the model says after a sequence, as token number `position` of the output: the first that is allowed."""
    first = _number([*tokens, -3, position]) % VOCAB
    return next(token for token in [*range(first, VOCAB), *range(first)] if allows(token))


def logprob(tokens: Sequence[int], token: int, *, num_top: int) -> TokenLogprob:
    """A made-up log-probability of `token` after a sequence, and made-up alternatives."""
    top = tuple((i, -_number([*tokens, -1, i]) / 2**64) for i in range(num_top))
    return TokenLogprob(token, -_number([*tokens, token, -2]) / 2**64, top)


def continuation(
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_len: int,
    allows: Callable[[list[int], int], bool] = lambda output, token: True,
) -> tuple[list[int], FinishReason]:
    """The output of a request that runs alone and without a cache, and why it ends.

    Args:
        allows: (output so far, token) -> whether the request's grammar allows the token.
    """
    tokens = list(prompt)
    most = max_len if sampling.max_tokens is None else min(max_len, len(prompt) + sampling.max_tokens)
    while True:
        output = tokens[len(prompt) :]
        tokens.append(next_token(tokens, position=len(output), allows=partial(allows, output)))
        goes_on = sampling.ignore_eos and not sampling.grammar
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not goes_on):
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) >= most:
            return tokens[len(prompt) :], FinishReason.LENGTH


def prompt_scores(prompt: Sequence[int], *, num_top: int) -> tuple[TokenLogprob | None, ...]:
    """One entry per token of a prompt."""
    return (None, *(logprob(prompt[:i], prompt[i], num_top=num_top) for i in range(1, len(prompt))))


class TwinExecutor:
    """Executes plans on simulated pages.

    Args:
        sizes: of the pools.
        depth: plans that may be in flight.
        mover: of its pages to and from the host, if there is one.
        drafter: of next draft tokens; none are asked for without it.

    Attributes:
        plans: all that were executed.
        is_lost: set it, and the gang is lost at the next collect.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        depth: int = 1,
        mover: TwinMover | None = None,
        drafter: KnownTexts | None = None,
    ) -> None:
        self.depth = depth
        self._drafter = drafter
        self.plans: list[StepPlan] = []
        self.is_lost = False
        self._page_size = sizes.page_size
        self._waiting: deque[tuple[StepPlan, bytes]] = deque()
        self._masks: dict[int, Masks] = {}  # by step
        self._done: deque[list[RowResult]] = deque()
        self._last: dict[int, tuple[Row, RowResult]] = {}  # by slot, of the plan before
        self._windows = {FULL: 0} | {space: window for space, (window, _) in sizes.windows.items()}
        self._counts = {FULL: sizes.num_pages} | {space: count for space, (_, count) in sizes.windows.items()}
        self._num_states = sum(sizes.states.values())
        self._memory: dict[str, dict[int, dict[int, tuple[int, int]]]] = {space: {} for space in self._windows}
        self._tables: dict[int, dict[str, list[int]]] = {}
        self._states: dict[int, list[int]] = {}
        self._garbage: set[tuple[str, int]] = set()
        self._drafts: set[tuple[str, int, int]] = set()  # (space, page, offset) that may be written again
        self._reach: dict[int, int] = {}  # tokens that a slot has had room for
        self._state_space = next(iter(sizes.states), "")
        self.mover = mover or TwinMover(TwinHost())
        self.mover.bind(self._copy)

    def submit(self, plan: StepPlan) -> None:
        assert len(self._waiting) < self.depth, "more plans in flight than may be"
        assert all(self._has_masks(before) for before, _ in self._waiting), "masks come before the next plan"
        # As the wire does it: what the decider changes afterwards does not arrive.
        self._waiting.append((plan, plan.pack()))
        if plan.step % 3 and not self.is_lost:
            self._catch_up()

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        assert plan is self._waiting[-1][0] and not self._has_masks(plan), "masks are those of the last plan"
        assert masks.shape == (plan.first_masks[-1], plan.mask_len)
        self._masks[plan.step] = masks.copy()

    def _has_masks(self, plan: StepPlan) -> bool:
        return not plan.mask_len or plan.step in self._masks

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        if self.is_lost:
            raise RankLostError(1, "pp=0 cp=0 tp=1", plan.step, "killed by the test")
        if not self._done:
            self._catch_up(most=1)
        assert self._waiting.popleft()[0] is plan, "plans are collected in order"
        results = self._done.popleft()
        return SampledTokens([result.tokens[0] for result in results]) if are_single(plan) else results

    def acks(self) -> Acks:
        return self.mover.acks()

    def close(self) -> None:
        self._waiting.clear()
        self._done.clear()

    def _catch_up(self, *, most: int = 1000) -> None:
        for plan, packed in list(self._waiting)[len(self._done) : len(self._done) + most]:
            if not self._has_masks(plan):
                return
            self._done.append(self._execute(StepPlan.unpack(packed)))

    def _execute(self, plan: StepPlan) -> list[RowResult]:
        assert not self.plans or plan.step == self.plans[-1].step + 1, "a step was left out"
        assert all(_may_follow(before, row) for before, row in _followed(plan.rows)), "rows of a slot do not follow"
        for admit in plan.admits:
            self._reach[admit.slot] = 0
        for row in plan.rows:
            num_open = self._last[row.slot][0].num_drafts if row.is_fed else 0
            reach = row.start + num_open + row.num_tokens + row.num_next_drafts
            self._reach[row.slot] = max(self._reach[row.slot], reach)
        plan = replace(plan, rows=[self._fed(row) for row in plan.rows])
        self.plans.append(plan)
        for admit in plan.admits:
            self._tables[admit.slot] = {space: list(admit.pages.get(space, ())) for space in self._windows}
        self.mover.save(plan.saves, is_first=plan.is_saved_first)
        for row in plan.rows:
            for space in self._windows:
                self._append(row, space)
        self._load(plan)
        bad_slots = self._slots_with_garbage(plan)
        for row in plan.rows:
            for space in self._windows:
                self._write(row, space)
        self._check_tables(plan)
        self._carry_states(plan, bad_slots)
        admits = {admit.slot: admit for admit in plan.admits}  # of the first row of a slot
        results = [
            _nonsense(row, plan) if row.slot in bad_slots else self._read(row, plan, admits.pop(row.slot, None), mine)
            for row, mine in zip(plan.rows, self._masks_of(plan), strict=True)
        ]
        for row, result in zip(plan.rows, results, strict=True):
            if row.num_next_drafts:
                is_bad = row.slot in bad_slots
                result.next_drafts = [VOCAB] * row.num_next_drafts if is_bad else self._drafted(row, result)
        sampled = zip(plan.rows, results, strict=True)
        self._last = {row.slot: (row, result) for row, result in sampled if result.tokens}
        return results

    def _masks_of(self, plan: StepPlan) -> list[list[bytes]]:
        """Per row, what it may sample at each of its positions."""
        masks, firsts = self._masks.get(plan.step, NO_MASKS), plan.first_masks
        everything = b"\xff" * 4
        return [
            [mask.tobytes() for mask in masks[first:stop]] or [everything] * (1 + row.num_drafts)
            for row, first, stop in zip(plan.rows, firsts, firsts[1:], strict=False)
        ]

    def _fed(self, row: Row) -> Row:
        """With the token that the plan before sampled, if it is to have that."""
        if not row.is_fed:
            assert min(np.frombuffer(row.tokens, np.int32)) >= 0, "a row has a token that nobody knows"
            return row
        assert row.tokens == UNKNOWN + unknown_drafts(row.num_drafts), "a row that is fed has a token"
        before, result = self._last[row.slot]
        count = self._num_accepted(before, result)
        drafts = result.next_drafts[: row.num_drafts]
        assert len(drafts) == row.num_drafts, "a row that is fed has draft tokens that nobody made"
        return replace(
            row,
            start=row.start + count,
            output_position=row.output_position + count,
            tokens=np.array([result.tokens[count], *drafts], np.int32).tobytes(),
            read_state=(row.read_state, *before.draft_states)[count] if before.draft_states else row.read_state,
        )

    def _num_accepted(self, row: Row, result: RowResult) -> int:
        """Draft tokens of a row that are what was sampled before them."""
        drafts, count = np.frombuffer(row.tokens, np.int32)[row.first_sampled + 1 :].tolist(), 0
        for draft, token in zip(drafts, result.tokens, strict=False):
            is_end = row.stops_at_page and (row.start + 1 + count) % self._page_size == 0
            if draft != token or is_end:
                break
            count += 1
        return count

    def _copy(self, space: str, device: int) -> Content:
        """What a unit holds now."""
        assert (space, device) not in self._garbage, "garbage is saved"
        return list(self._states[device]) if space == self._state_space else dict(self._memory[space][device])

    def _load(self, plan: StepPlan) -> None:
        for unit, content in self.mover.load(plan.loads).items():
            self._garbage.discard((unit.space, unit.device))
            if content is None:
                self._garbage.add((unit.space, unit.device))
                content = []
            if unit.space == self._state_space:
                self._states[unit.device] = [*content]
            else:
                self._memory[unit.space][unit.device] = dict(content)

    def _slots_with_garbage(self, plan: StepPlan) -> set[int]:
        found, written = set(), set()
        for row in plan.rows:
            if self._sees_garbage(row, own=written):
                found.add(row.slot)
            written |= {row.write_state, *row.draft_states}
        return found

    def _sees_garbage(self, row: Row, *, own: set[int]) -> bool:
        """`own`: states that earlier rows write, one of which may be of its slot."""
        pages = set()
        for space, window in self._windows.items():
            first = max(0, row.start - window + 1) // self._page_size if window else 0
            pages |= {(space, page) for page in self._tables[row.slot][space][first:]}
        states = {row.read_state} - own
        return not self._garbage.isdisjoint(pages | {(self._state_space, state) for state in states})

    def _append(self, row: Row, space: str) -> None:
        table, memory = self._tables[row.slot][space], self._memory[space]
        for page in row.new_pages.get(space, ()):
            assert -1 <= page < self._counts[space], f"page {page} is not in the pool"
            assert page >= 0 or self._windows[space], "every page of the sequence is kept"
            memory[page] = {}
            self._garbage.discard((space, page))
            self._drafts = {place for place in self._drafts if place[:2] != (space, page)}
            table.append(page)

    def _write(self, row: Row, space: str) -> None:
        table, memory = self._tables[row.slot][space], self._memory[space]
        assert row.num_tokens >= 1, "a row computes something"
        for position, token in enumerate(np.frombuffer(row.tokens, np.int32).tolist(), start=row.start):
            number = table[position // self._page_size]
            if number < 0:
                continue
            page, place = memory[number], (space, number, position % self._page_size)
            assert place[2] not in page or place in self._drafts, "a token is computed into a place that is taken"
            page[place[2]] = (position, token)
            self._drafts.discard(place)
            if position > row.start + row.first_sampled:
                self._drafts.add(place)

    def _check_tables(self, plan: StepPlan) -> None:
        for slot in {row.slot for row in plan.rows}:
            for space, table in self._tables[slot].items():
                assert len(table) == -(-self._reach[slot] // self._page_size), "pages are handed out when needed"
                if not self._windows[space]:
                    assert len(set(table)) == len(table), "a page is twice in a table"

    def _carry_states(self, plan: StepPlan, bad_slots: set[int]) -> None:
        if not self._num_states:
            assert all(row.read_state == row.write_state == -1 for row in plan.rows)
            return
        written = [(row.write_state, *row.draft_states) for row in plan.rows]
        assert len({slot for slots in written for slot in slots}) == sum(map(len, written)), "a state is written twice"
        for i, row in enumerate(plan.rows):
            assert len(written[i]) == 1 + row.num_drafts, "a state is kept after each draft"
            assert all(0 <= slot < self._num_states for slot in written[i]), "every row leaves its state somewhere"
            earlier = [states for other, states in zip(plan.rows[:i], written, strict=False) if other.slot != row.slot]
            others = {slot for slots in earlier + written[i + 1 :] for slot in slots} | {*row.draft_states}
            assert row.read_state not in others, "a row reads a state that another one writes"
        for row in plan.rows:
            before = self._states[row.read_state] if row.read_state >= 0 else []
            tokens = np.frombuffer(row.tokens, np.int32).tolist()
            for i, slot in enumerate((row.write_state, *row.draft_states)):
                if row.slot in bad_slots:
                    self._garbage.add((self._state_space, slot))
                    self._states[slot] = []
                    continue
                self._garbage.discard((self._state_space, slot))
                assert len(before) == row.start, "the state is that of another position"
                self._states[slot] = before + tokens[: row.first_sampled + 1 + i]

    def _read(self, row: Row, plan: StepPlan, admit: Admit | None, masks: list[bytes]) -> RowResult:
        if admit is not None:
            loaded = {unit.device for moves in plan.loads for unit in moves.units if unit.space == FULL}
            num_cached = len(admit.pages[FULL]) + len(loaded.intersection(row.new_pages.get(FULL, ())))
            assert row.start == num_cached * self._page_size, "computing starts behind the cached prefix"
        tokens = self._see(row, FULL, first=0)
        for space, window in self._windows.items():
            if window:
                first = max(0, row.start - window + 1)
                last = max(first, row.start + row.first_sampled + 1 - window + 1)
                assert self._see(row, space, first=first, stop=row.start) == tokens[first : row.start]
                assert self._see(row, space, first=last) == tokens[last:], "the next query lacks a token"
        if self._num_states:
            for i, slot in enumerate((row.write_state, *row.draft_states)):
                known = tokens[: row.start + row.first_sampled + 1 + i]
                assert self._states[slot] == known, "the state is that of other tokens"
        result = RowResult()
        targets = np.frombuffer(row.targets, np.int32).tolist()
        for i, target in enumerate(targets):
            assert plan.num_top is not None
            result.scores.append(logprob(tokens[: row.start + i + 1], target, num_top=plan.num_top))
        for i in range(1 + row.num_drafts if row.output_position >= 0 else 0):
            known = tokens[: row.start + row.first_sampled + 1 + i]
            bits = np.unpackbits(np.frombuffer(masks[i], np.uint8), bitorder="little").tolist()
            result.tokens.append(next_token(known, position=row.output_position + i, allows=bits.__getitem__))
            if plan.num_top is not None:
                result.logprobs.append(logprob(known, result.tokens[-1], num_top=plan.num_top))
        return result

    def _drafted(self, row: Row, result: RowResult) -> list[int]:
        """The draft tokens of the next row."""
        assert self._drafter is not None, "draft tokens are asked for, but there is no drafter"
        count, most = self._num_accepted(row, result), row.num_next_drafts
        known = self._see(row, FULL, first=0, stop=row.start + row.first_sampled + 1 + count)
        known = np.array([*known, result.tokens[count]], np.int32)
        drafts = np.frombuffer(self._drafter.draft(known.tobytes(), most), np.int32).tolist()
        return [*drafts, *[VOCAB - 1] * most][:most]

    def _see(self, row: Row, space: str, *, first: int, stop: int | None = None) -> list[int]:
        """Tokens of a row as its pages have them."""
        tokens = []
        for position in range(first, row.start + row.num_tokens if stop is None else stop):
            page = self._tables[row.slot][space][position // self._page_size]
            found, token = self._memory[space][page][position % self._page_size]
            assert found == position, "a page holds other positions than it is used for"
            tokens.append(token)
        return tokens


def _nonsense(row: Row, plan: StepPlan) -> RowResult:
    """What a row says that has seen garbage."""
    if row.output_position < 0:
        return RowResult()
    count = 1 + row.num_drafts
    told = [] if plan.num_top is None else [logprob([], VOCAB, num_top=plan.num_top)] * count
    return RowResult([VOCAB] * count, told)


def _number(tokens: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(tokens)).encode(), digest_size=8).digest(), "little")


def _followed(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of a plan that have the same slot, each with the next one."""
    by_slot: dict[int, list[Row]] = {}
    for row in rows:
        by_slot.setdefault(row.slot, []).append(row)
    return [pair for mine in by_slot.values() for pair in itertools.pairwise(mine)]


def _may_follow(before: Row, row: Row) -> bool:
    """Whether a row goes on where another one ended, which sampled nothing."""
    is_cut = before.output_position < 0 and before.num_tokens > 1
    return is_cut and row.start == before.start + before.num_tokens and row.read_state == before.write_state
