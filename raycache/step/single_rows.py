"""Steps computed as rows of one token each: decode steps, and the tokens that check drafts.

Each token is written to the cache before attention and attends only up to itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raycache.wire.plan import Row, StepPlan
from raycache.wire.results import emissions


def in_single_rows(plan: StepPlan) -> StepPlan:
    """Split rows into rows of one token; only for models without recurrent states, or if no row has more."""
    if all(row.num_tokens == 1 for row in plan.rows):
        return plan
    rows: list[Row] = []
    for row in plan.rows:
        if row.num_tokens == 1:
            rows.append(row)
            continue
        tokens = (row.tokens[4 * i : 4 * i + 4] for i in range(row.num_tokens))
        rows += [
            Row(row.slot, row.start + i, own, output_position=row.output_position, is_fed=row.is_fed)
            for i, own in enumerate(tokens)
        ]
    return replace(plan, rows=rows)


def is_decode(plan: StepPlan, *, has_states: bool) -> bool:
    """Whether every row emits its one token, with drafts behind it unless the model has recurrent states."""
    return all(
        row.output_position >= 0 or row.targets
        if row.num_tokens == 1
        else row.first_sampled == 0 and row.num_drafts > 0 and not row.targets and not has_states
        for row in plan.rows
    )


def emitted_tokens(plan: StepPlan, *, cp_rank: int, cp_size: int) -> NDArray[np.int64]:
    """Indices among all tokens of a step of those whose logits a cp rank needs, in the order of its result."""
    starts = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
    found = [starts[i] + np.array(positions) for i, positions in emissions(plan, cp_size=cp_size)[cp_rank]]
    return np.concatenate([np.empty(0, np.int64), *found])
