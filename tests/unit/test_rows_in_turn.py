"""Rows of one sequence that follow each other in a step, against the same rows in steps of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raycache.attention.states import turns
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.rank import Rank
from raycache.step.inputs import RowInputs, StepInputs, build_inputs
from raycache.wire.plan import Row, StepPlan
from raycache.wire.results import emissions
from tests.oracle.gang import on_gang
from tests.oracle.recorded import new_rank
from tests.unit.test_pieces import script, tiny

__all__ = ["tiny"]  # a fixture


def apart(plan: StepPlan) -> Iterator[StepPlan]:
    """The first rows of all sequences, then the second ones in a plan of their own, and so on."""
    firsts = {row.slot: i for i, row in reversed(list(enumerate(plan.rows)))}
    yield replace(plan, rows=[plan.rows[i] for i in sorted(firsts.values())])
    if behind := [row for i, row in enumerate(plan.rows) if i != firsts[row.slot]]:
        yield from apart(replace(plan, rows=behind, admits=[]))


def logits(rank: Rank, plans: Sequence[StepPlan]) -> dict[tuple[int, int], Tensor]:
    """(slot, position) -> logits [V], of what this cp rank computes."""
    lines: dict[tuple[int, int], Tensor] = {}
    for plan in plans:
        found = rank.forward(plan)
        assert found is not None
        places = [
            (plan.rows[i].slot, plan.rows[i].start + position)
            for i, positions in emissions(plan, cp_size=rank.ctx.cp.size)[rank.ctx.cp.rank]
            for position in positions
        ]
        lines |= zip(places, found.clone(), strict=True)
    return lines


def inputs_of(rows: Sequence[RowInputs], *, is_decode: bool) -> StepInputs:
    ctx = ParallelContext.single(torch.device("cpu"))
    empty = build_inputs(StepPlan(0, [Row(0, 0, bytes(4))]), {0: {}}, page_size=8, windows={}, ctx=ctx)
    return replace(empty, rows=tuple(rows), is_decode=is_decode)


@pytest.mark.parametrize("split", [Split(), Split(tp=2), Split(cp=2)], ids=str)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "falcon_h1", "kimi_linear"])
def test_a_row_goes_on_where_another_of_its_step_ends(tiny: Callable[[str], Path], family: str, split: Split) -> None:
    def work(ctx: ParallelContext) -> tuple[dict[tuple[int, int], Tensor], ...]:
        together, one_by_one = new_rank(tiny(family), ctx), new_rank(tiny(family), ctx)
        plans = script(together)[:16]
        parts = [part for plan in plans for part in apart(plan)]
        assert len(parts) == len(plans) + 3
        return logits(together, plans), logits(one_by_one, parts)

    tiny(family)
    # With cp, another rank may compute a token.
    found, wanted = (
        {place: line for of_rank in side for place, line in of_rank.items()}
        for side in zip(*on_gang(split, work), strict=True)
    )
    assert found.keys() == wanted.keys()
    for place, line in wanted.items():
        torch.testing.assert_close(found[place], line, rtol=0, atol=2e-4)


def test_turns_are_as_few_as_possible() -> None:
    def row(read: int, write: int, *drafts: int) -> RowInputs:
        return RowInputs(0, range(0), range(0), (), read, write, drafts)

    rows = (row(-1, 1), row(9, 9), row(1, 2), row(-1, 5, 6), row(2, 3), row(7, 8), row(-1, -1), row(-1, -1))
    assert turns(inputs_of(rows, is_decode=False)) == [[0, 1, 3, 5, 6, 7], [2], [4]]
    assert turns(inputs_of((row(0, 0), row(0, 0)), is_decode=True)) == [[0, 1]]
