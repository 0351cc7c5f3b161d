"""Short steps as CUDA graphs: few new tokens behind long prefixes, and rows that generate beside them.

    plan rows    [ row 0: 5 new tokens ][ row 1: 1 ][ row 2: 40 ]              46 tokens
    batch        [ row 0               ][ row 1    ][ row 2     ][ padding ]   64, the next recorded number

Unlike a decode batch (decode_batch.py), a row is one row, whatever its number of tokens, so that its queries share the
keys that they read. With one cp rank, for models that keep keys and values only; other short steps, and those whose
pages are still being loaded, run in pieces (pieces.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from raycache.attention.base import StaticStep
from raycache.rank.decode_batch import IDS, POSITIONS, SLOTS, DecodeBatch
from raycache.rank.graphs import DecodeGraphs
from raycache.step.inputs import RowInputs, StepInputs, pages_of
from raycache.step.page_tables import PageTables
from raycache.wire.plan import StepPlan

_SIZES = (16, 32, 64, 128, 256)

MOST_TOKENS = _SIZES[-1]
"""Most tokens of a step that is recorded."""


def short_sizes(most: int) -> list[int]:
    """Numbers of tokens to record, up to `most`, those of a step."""
    return [size for size in _SIZES if size <= most]


class ShortBatch(DecodeBatch):
    """Inputs of steps of at most so many tokens, whose rows have any number of them, with one cp rank.

    Attributes:
        inputs: of the last `fill`; its rows are those of the plan, and tokens behind them are padding.
    """

    def _fill_columns(self, plan: StepPlan, tables: Mapping[str, PageTables]) -> None:
        rows, columns, size = plan.rows, self._columns, self._pool.page_size
        counts = np.array([row.num_tokens for row in rows], np.int64)
        of_row, ends = np.repeat(np.arange(len(rows)), counts), counts.cumsum()
        self.num_local = count = len(of_row)
        starts = np.array([row.start for row in rows], np.int64)
        positions = np.arange(count) + (starts - ends + counts)[of_row]
        ids = np.frombuffer(b"".join(row.tokens for row in rows), np.int32)
        slots = np.array([row.slot for row in rows], np.int64)[of_row]
        for name, values in ((IDS, ids), (POSITIONS, positions), (SLOTS, slots)):
            columns[name][:count] = values
            columns[name][count:] = 0
        places = {}
        for space, window in self._pool.windows.items():
            held = [tables[space].of(row.slot) for row in rows]
            pages = pages_of(plan, held, page_size=size, window=window, ctx=self._ctx)
            page = pages.ids[positions // size + (pages.indptr[:-1] - pages.first)[of_row]]
            columns[space][:count] = page.astype(np.int64) * size + positions % size
            columns[space][count:] = self._pool.sizes[space] * size
            places[space] = replace(self.inputs.places[space], pages=pages)
        spans = [range(end - row.num_tokens, end) for row, end in zip(rows, ends.tolist(), strict=True)]
        self.inputs = replace(
            self.inputs,
            places=places,
            rows=tuple(
                RowInputs(row.start, span, span, (range(len(span)),) if len(span) > 1 else (), -1, -1)
                for row, span in zip(rows, spans, strict=True)
            ),
        )

    def _new_inputs(self) -> StepInputs:
        return replace(super()._new_inputs(), rows=(), is_decode=False, state_rows=None)


class ShortGraphs(DecodeGraphs):
    """CUDA graphs of short steps, by number of tokens."""

    def can_run(self, plan: StepPlan) -> bool:
        """Whether a plan can be replayed."""
        if plan.loads or sum(row.num_tokens for row in plan.rows) > max(self.sizes, default=0):
            return False
        # Only the last keys of a longer row are in pages.
        longest = max(row.num_tokens for row in plan.rows)
        return all(not window or longest < window for window in self._pool.windows.values())

    def _new_batch(self, size: int) -> ShortBatch:
        return ShortBatch(size, self._pool, self.ctx)

    def _plan_static(self, inputs: StepInputs) -> StaticStep:
        return self._backend.plan_static(inputs, has_chunks=True)
