"""A decode batch whose inputs stay at fixed device addresses, as CUDA graphs require.

    rows of the plan    [ row 0 ] ... [ row n - 1 ]                     one new token each
    rows of the batch   [ row 0 ] ... [ row n - 1 ][ padding ] ...      `size` of them

Padding rows read and write the pool's scratch unit. All inputs are copied to the device at once.

Shapes in this file: B rows of the batch, n of the plan, L that this rank computes: B / cp, or all with weights split
over cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from raycache.memory.device import DevicePool
from raycache.parallel.context import ParallelContext
from raycache.step.exchange import HeadExchange, TokenExchange
from raycache.step.inputs import Pages, Places, RowInputs, StepInputs
from raycache.step.page_tables import PageTables
from raycache.wire.plan import StepPlan

_IDS, _POSITIONS, _SLOTS, _READS, _WRITES = "ids", "positions", "slots", "read states", "write states"


class DecodeBatch:
    """Inputs of batches of one size.

    Args:
        size: B, a multiple of cp.
        pool: must have scratch units.
        has_all_tokens: see `build_inputs`.
    Attributes:
        inputs: of the last `fill`; initially all rows are padding.
        slots: int64 [L]; slot of each of this rank's tokens, 0 for padding.
        num_local: number of rows of the plan whose tokens this rank computes.
    """

    def __init__(self, size: int, pool: DevicePool, ctx: ParallelContext, *, has_all_tokens: bool = False) -> None:
        self._size, self._pool, self._ctx, self._has_all_tokens = size, pool, ctx, has_all_tokens
        self._mine = np.arange(size) if has_all_tokens else np.arange(ctx.cp.rank, size, ctx.cp.size)
        lengths = dict.fromkeys((_IDS, _POSITIONS, _SLOTS), len(self._mine))
        lengths |= dict.fromkeys((_READS, _WRITES, *pool.windows), size)
        self._host = torch.zeros(sum(lengths.values()), dtype=torch.int64, pin_memory=ctx.device.type == "cuda")
        self._device = self._host.to(ctx.device)
        at_host = self._host.split(list(lengths.values()))
        self._columns = {name: part.numpy() for name, part in zip(lengths, at_host, strict=True)}
        self._tensors = dict(zip(lengths, self._device.split(list(lengths.values())), strict=True))
        self.slots = self._tensors[_SLOTS]
        self.num_local = 0
        self.inputs = self._new_inputs()
        self.fill(StepPlan(0), {space: PageTables() for space in pool.windows})

    def fill(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        """Set the inputs from a plan. The copy to the device of the previous call must have ended.

        Args:
            plan: at most `size` rows, each with one new token.
            tables: page tables, including the plan's new pages.
        """
        rows, columns = plan.rows, self._columns
        self.num_local = int((self._mine < len(rows)).sum())
        starts = np.array([row.start for row in rows], np.int64)
        slots = np.array([row.slot for row in rows], np.int64)
        ids = np.frombuffer(b"".join(row.tokens for row in rows), np.int32)
        for name, values in ((_IDS, ids), (_POSITIONS, starts), (_SLOTS, slots)):
            columns[name][: self.num_local] = values[self._mine[: self.num_local]]
            columns[name][self.num_local :] = 0
        self._fill_states(plan)
        places = {}
        for space, window in self._pool.windows.items():
            pages, columns[space][:] = self._pages(starts, tables[space].ids[slots], space=space, window=window)
            places[space] = replace(self.inputs.places[space], pages=pages)
        self.inputs = replace(self.inputs, places=places)
        self._device.copy_(self._host, non_blocking=True)

    def _fill_states(self, plan: StepPlan) -> None:
        scratch = [size for space, size in self._pool.sizes.items() if space not in self._pool.windows]
        for name, values in (
            (_READS, [row.read_state for row in plan.rows]),
            (_WRITES, [row.write_state for row in plan.rows]),
        ):
            self._columns[name][: len(plan.rows)] = values
            self._columns[name][len(plan.rows) :] = max(scratch, default=0)

    def _pages(
        self, starts: NDArray[np.int64], table: NDArray[np.int32], *, space: str, window: int
    ) -> tuple[Pages, NDArray[np.int64]]:
        """Pages of B rows, and the cache slot of each new token; tokens of other cp ranks go to the scratch page."""
        size, scratch = self._pool.page_size, self._pool.sizes[space]
        share, rank = size // self._ctx.cp.size, self._ctx.cp.rank
        page, offset = np.divmod(starts, size)
        first = np.maximum(starts - window + 1, 0) // size if window else np.zeros_like(starts)
        seen_pages, rest = np.divmod(starts + 1, size)
        cached = (seen_pages - first) * share + np.clip(rest - rank * share, 0, share)
        written = np.full(self._size, scratch * share, np.int64)
        is_mine = offset // share == rank
        rows = np.arange(len(starts))
        written[rows[is_mine]] = (table[rows, page].astype(np.int64) * share + offset % share)[is_mine]
        padding = self._size - len(starts)
        counts = np.concatenate([page + 1 - first, np.ones(padding, np.int64)])
        indptr = np.zeros(self._size + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        ids = np.full(indptr[-1], scratch, np.int32)
        real = int(indptr[len(starts)])
        row_of = np.repeat(rows, counts[: len(starts)])
        ids[:real] = table[row_of, np.arange(real) - indptr[row_of] + first[row_of]]
        lengths = np.concatenate([cached, np.ones(padding, np.int64)]).astype(np.int32)
        begin = np.concatenate([first, np.zeros(padding, np.int64)]).astype(np.int32)
        return Pages(indptr=indptr, ids=ids, first=begin, cached=lengths, total=lengths), written

    def _new_inputs(self) -> StepInputs:
        size, cp, device = self._size, self._ctx.cp, self._ctx.device
        local = [np.flatnonzero(np.arange(size) % cp.size == rank) for rank in range(cp.size)]
        locals_ = [[np.zeros(int(i in mine), np.int64) for i in range(size)] for mine in local]
        has_all, rows, place = self._has_all_tokens, [], 0
        for i in range(size):
            is_local = has_all or i % cp.size == cp.rank
            rows.append(RowInputs(0, range(i, i + 1), range(place, place + is_local), (), 0, 0))
            place += is_local
        nothing = np.zeros(0, np.int32)
        every, empty = torch.arange(size, device=device), Pages(nothing, nothing, nothing, nothing, nothing)
        return StepInputs(
            ctx=self._ctx,
            ids=self._tensors[_IDS],
            positions=self._tensors[_POSITIONS],
            num_tokens=size,
            rows=tuple(rows),
            exchange=HeadExchange(cp) if has_all else TokenExchange.between(locals_, np.arange(size + 1), self._ctx),
            places={
                space: Places(every, self._tensors[space], empty, self._pool.page_size, cp.rank, cp.size)
                for space in self._pool.windows
            },
            read_states=self._tensors[_READS],
            write_states=self._tensors[_WRITES],
            logits=torch.arange(len(self._mine), device=device),
            is_decode=True,
        )
