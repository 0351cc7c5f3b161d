"""A plan as arrays, for one rank: which tokens it computes, where it writes, what it reads.

    plan rows    [ row 0: 5 new tokens ][ row 1: 1 ][ row 2: 1 ]        all tokens, T of them, row after row
    cp rank 0    [ 0 4             ][ row 1: 0 ]                        local tokens, in this order
    cp rank 1    [ 1 2 3           ][ row 2: 0 ]

How tokens travel between cp ranks is in exchange.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.engine.exchange import Exchange
from raycache.engine.plan import StepPlan, emitted, local_positions
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import owned_prefix_len, owned_slots

PageTables = Mapping[str, NDArray[np.int32]]
"""Component space -> page id per page of the sequence; -1 for one that is not kept."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One row, for attention.

    Attributes:
        start: position of its first new token.
        tokens: where its new tokens lie among all T of the step.
        local: where this rank's new tokens of the row lie among its local tokens.
        runs: this rank's new tokens of the row as runs of the chunk, in local order; none for a single token.
        read_state, write_state: slots of recurrent states, see plan.Row.
    """

    start: int
    tokens: range
    local: range
    runs: tuple[range, ...]
    read_state: int
    write_state: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """What this rank's pages hold of a row: its tokens before the chunk; of a single new token, itself too.

    Attributes:
        runs: slots, as (first, count) runs, oldest token first.
        positions: int64 [L], of those tokens in the sequence.
    """

    runs: tuple[tuple[int, int], ...]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of one component space are written and read.

    Attributes:
        owned: int64; those of the T tokens that this rank's cache keeps.
        slots: int64; where they are written.
        prefixes: per row.
    """

    owned: Tensor
    slots: Tensor
    prefixes: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything that a rank's forward pass needs of a plan.

    Attributes:
        ctx: of the rank.
        ids, positions: int64 [T_local].
        num_tokens: T, of all cp ranks.
        rows: of the plan.
        exchange: tokens between cp ranks.
        places: per component space.
        logits: int64 [N]; the local tokens whose logits are used.
    """

    ctx: ParallelContext
    ids: Tensor
    positions: Tensor
    num_tokens: int
    rows: tuple[RowInputs, ...]
    exchange: Exchange
    places: Mapping[str, Places]
    logits: Tensor


def build_inputs(
    plan: StepPlan,
    page_tables: Mapping[int, PageTables],
    *,
    page_size: int,
    windows: Mapping[str, int],
    ctx: ParallelContext,
) -> StepInputs:
    """Lay a plan out for one rank.

    Args:
        plan: the step.
        page_tables: slot -> component space -> page ids, the plan's new pages included.
        page_size: tokens per page.
        windows: component space -> tokens that a query sees, itself included; 0 for all before it.
        ctx: of the rank.
    """
    cp_rank, cp_size = ctx.cp.rank, ctx.cp.size
    locals_ = [local_positions(plan, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    starts = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
    rows, ids, positions, logits = [], [], [], []
    local_start = 0
    for i, row in enumerate(plan.rows):
        mine = locals_[cp_rank][i]
        ids.append(np.frombuffer(row.tokens, np.int32)[mine])
        positions.append(row.start + mine)
        logits.append(local_start + np.flatnonzero(np.isin(mine, emitted(row, mine))))
        rows.append(
            RowInputs(
                start=row.start,
                tokens=range(int(starts[i]), int(starts[i + 1])),
                local=range(local_start, local_start + len(mine)),
                runs=_runs(mine) if row.num_tokens > 1 else (),
                read_state=row.read_state,
                write_state=row.write_state,
            )
        )
        local_start += len(mine)
    tables = [page_tables[row.slot] for row in plan.rows]
    return StepInputs(
        ctx=ctx,
        ids=_on_device(ids, ctx),
        positions=_on_device(positions, ctx),
        num_tokens=int(starts[-1]),
        rows=tuple(rows),
        exchange=Exchange.between(locals_, starts, ctx),
        places={
            space: _places(
                plan, [table[space] for table in tables], starts, page_size=page_size, window=window, ctx=ctx
            )
            for space, window in windows.items()
        },
        logits=_on_device(logits, ctx),
    )


def _places(
    plan: StepPlan,
    tables: Sequence[NDArray[np.int32]],
    starts: NDArray[np.int64],
    *,
    page_size: int,
    window: int,
    ctx: ParallelContext,
) -> Places:
    cp = {"cp_rank": ctx.cp.rank, "cp_size": ctx.cp.size}
    owned, slots, prefixes = [], [], []
    for i, (row, table) in enumerate(zip(plan.rows, tables, strict=True)):
        chunk = np.arange(row.start, row.start + row.num_tokens)
        index, where = owned_slots(chunk, table, page_size=page_size, **cp)
        kept = where >= 0
        owned.append(index[kept] + starts[i])
        slots.append(where[kept])
        # A single new token sees itself and all before it: it is part of what is in the pages, no causal part is left.
        seen = row.start + (row.num_tokens == 1)
        # Pages before the window may be others' by now.
        first = max(0, row.start - window + 1) // page_size if window else 0
        prefixes.append(_prefix(table, seen, first_page=first, page_size=page_size, **cp))
    return Places(owned=_on_device(owned, ctx), slots=_on_device(slots, ctx), prefixes=tuple(prefixes))


def _on_device(parts: Sequence[NDArray[np.generic]], ctx: ParallelContext) -> Tensor:
    joined = np.concatenate(parts) if parts else np.empty(0)
    return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.int64)).to(ctx.device, non_blocking=True)


def _runs(positions: NDArray[np.int64]) -> tuple[range, ...]:
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks))


def _prefix(
    table: NDArray[np.int32], seen: int, *, first_page: int, page_size: int, cp_rank: int, cp_size: int
) -> Prefix:
    """Those of the first `seen` tokens of a sequence that this rank holds, from a page on."""
    share = page_size // cp_size
    count = owned_prefix_len(seen, page_size=page_size, cp_rank=cp_rank, cp_size=cp_size)
    end_page = -(-count // share)
    if end_page <= first_page:
        return Prefix((), np.empty(0, np.int64))
    pages = table[first_page:end_page].astype(np.int64)
    assert pages.min() >= 0, "a page that a query sees is not kept"
    missing = end_page * share - count
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    runs = [(int(part[0]) * share, len(part) * share) for part in np.split(pages, breaks)]
    runs[-1] = (runs[-1][0], runs[-1][1] - missing)
    numbers = np.arange(first_page, end_page)
    positions = (numbers[:, None] * page_size + cp_rank * share + np.arange(share)).ravel()
    return Prefix(tuple(runs), positions[: len(positions) - missing])
