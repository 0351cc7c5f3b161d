"""Rows of a step by kind of attention, computed once per step for all layers.

row    new tokens    attention
chunk  2 or more     cached: all its queries against this rank's pages; causal: this rank's queries against new keys
single 1             cached only: the token itself has been written to a page, so there is no causal part

out = merge( causal(new tokens of this chunk), cached(pages of cp rank 0), ..., cached(pages of cp rank n-1) )
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycache.attention.merge import Part, merge
from raycache.attention.triton_works import triton_works
from raycache.step.exchange import TokenExchange
from raycache.step.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of two or more new tokens.

    Attributes:
        row: index of the row.
        start: position of its first new token.
        tokens: its new tokens among all T.
        local: those of this rank among its T_local.
        runs: those of this rank as runs of the chunk, in local order; may be empty.
    """

    row: int
    start: int
    tokens: slice
    local: slice
    runs: tuple[range, ...]

    def local_runs(self) -> Iterator[tuple[slice, range]]:
        """This rank's runs, each with its slice of the rank's T_local tokens."""
        begin = self.local.start
        for run in self.runs:
            yield slice(begin, begin + len(run)), run
            begin += len(run)


class StepLayout:
    """Rows of a step by kind.

    Attributes:
        chunks: rows of two or more new tokens.
        singles: indices of the rows of one new token.
        single_tokens: int64; indices of these tokens among all T.
        has_cached: whether any query attends to pages; the same on every rank.
        has_causal: whether this rank computes tokens of a chunk.
    """

    def __init__(self, inputs: StepInputs) -> None:
        rows = list(enumerate(inputs.rows))
        self.inputs = inputs
        self.chunks = tuple(
            Chunk(i, row.start, _slice(row.tokens), _slice(row.local), row.runs)
            for i, row in rows
            if len(row.tokens) > 1
        )
        self.singles = tuple(i for i, row in rows if len(row.tokens) == 1)
        self.single_tokens = self.on_device([inputs.rows[i].tokens.start for i in self.singles])
        self.has_cached = bool(self.singles) or any(chunk.start for chunk in self.chunks)
        self.has_causal = any(chunk.runs for chunk in self.chunks)

    def on_device(self, numbers: list[int]) -> Tensor:
        """Copy to the device as int64."""
        return self.inputs.ctx.on_device(np.array(numbers, np.int64))

    def combine(
        self, cached: Part | None, causal: Part | None, sinks: Tensor | None, *, is_log2: bool = False
    ) -> Tensor:
        """Merge the parts of the queries that this rank continues with, over cp.

        Args:
            cached: all T queries against this rank's pages; None exactly if not `has_cached`.
            causal: this rank's T_local queries against new keys; may be None if not `has_causal`.
            is_log2: whether log-sum-exps are to base 2.
        Returns:
            [T_own, H_own, Dv], see `Exchange`.
        """
        if cached is not None and self.inputs.ctx.cp.size == 1 and causal is None and sinks is None:
            return cached[0]
        exchange, cp = self.inputs.exchange, self.inputs.ctx.cp
        if cp.size > 1 and cached is not None and (kernels := _kernels_for(cached)) is not None:
            merged: Tensor
            if isinstance(exchange, TokenExchange):
                merged = kernels.give_back(cached, causal, sinks, exchange=exchange, is_log2=is_log2)
            else:
                merged = kernels.scatter(cached, self._own_sinks(sinks), cp=cp, is_log2=is_log2)
            return merged
        if is_log2:
            cached, causal = (None if part is None else (part[0], part[1] * math.log(2)) for part in (cached, causal))
        outs, lses = ([], []) if causal is None else ([causal[0]], [causal[1][None]])
        if cached is not None:
            scattered, lse = self._scatter(cached)
            outs += scattered.unbind(0)
            lses.append(lse)
        return merge(outs, torch.cat(lses) if len(lses) > 1 else lses[0], self._own_sinks(sinks))

    def _own_sinks(self, sinks: Tensor | None) -> Tensor | None:
        return None if sinks is None else self.inputs.exchange.own(sinks[None])[0]

    def _scatter(self, part: Part) -> Part:
        """All queries on this rank's pages -> this rank's queries on every rank's pages, [cp, T_own, H_own, ...]."""
        out, lse = part
        if self.inputs.ctx.cp.size == 1:
            return out[None], lse[None]
        # In one message, the log-sum-exp as it is in memory: two numbers for one if the results are half as wide.
        both = self.inputs.exchange.scatter(torch.cat([out, lse.contiguous()[..., None].view(out.dtype)], dim=-1))
        dim = out.shape[-1]
        # A copy begins where memory can be read as wider numbers.
        bits = both[..., dim:].clone(memory_format=torch.contiguous_format)
        return both[..., :dim], bits.view(lse.dtype)[..., 0]


def merge_parts(one: Part, other: Part, others: Part, sinks: Tensor | None) -> Tensor:
    """Merge parts of the same queries; log-sum-exps are to base 2.

    Args:
        one, other: [T, H, D] and [T, H].
        others: more parts, [P, T, H, D] and [P, T, H]; parts need not follow each other in memory.
        sinks: [H] or None.
    Returns:
        [T, H, D]
    """
    if _kernels_for(one) is not None:
        from raycache.attention.merge_kernels import merge_apart

        return merge_apart(one, other, others, sinks)
    outs, lses = [one[0], other[0], *others[0]], torch.cat([one[1][None], other[1][None], others[1]])
    return merge(outs, lses * math.log(2), sinks)


def _kernels_for(part: Part) -> Any:
    """Kernels that exchange and merge parts like this one, or None."""
    if not part[0].is_cuda or not triton_works():
        return None
    from raycache.attention import part_kernels

    return part_kernels if part_kernels.takes(*part) else None


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)
