"""A decode batch whose inputs stay at fixed device addresses, as CUDA graphs require.

    rows of the plan    [ row 0 ] ... [ row with drafts          ]                  n new tokens in all
    rows of the batch   [ row 0 ] ... [ token ][ draft ][ draft  ][ padding ] ...   `size` of them, of one token each
    recurrent layers    [ row 0 ] ... [ row with drafts          ][ padding ] ...   as many, the last ones empty

Padding rows read and write the pool's scratch unit. All inputs are copied to the device at once.

Shapes in this file: B rows of the batch, n tokens of the plan, L that this rank computes: B / cp, or all with weights
split over cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.memory.component import STATE
from raycache.memory.device import DevicePool
from raycache.memory.streams import PinnedUse
from raycache.parallel.context import ParallelContext
from raycache.parallel.uploads import upload
from raycache.step.exchange import HeadExchange, TokenExchange
from raycache.step.inputs import Pages, Places, RowInputs, StateRows, StepInputs
from raycache.step.page_tables import PageTables
from raycache.wire.plan import StepPlan

IDS, POSITIONS, SLOTS = "ids", "positions", "slots"
_SPANS, _READS, _WRITES, _KEPT = "spans", "read states", "write states", "kept states"


class DecodeBatch:
    """Inputs of batches of one size.

    Args:
        size: B; a multiple of cp without `has_all_tokens`.
        pool: must have scratch units.
        longest: most tokens of a row.
        has_all_tokens: see `build_inputs`.
    Attributes:
        inputs: of the last `fill`; initially all rows are padding.
        slots: int64 [L]; slot of each of this rank's tokens, 0 for padding.
        num_local: number of the plan's tokens that this rank computes.
    """

    def __init__(
        self, size: int, pool: DevicePool, ctx: ParallelContext, *, longest: int = 1, has_all_tokens: bool = False
    ) -> None:
        self._size, self._pool, self._ctx, self._has_all_tokens = size, pool, ctx, has_all_tokens
        self._longest = longest
        self._mine = np.arange(size) if has_all_tokens else np.arange(ctx.cp.rank, size, ctx.cp.size)
        lengths = dict.fromkeys((IDS, POSITIONS, SLOTS), len(self._mine))
        lengths |= {_SPANS: 2 * size} | dict.fromkeys((_READS, _WRITES, _KEPT, *pool.windows), size)
        self._host = torch.zeros(sum(lengths.values()), dtype=torch.int64, pin_memory=ctx.device.type == "cuda")
        self._device, self._filling = self._host.to(ctx.device), PinnedUse(ctx.device)
        at_host = self._host.split(list(lengths.values()))
        self._columns = {name: part.numpy() for name, part in zip(lengths, at_host, strict=True)}
        self._tensors = dict(zip(lengths, self._device.split(list(lengths.values())), strict=True))
        self.slots: Tensor = self._tensors[SLOTS]
        self.num_local = 0
        self.inputs = self._new_inputs()
        self.fill(StepPlan(0), {space: PageTables() for space in pool.windows})

    def fill(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        """Set the inputs from a plan.

        Args:
            plan: at most `size` tokens; rows with drafts, or of one token.
            tables: page tables, including the plan's new pages.
        """
        with self._filling:
            self._fill_columns(plan, tables)
            upload(self._host, self._device)

    def _fill_columns(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        rows, columns = plan.rows, self._columns
        counts = np.array([row.num_tokens for row in rows], np.int64)
        ids = np.frombuffer(b"".join(row.tokens for row in rows), np.int32)
        self.num_local = int((self._mine < len(ids)).sum())
        first = np.array([row.start for row in rows], np.int64).repeat(counts)
        behind: NDArray[np.int64] = np.arange(len(ids)) - (counts.cumsum() - counts).repeat(counts)
        starts = first + behind
        slots = np.array([row.slot for row in rows], np.int64).repeat(counts)
        for name, values in ((IDS, ids), (POSITIONS, starts), (SLOTS, slots)):
            columns[name][: self.num_local] = values[self._mine[: self.num_local]]
            columns[name][self.num_local :] = 0
        self._fill_states(plan)
        places = {}
        for space, window in self._pool.windows.items():
            pages, columns[space][:] = self._pages(starts, slots, tables[space].ids, space=space, window=window)
            places[space] = replace(self.inputs.places[space], pages=pages)
        self.inputs = replace(self.inputs, places=places)

    def _fill_states(self, plan: StepPlan) -> None:
        if STATE not in self._pool.sizes:
            return
        rows, columns, scratch = plan.rows, self._columns, self._pool.sizes[STATE]
        counts, written = [row.num_tokens for row in rows], [(row.write_state, *row.draft_states) for row in rows]
        assert counts == list(map(len, written)), "a state is kept after each token of a row with drafts"
        num_tokens = sum(counts)
        num_rows = len(rows) + self._size - num_tokens
        counts += [1] * (self._size - num_tokens)
        for name, values, rest in (
            (_READS, [row.read_state for row in rows], scratch),
            (_WRITES, [slot for slots in written for slot in slots], scratch),
            (_KEPT, counts, 0),
        ):
            columns[name][: len(values)] = values
            columns[name][len(values) :] = rest
        columns[_READS][num_rows:] = -1
        ends = columns[_KEPT].cumsum()
        columns[_SPANS][0::2], columns[_SPANS][1::2] = ends - columns[_KEPT], columns[_KEPT]

    def _pages(
        self, starts: NDArray[np.int64], slots: NDArray[np.int64], table: NDArray[np.int32], *, space: str, window: int
    ) -> tuple[Pages, NDArray[np.int64]]:
        """Pages of B rows, and the cache slot of each new token; tokens of other cp ranks go to the scratch page.

        Args:
            starts, slots: [n].
            table: page ids of all slots.
        """
        size, scratch, cp, count = self._pool.page_size, self._pool.sizes[space], self._ctx.cp, len(starts)
        share = size // cp.size
        page, offset = np.divmod(starts, size)
        first, counts = np.zeros(self._size, np.int32), np.ones(self._size, np.int64)
        begins = np.zeros(self._size, np.int32)
        if window:
            first[:count], begins[:count] = np.divmod(np.maximum(starts + 1 - window, 0), size)
        begin = first[:count]
        counts[:count] = page + 1 - begin
        indptr = np.zeros(self._size + 1, np.int32)
        counts.cumsum(out=indptr[1:])
        ids = np.full(indptr[-1], scratch, np.int32)
        row_of = np.arange(count).repeat(counts[:count])
        ids[: len(row_of)] = table[slots[row_of], np.arange(len(row_of)) - (indptr[:count] - begin)[row_of]]
        lengths, written = np.ones(self._size, np.int32), np.full(self._size, scratch * share, np.int64)
        if cp.size == 1:
            lengths[:count] = starts + 1 - begin * size
            written[:count] = table[slots, page].astype(np.int64) * size + offset
        else:
            begins = np.minimum(np.maximum(begins - cp.rank * share, 0), share)
            rest = np.minimum(np.maximum(offset + 1 - cp.rank * share, 0), share)
            lengths[:count] = (page - begin) * share + rest
            mine = np.flatnonzero(offset // share == cp.rank)
            written[mine] = table[slots[mine], page[mine]].astype(np.int64) * share + offset[mine] % share
        return Pages(indptr=indptr, ids=ids, first=first, cached=lengths, total=lengths, begins=begins), written

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
        every, empty = torch.arange(size, device=device), Pages(*[nothing] * 6)
        return StepInputs(
            ctx=self._ctx,
            ids=self._tensors[IDS],
            positions=self._tensors[POSITIONS],
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
            state_rows=StateRows(
                self._tensors[_SPANS].view(-1, 2),
                self._tensors[_READS],
                self._tensors[_WRITES],
                self._tensors[_KEPT],
                self._longest,
            ),
        )
