"""What ranks return for a plan: lines of int64, from each cp rank those of the tokens that it samples or scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import overload

import numpy as np
from numpy.typing import NDArray

from raycache.parallel.sharding import split_span
from raycache.types import TokenLogprob
from raycache.wire.plan import Rows, StepPlan

_ONLY = range(1)  # the only position of a row of one token


def emissions(plan: StepPlan, *, cp_size: int) -> list[list[tuple[int, range]]]:
    """Contents of each cp rank's result: (row, positions in the row), in order.

    A row may occur several times; its positions ascend.
    """
    found: list[list[tuple[int, range]]] = [[] for _ in range(cp_size)]
    for i, row in enumerate(plan.rows):
        if len(row.tokens) == 4:  # most rows of most steps
            if row.output_position >= 0 or row.targets:
                found[i % cp_size].append((i, _ONLY))
            continue
        for span in (row.scored, row.sampled):
            for rank, positions in split_span(span, row.num_tokens, cp_size, turn=i):
                found[rank].append((i, positions))
    return found


def drafting_rows(plan: StepPlan, *, cp_size: int) -> list[list[int]]:
    """Rows for which each cp rank drafts next tokens, those with the most draft tokens first."""
    rows = sorted(
        (i for i, row in enumerate(plan.rows) if row.num_next_drafts), key=lambda i: -plan.rows[i].num_next_drafts
    )
    return [rows[rank::cp_size] for rank in range(cp_size)]


def are_single(plan: StepPlan) -> bool:
    """Whether the answer to a plan is one token per row, and nothing else: a row's only token comes back from the cp
    rank of its index, modulo their number."""
    rows = plan.rows.others.values() if isinstance(plan.rows, Rows) else plan.rows
    return plan.num_top is None and all(
        len(row.tokens) == 4 and row.output_position >= 0 and not row.targets and not row.num_next_drafts
        for row in rows
    )


def result_lens(plan: StepPlan, *, cp_size: int) -> list[int]:
    """Number of lines of each cp rank's result: one per emitted position, then one per next draft token."""
    if are_single(plan):
        return [len(range(rank, len(plan.rows), cp_size)) for rank in range(cp_size)]
    emitted_counts = [sum(len(positions) for _, positions in places) for places in emissions(plan, cp_size=cp_size)]
    draft_counts = [sum(plan.rows[i].num_next_drafts for i in rows) for rows in drafting_rows(plan, cp_size=cp_size)]
    return [sum(counts) for counts in zip(emitted_counts, draft_counts, strict=True)]


def result_width(plan: StepPlan) -> int:
    """int64 numbers per line: token, then log-probability, top ids and top log-probabilities if wanted."""
    return 1 if plan.num_top is None else 2 + 2 * plan.num_top


@dataclass(slots=True)
class RowResult:
    """Result of a row.

    Attributes:
        tokens: tokens sampled after the last known token and after each draft token; empty if none was requested.
        logprobs: their log-probabilities, if requested.
        scores: log-probabilities of the targets, in their order.
        next_drafts: tokens drafted by the ranks' draft model after the last accepted token.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    next_drafts: list[int] = field(default_factory=list)

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)


class SampledTokens(Sequence[RowResult]):
    """Results of rows that each sampled one token, and returned nothing else."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> RowResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowResult]: ...
    def __getitem__(self, index: int | slice) -> RowResult | list[RowResult]:
        if isinstance(index, slice):
            return [RowResult([token]) for token in self.tokens[index]]
        return RowResult([self.tokens[index]])


def sampled_tokens(results: Sequence[RowResult]) -> list[int]:
    """The last token of each row's result, -1 where it has none."""
    if isinstance(results, SampledTokens):
        return results.tokens
    return [result.tokens[-1] if result.tokens else -1 for result in results]


def read_results(plan: StepPlan, by_cp_rank: Sequence[NDArray[np.int64]]) -> Sequence[RowResult]:
    """Merge the cp ranks' results into one per row.

    Args:
        plan: the executed plan.
        by_cp_rank: arrays [result_len, result_width].
    """
    if are_single(plan):
        tokens = np.empty(len(plan.rows), np.int64)
        for rank, part in enumerate(by_cp_rank):
            tokens[rank :: len(by_cp_rank)] = part[:, 0]
        return SampledTokens(tokens.tolist())
    results = [RowResult() for _ in plan.rows]
    scores: dict[int, dict[int, TokenLogprob]] = {}
    behind_drafts: dict[int, list[tuple[int, int, TokenLogprob | None]]] = {}  # position, token, log-probability
    cp_size = len(by_cp_rank)
    by_rank = zip(by_cp_rank, emissions(plan, cp_size=cp_size), drafting_rows(plan, cp_size=cp_size), strict=True)
    for lines_of_rank, places, drafted in by_rank:
        lines = iter(_read_lines(lines_of_rank, num_top=plan.num_top))
        for i, positions in places:
            row = plan.rows[i]
            for position in positions:
                token, entry = next(lines)
                if position < row.num_targets:
                    assert entry is not None, "a plan with scored rows must request log-probabilities"
                    scores.setdefault(i, {})[position] = entry
                elif row.num_drafts:
                    behind_drafts.setdefault(i, []).append((position, token, entry))
                else:
                    results[i].add(token, entry)
        for i in drafted:
            results[i].next_drafts = [next(lines)[0] for _ in range(plan.rows[i].num_next_drafts)]
    for i, found in scores.items():
        results[i].scores = [found[position] for position in sorted(found)]
    for i, sampled in behind_drafts.items():
        for _, token, entry in sorted(sampled, key=lambda each: each[0]):
            results[i].add(token, entry)
    return results


def _read_lines(lines: NDArray[np.int64], *, num_top: int | None) -> Iterable[tuple[int, TokenLogprob | None]]:
    """Token and log-probability of each line of a rank's result, [result_len, result_width]."""
    if num_top is None:
        return zip(lines[:, 0].tolist(), repeat(None))
    return (_read_line(line, num_top=num_top) for line in lines)


def _read_line(line: NDArray[np.int64], *, num_top: int) -> tuple[int, TokenLogprob]:
    token, values = int(line[0]), line.view(np.float64)
    top = zip(line[2 : 2 + num_top].tolist(), values[2 + num_top :].tolist(), strict=True)
    return token, TokenLogprob(token, float(values[1]), tuple(top))
