"""Runs steps before a rank is ready, so that no request waits for a compiler.

FlashInfer compiles a kernel per kind of attention, Triton also per size and alignment of arguments. Which of these
a step needs follows from its rows, so the steps below have all kinds of rows that a deployment can meet:

    prompts     of every power of two of tokens, and one more, up to the largest step, and of one and two tokens per cp
                rank; new, and behind a cached page
    contexts    few tokens, many tokens and a single one behind every power of two of cached tokens, up to the longest;
                under cp a long chunk, whose queries go by copy engines
    batches     of single tokens, up to the largest batch; of prompts; of both
    drafts      rows with every number of draft tokens, and draft tokens for the next row
    samplers    every filter and penalty, masks, log-probabilities, scored prompts
    graphs      every recorded batch size; and of all these the short ones again, in recorded pieces
    short       every number of tokens for which steps are recorded as a whole

Steps that are not recorded skip layers that launch the same kernels as earlier ones.

All rows use the first page, read the first state and write the second, which are cleared before each step: results are
meaningless but finite. No row reads what another one writes, so all rows of a step run at once (attention/states.py).
Page moves warm up by themselves (memory/cuda_carrier.py).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raycache.deployment.deployment import Deployment
from raycache.deployment.memory_use import refusing_out_of_memory
from raycache.memory.component import STATE
from raycache.memory.device import DevicePool
from raycache.models.base import for_warm_up
from raycache.rank.compilations import Compilations
from raycache.rank.peak import Largest
from raycache.rank.pieces import LONGEST
from raycache.rank.rank import Rank
from raycache.rank.short_steps import short_sizes
from raycache.types import MAX_TOP_LOGPROBS, PackedTokens, SamplingParams
from raycache.wire.plan import UNKNOWN, Admit, Row, StepPlan

_log = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)
_SAMPLERS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=20),
    "top_p": SamplingParams(top_p=0.9),
    "min_p": SamplingParams(min_p=0.1),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=2**31 - 1, stop_token_ids=(0,)),
}
_FEW, _SOME, _MANY = 24, 160, 320
"""Tokens of chunks on either side of all lengths at which backends change kernels."""


@dataclass(frozen=True)
class WarmUpStep:
    """A step to run.

    Attributes:
        kind: such as "prompts".
    """

    kind: str
    plan: StepPlan


def warm_up(rank: Rank, deployment: Deployment, *, batch_sizes: Sequence[int]) -> None:
    """Run all steps on a rank whose pool is still empty. Collective over all ranks of a gang; does nothing on a CPU.

    Args:
        batch_sizes: of decode steps that ranks record where they can, in rows; none without graphs.
    Raises:
        ConfigError: a step does not fit into GPU memory.
    """
    if rank.ctx.device.type != "cuda":
        return
    start_s = time.monotonic()
    # A rank of its own, whose page tables do not stay as wide as the longest sequence.
    eager = replace(
        shortened(rank),
        graphs=None,
        short_steps=None,
        pieces=None,
        drafter=None if rank.drafter is None else replace(rank.drafter, graphs=None),
        _slots={},
    )
    steps = [(eager, step) for step in eager_steps(deployment)]
    if batch_sizes:
        # Other stages may have recorded other steps; all run the same ones.
        pieces, most = rank.pieces and rank.pieces.for_warm_up(), min(deployment.max_step_tokens, LONGEST)
        short = replace(eager, pieces=pieces, _slots={})
        steps += [(short, step) for _, step in steps if sum(row.num_tokens for row in step.plan.rows) <= most]
        whole = replace(rank, _slots={})
        steps += [(whole, step) for step in recorded_steps(deployment, sizes=batch_sizes)]
    with Compilations() as found:
        for one, step in steps:
            _run(one, step)
            one.settle()
    _clear(rank.pool)
    _log.info("warmed up with %d steps in %.1f s: %s", len(steps), time.monotonic() - start_s, found)


def shortened(rank: Rank) -> Rank:
    """The rank without layers that launch the same kernels as earlier ones. Collective over the ranks of a stage."""
    decode_model = None if rank.decode_model is None else for_warm_up(rank.decode_model, rank.ctx)
    return replace(rank, model=for_warm_up(rank.model, rank.ctx), decode_model=decode_model)


def _run(rank: Rank, step: WarmUpStep) -> None:
    _clear(rank.pool)
    with refusing_out_of_memory(rank.ctx.device, doing=f"warming up with {step.kind}"):
        rank.execute(step.plan, step.plan.masks_allowing_all())


def _clear(pool: DevicePool) -> None:
    for name in pool.components:
        for rows in pool.rows(name).values():
            rows[:, :2].view(torch.uint8).zero_()


def eager_steps(deployment: Deployment) -> Iterator[WarmUpStep]:
    """Steps that run kernel by kernel."""
    make = _Maker(Largest.of(deployment), deployment)
    for kind, plans in (
        ("prompts", make.prompts()),
        ("contexts", make.contexts()),
        ("batches", make.batches()),
        ("drafts", make.drafts()),
        ("samplers", make.samplers()),
    ):
        yield from (WarmUpStep(kind, plan) for plan in plans if plan.rows)


def recorded_steps(deployment: Deployment, *, sizes: Sequence[int]) -> Iterator[WarmUpStep]:
    """Decode steps of recorded batch sizes, in rows, and short steps of recorded numbers of tokens."""
    make = _Maker(Largest.of(deployment), deployment)
    for kind, plans in (("graphs", make.replays(sizes)), ("short", make.short())):
        yield from (WarmUpStep(kind, plan) for plan in plans)


@dataclass(frozen=True)
class _Maker:
    """Makes plans within the limits of a deployment."""

    largest: Largest
    deployment: Deployment

    def prompts(self) -> Iterator[StepPlan]:
        """One new prompt of each length; then the same behind a cached page; then some whose end is not reached."""
        most = min(self.largest.tokens, self.largest.longest)
        powers, cp = [2**i for i in range(most.bit_length())], self.deployment.config.split.cp
        for length in sorted({*powers, *(power + 1 for power in powers[1:]), cp, 2 * cp, most}):
            yield self._plan([self._row(0, 0, length)])
        for length in powers:
            yield self._plan([self._row(0, self.largest.page_size, length)])
        for length in (_FEW, _MANY):
            yield self._plan([self._row(0, 0, length, output_position=-1)])

    def contexts(self) -> Iterator[StepPlan]:
        """Chunks and single tokens that end with a power of two of tokens, or with the longest sequence; under cp also
        a long chunk behind twice as many tokens, whose queries are passed."""
        longest = self.largest.longest
        if self.deployment.config.split.cp > 1 and (count := min(self.largest.tokens, longest // 3)):
            yield self._plan([self._row(0, 2 * count, count)])
        for end in sorted({2**i for i in range(6, longest.bit_length())} | {longest}):
            for count in (1, _FEW, _MANY):
                if count < end:
                    yield self._plan([self._row(0, end - count, count)])

    def batches(self) -> Iterator[StepPlan]:
        """Rows of one kind, and of several."""
        largest, start = self.largest, self.largest.page_size + 1
        most = min(largest.rows, largest.tokens)
        for count in sorted({n for i in range(most.bit_length()) for n in (2**i, 2**i + 1) if n <= most} | {most}):
            yield self._plan([self._row(slot, start, 1) for slot in range(count)])
        kinds = [(start, 1), (start, _FEW), (start, _SOME), (start, _MANY), (0, 1), (0, _FEW), (0, _SOME), (0, _MANY)]
        for some in (kinds[:2], kinds[:4:3], kinds[1:4:2], kinds[4:], kinds):
            yield self._plan([self._row(slot, *kind) for slot, kind in enumerate(some)])

    def drafts(self) -> Iterator[StepPlan]:
        """Rows that check draft tokens."""
        for count in range(1, self.largest.drafts + 1):
            for rows in sorted({1, 2, self.largest.rows}):
                yield self._plan([self._checking(slot, count) for slot in range(rows)])
            yield self._plan([self._checking(0, count), self._row(1, 0, _FEW), self._row(2, 0, _MANY)])

    def samplers(self) -> Iterator[StepPlan]:
        """Rows that sample in each way, alone and together; masked and scored ones."""
        start = self.largest.page_size + 1
        for sampling in _SAMPLERS.values():
            yield self._plan([self._row(0, start, 1)], [sampling])
        every = list(_SAMPLERS.values())
        yield self._plan([self._row(slot, start, 1) for slot in range(len(every))], every)
        few = 2 * self.deployment.config.split.cp  # logits of two tokens per cp rank
        for num_top in (0, MAX_TOP_LOGPROBS):
            rows = [self._row(0, start, 1, is_masked=True), self._row(1, 0, _FEW, targets=self._ids(_FEW - 1))]
            yield replace(self._plan(rows), num_top=num_top)
            yield replace(self._plan([self._row(0, 0, few, targets=self._ids(few - 1))]), num_top=num_top)
        if self.deployment.plans_ahead:
            fed = self._row(0, start, 1)
            yield self._plan([replace(fed, tokens=UNKNOWN, is_fed=True)])

    def replays(self, sizes: Sequence[int]) -> Iterator[StepPlan]:
        """A decode step for each batch size; larger ones than there are sequences consist of rows with drafts."""
        start, has_states = self.largest.page_size + 1, self._has_states
        for size in sizes:
            rows = min(size, self.largest.rows)
            each = [size // rows - 1 + (slot < size % rows) for slot in range(rows)]
            if max(each) > self.largest.drafts or (has_states and max(each)):
                continue
            yield self._plan(
                [self._checking(slot, count) if count else self._row(slot, start, 1) for slot, count in enumerate(each)]
            )

    def short(self) -> Iterator[StepPlan]:
        """A chunk behind a cached page, of each number of tokens that is recorded."""
        for size in short_sizes(self.largest.tokens):
            yield self._plan([self._row(0, self.largest.page_size, size)])

    @property
    def _has_states(self) -> bool:
        return any(part.space == STATE for part in self.deployment.components)

    def _checking(self, slot: int, num_drafts: int) -> Row:
        row = self._row(slot, self.largest.page_size + 1, 1 + num_drafts)
        return replace(row, num_drafts=num_drafts, draft_states=(1,) * num_drafts * self._has_states)

    def _row(
        self,
        slot: int,
        start: int,
        count: int,
        *,
        output_position: int = 0,
        targets: PackedTokens = b"",
        is_masked: bool = False,
    ) -> Row:
        config = self.deployment.config
        # There must be pages for the next drafts.
        has_next = config.has_draft_model and output_position == 0
        has_next = has_next and start + count + 2 * config.most_drafts < self.largest.longest
        return Row(
            slot,
            start,
            self._ids(count),
            output_position=output_position,
            targets=targets,
            read_state=0 if start else -1,
            write_state=1,
            num_next_drafts=config.most_drafts * has_next,
            next_token=-1 if output_position == 0 else 0,
            is_masked=is_masked,
        )

    def _ids(self, count: int) -> PackedTokens:
        return (np.arange(count, dtype=np.int32) % self.largest.vocab_size).tobytes()

    def _plan(self, rows: Sequence[Row], sampling: Sequence[SamplingParams] = ()) -> StepPlan:
        """A plan of as many of these rows as fit into a step, shortened to the longest sequence."""
        largest, taken, left = self.largest, list[Row](), self.largest.tokens
        for row in rows[: largest.rows]:
            count = min(row.num_tokens, largest.longest - row.start)
            if count < 1 or count > left or (row.num_drafts and count < row.num_tokens):
                continue
            left -= count
            taken.append(row if count == row.num_tokens else replace(row, tokens=self._ids(count), targets=b""))
        each = [*sampling, *itertools.repeat(_GREEDY, len(rows))]
        admits = [
            Admit(row.slot, self._pages(row), each[row.slot], seed=0, prompt=self._ids(4), output=self._ids(2))
            for row in taken
        ]
        mask_len = 4 * -(-largest.vocab_size // 32) if any(row.is_masked for row in taken) else 0
        return StepPlan(1, rows=taken, admits=admits, mask_len=mask_len)

    def _pages(self, row: Row) -> dict[str, list[int]]:
        end = row.start + row.num_tokens + 2 * row.num_next_drafts + 1
        count = -(-min(end, self.largest.longest) // self.largest.page_size)
        return {space: [0] * count for space in self.largest.spaces}
