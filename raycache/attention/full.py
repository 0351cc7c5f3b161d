"""Softmax attention to all earlier tokens, or to a window of them: the cached and the causal part of each row.

With a window of W, the query at position p attends to positions p - W + 1 .. p. Only the first W - 1 queries of a chunk
attend to cached keys. Queries are computed in blocks with the W - 1 keys before them, which takes T * (W + block)
operations instead of T * T:

    chunk keys     . . . . . . . . . . . . . . . .
    block 0        # # # #
    block 1, W=3       # # # # # #
    block 2                    # # # # # #

Shapes in this file: T new tokens of all cp ranks, L cached tokens of a row on this rank, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import Part, attend_all, attend_masked, attend_run, no_keys
from raycache.memory.views import KVView, Runs
from raycache.step.inputs import Prefix

WINDOW_BLOCK = 128  # queries; larger blocks mask more of what they compute, smaller ones launch more kernels


@dataclass(frozen=True, slots=True)
class _CachedRows:
    """Queries of a row against its cached tokens.

    Attributes:
        tokens: the queries among all T.
        runs: slots of the keys.
        mask: bool [queries, L], or None for no mask.
    """

    tokens: slice
    runs: Runs
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries of a chunk against its new tokens; either `run` or `mask` is set.

    Attributes:
        local: the queries among this rank's tokens.
        keys: the new tokens among all T.
        run: the queries' run of the chunk, for causal attention.
        mask: bool [queries, keys].
    """

    local: slice
    keys: slice
    run: range | None = None
    mask: Tensor | None = None


class FullAttention:
    """Attention plan of the layers of one component space.

    Args:
        prefixes: cached tokens of each row in this space.
        window: number of tokens that a query attends to, including itself; 0 for no limit.
    """

    def __init__(self, layout: StepLayout, prefixes: Sequence[Prefix], *, window: int) -> None:
        self._window = window
        self._device = layout.inputs.ctx.device
        self._cached = [
            rows
            for row, prefix in zip(layout.inputs.rows, prefixes, strict=True)
            if prefix.runs and (rows := self._cached_rows(prefix, row.start, row.tokens)) is not None
        ]
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._blocks = [block for chunk in layout.chunks for block in self._chunk_blocks(chunk)]

    def cached(self, view: KVView, q: Tensor, *, scale: float) -> Part:
        """All queries [T, Hq, D] against the tokens in this rank's pages."""
        out, lse = no_keys(q, q.shape[2])
        for rows in self._cached:
            keys, values = view.read(rows.runs)
            mine = q[rows.tokens]
            if rows.mask is None:
                part = attend_all(mine, keys, values, scale=scale)
            else:
                part = attend_masked(mine, keys, values, rows.mask, scale=scale)
            out[rows.tokens], lse[rows.tokens] = part
        return out, lse

    def causal(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Part:
        """This rank's queries [T_local, Hq, D] against the new keys [T, Hkv, D] of their row up to themselves."""
        out, lse = no_keys(q, q.shape[2])
        for block in self._blocks:
            mine, keys, values = q[block.local], k[block.keys], v[block.keys]
            if block.run is not None:
                part = attend_run(mine, keys, values, block.run, scale=scale)
            else:
                assert block.mask is not None
                part = attend_masked(mine, keys, values, block.mask, scale=scale)
            out[block.local], lse[block.local] = part
        return out, lse

    def _cached_rows(self, prefix: Prefix, start: int, tokens: range) -> _CachedRows | None:
        if not self._window:
            return _CachedRows(slice(tokens.start, tokens.stop), prefix.runs, None)
        first = int(prefix.positions.searchsorted(start - self._window + 1))
        positions = prefix.positions[first:]
        # A single token has been written to its page and attends to itself there; of a chunk, W - 1 queries reach back.
        count = 1 if len(tokens) == 1 else min(len(tokens), self._window - 1)
        if not count or not len(positions):
            return None
        oldest = np.arange(start, start + count) - self._window + 1
        mask = None
        if positions[0] < oldest[-1]:
            mask = torch.from_numpy(positions >= oldest[:, None]).to(self._device, non_blocking=True)
        return _CachedRows(slice(tokens.start, tokens.start + count), drop_tokens(prefix.runs, first), mask)

    def _chunk_blocks(self, chunk: Chunk) -> list[_Block]:
        blocks: list[_Block] = []
        begin = chunk.tokens.start
        for local, run in chunk.local_runs():
            if not self._window or run.stop <= self._window:
                blocks.append(_Block(local, chunk.tokens, run=run))
                continue
            for start in range(run.start, run.stop, WINDOW_BLOCK):
                stop = min(start + WINDOW_BLOCK, run.stop)
                first = max(0, start - self._window + 1)
                offset = local.start + start - run.start
                blocks.append(
                    _Block(
                        slice(offset, offset + stop - start),
                        slice(begin + first, begin + stop),
                        mask=self._band(start - first, stop - start),
                    )
                )
        return blocks

    def _band(self, before: int, count: int) -> Tensor:
        """Mask of `count` queries on `before` keys and their own, causal and inside the window: bool [count, L]."""
        if (before, count) not in self._masks:
            keys = torch.arange(before + count, device=self._device)
            queries = torch.arange(before, before + count, device=self._device)[:, None]
            self._masks[before, count] = (keys <= queries) & (keys > queries - self._window)
        return self._masks[before, count]


def drop_tokens(runs: Runs, count: int) -> Runs:
    """Runs without their first `count` slots."""
    left = []
    for first, length in runs:
        skipped = min(count, length)
        count -= skipped
        if skipped < length:
            left.append((first + skipped, length - skipped))
    return left
