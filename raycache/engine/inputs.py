"""A plan as arrays, for one rank: which tokens it computes, where it writes, what it reads.

    plan rows    [ row 0: 5 new tokens ][ row 1: 1 ][ row 2: 1 ]        all tokens, T of them, row after row
    cp rank 0    [ 0 4             ][ row 1: 0 ]                        local tokens, in this order
    cp rank 1    [ 1 2 3           ][ row 2: 0 ]

Local tokens of all cp ranks are padded to one length to travel; `gather` says where each of the T tokens then is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.engine.plan import StepPlan, emitted, local_positions
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import owned_prefix_len, owned_slots


@dataclass(frozen=True, slots=True)
class RowInputs:
    """One row, for attention.

    Attributes:
        tokens: where its new tokens lie among all T of the step.
        local: where this rank's new tokens of the row lie among its local tokens.
        runs: this rank's new tokens of the row as runs of the chunk, in local order.
        prefix: this rank's slots that all new tokens of the row may see, as (first, count) runs.
    """

    tokens: range
    local: range
    runs: tuple[range, ...]
    prefix: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything that a rank's forward pass needs of a plan.

    Attributes:
        ctx: of the rank.
        ids, positions: int64 [T_local].
        num_tokens: T, of all cp ranks.
        rows: of the plan.
        padded_len: longest T_local of the cp ranks.
        gather: int64 [T]; place of each token among cp * padded_len gathered ones.
        scatter: int64 [cp * padded_len]; its inverse, padding points at token 0.
        owned: int64; those of the T tokens that this rank's cache holds.
        slots: int64; where they are written.
        logits: int64 [N]; the local tokens whose logits are used.
    """

    ctx: ParallelContext
    ids: Tensor
    positions: Tensor
    num_tokens: int
    rows: tuple[RowInputs, ...]
    padded_len: int
    gather: Tensor
    scatter: Tensor
    owned: Tensor
    slots: Tensor
    logits: Tensor


def build_inputs(
    plan: StepPlan, page_tables: Mapping[int, NDArray[np.int32]], *, page_size: int, ctx: ParallelContext
) -> StepInputs:
    """Lay a plan out for one rank.

    Args:
        plan: the step.
        page_tables: slot -> page ids, the plan's new pages included.
        page_size: tokens per page.
        ctx: of the rank.
    """
    cp_rank, cp_size = ctx.cp.rank, ctx.cp.size
    locals_ = [local_positions(plan, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    starts = np.cumsum([0, *(row.num_tokens for row in plan.rows)])
    rows, owned, slots, ids, positions, logits = [], [], [], [], [], []
    local_start = 0
    for i, row in enumerate(plan.rows):
        table, mine = page_tables[row.slot], locals_[cp_rank][i]
        chunk = np.arange(row.start, row.start + row.num_tokens)
        index, where = owned_slots(chunk, table, page_size=page_size, cp_rank=cp_rank, cp_size=cp_size)
        owned.append(index + starts[i])
        slots.append(where)
        ids.append(np.frombuffer(row.tokens, np.int32)[mine])
        positions.append(chunk[mine])
        logits.append(local_start + np.flatnonzero(np.isin(mine, emitted(row, mine))))
        # A single new token sees itself and all before it: it is part of what is in the pages, no causal part is left.
        seen = row.start + (row.num_tokens == 1)
        count = owned_prefix_len(seen, page_size=page_size, cp_rank=cp_rank, cp_size=cp_size)
        rows.append(
            RowInputs(
                tokens=range(int(starts[i]), int(starts[i + 1])),
                local=range(local_start, local_start + len(mine)),
                runs=_runs(mine) if row.num_tokens > 1 else (),
                prefix=_slot_runs(table, count, share=page_size // cp_size),
            )
        )
        local_start += len(mine)
    padded_len = max(sum(map(len, each)) for each in locals_)
    gather, scatter = _exchange(locals_, starts, padded_len=padded_len)

    def on_device(parts: Sequence[NDArray[np.generic]] | NDArray[np.int64]) -> Tensor:
        joined = np.concatenate(parts) if isinstance(parts, list) else parts
        return torch.from_numpy(np.ascontiguousarray(joined, dtype=np.int64)).to(ctx.device, non_blocking=True)

    return StepInputs(
        ctx=ctx,
        ids=on_device(ids),
        positions=on_device(positions),
        num_tokens=int(starts[-1]),
        rows=tuple(rows),
        padded_len=padded_len,
        gather=on_device(gather),
        scatter=on_device(scatter),
        owned=on_device(owned),
        slots=on_device(slots),
        logits=on_device(logits),
    )


def _runs(positions: NDArray[np.int64]) -> tuple[range, ...]:
    if not len(positions):
        return ()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks))


def _slot_runs(table: NDArray[np.int32], count: int, *, share: int) -> tuple[tuple[int, int], ...]:
    """The first `count` rows of a sequence, `share` per page, as runs of consecutive slots."""
    pages = table[: -(-count // share)].astype(np.int64)
    if not len(pages):
        return ()
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    runs = [(int(part[0]) * share, len(part) * share) for part in np.split(pages, breaks)]
    first, length = runs[-1]
    runs[-1] = (first, length - (len(pages) * share - count))
    return tuple(runs)


def _exchange(
    locals_: Sequence[Sequence[NDArray[np.int64]]], starts: NDArray[np.int64], *, padded_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    scatter = np.zeros(len(locals_) * padded_len, np.int64)
    gather = np.zeros(int(starts[-1]), np.int64)
    for rank, rows in enumerate(locals_):
        tokens = np.concatenate([mine + starts[i] for i, mine in enumerate(rows)])
        places = rank * padded_len + np.arange(len(tokens))
        scatter[places] = tokens
        gather[tokens] = places
    return gather, scatter
