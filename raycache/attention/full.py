"""Softmax attention to all earlier tokens, or to a window of them: the cached and the causal part of each row.

Under cp, chunks pass keys or queries (passing.py): where they pass keys, cached ones belong to the causal part.

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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import Part, attend_all, attend_masked, attend_run, merge, no_keys
from raycache.attention.passing import Passing
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
    """Queries of a chunk against packed keys; either `run` or `mask` is set.

    Attributes:
        local: the queries among this rank's tokens.
        keys: among all packed ones.
        run: where the queries are among the keys, for causal attention.
        mask: bool [queries, keys].
    """

    local: slice
    keys: slice
    run: range | None = None
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """Packed keys that a chunk attends to causally.

    Attributes:
        span: the chunk's among all of them; its new ones are the last.
        num_cached: how many of them are cached ones.
    """

    chunk: Chunk
    span: slice
    num_cached: int = 0


class FullAttention:
    """Attention plan of the layers of one component space.

    Args:
        prefixes: cached tokens of each row in this space; None if `cached` is not called.
        window: number of tokens that a query attends to, including itself; 0 for no limit.
        keys: of all chunks; None for their new tokens among all T.
    """

    def __init__(
        self, layout: StepLayout, prefixes: Sequence[Prefix] | None, *, window: int, keys: Sequence[Keys] | None = None
    ) -> None:
        self._window = window
        self._device = layout.inputs.ctx.device
        self._cached = [
            rows
            for row, prefix in ([] if prefixes is None else zip(layout.inputs.rows, prefixes, strict=True))
            if prefix.runs and (rows := self._cached_rows(prefix, row.start, row.tokens)) is not None
        ]
        self._masks: dict[tuple[int, int], Tensor] = {}
        if keys is None:
            keys = [Keys(chunk, chunk.tokens) for chunk in layout.chunks]
        self._blocks = [block for some in keys for block in self._chunk_blocks(some)]

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
        """This rank's queries [T_local, Hq, D] against the packed keys [L, Hkv, D] of their row up to themselves."""
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

    def _chunk_blocks(self, keys: Keys) -> list[_Block]:
        blocks: list[_Block] = []
        begin = keys.span.start
        for local, new in keys.chunk.local_runs():
            run = range(keys.num_cached + new.start, keys.num_cached + new.stop)
            if not self._window or run.stop <= self._window:
                blocks.append(_Block(local, keys.span, run=run))
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


class PassedAttention:
    """Attention plan of the layers of one component space in a step with chunks under cp.

    Args:
        layout: of the step.
        passing: its rows' ways.
        window: number of tokens that a query attends to, including itself; 0 for no limit.
    """

    def __init__(self, layout: StepLayout, space: str, passing: Passing, *, window: int) -> None:
        self._passing, self._slots_to_write = passing, layout.inputs.places[space].slots
        slots = [keys.slots(passing.page_len) for keys in passing.keys]
        self._order = layout.inputs.ctx.on_device(np.concatenate(slots))
        ends = np.cumsum([0, *map(len, slots)]).tolist()
        spans = [slice(first, end) for first, end in itertools.pairwise(ends)]
        packed = [Keys(keys.chunk, span, keys.num_cached) for keys, span in zip(passing.keys, spans, strict=True)]
        self._causal = FullAttention(layout, None, window=window, keys=packed)
        self._asking: tuple[StepLayout, FullAttention] | None = None
        if passing.asking is not None:
            asking = StepLayout(passing.asking)
            prefixes = passing.asking.places[space].prefixes
            self._asking = asking, FullAttention(asking, prefixes, window=window, keys=())

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """As `AttentionStep.attend`."""
        heads = k.shape[1]

        def pack(ids: Tensor, to: Tensor) -> None:
            to[:, :, :heads], to[:, :, heads:] = view.k[ids], view.v[ids]

        buffer = self._passing.gather(
            (k, v), pack, lambda new: view.write(self._slots_to_write, new[:, :heads], new[:, heads:])
        )
        keys, values = buffer.flatten(0, 1)[self._order].split([heads, heads], dim=1)
        part = self._causal.causal(q, keys, values, scale=scale)
        if self._asking is None:
            return part[0] if sinks is None else merge([part[0]], part[1][None], sinks)
        asking, plan = self._asking
        cached = plan.cached(view, asking.inputs.exchange.gather(self._passing.asked(q)), scale=scale)
        return self._passing.answered(part, cached, asking, sinks)
