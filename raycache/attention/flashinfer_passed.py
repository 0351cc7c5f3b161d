"""Attention of chunks to keys and values under cp, with FlashInfer.

    this rank's queries, causally     the keys of their chunk in the gathered buffer (see passing.py)
    all queries of rows that ask      this rank's pages; merged as in layout.py

A run of a chunk is a row of the kernel, with the pages of the chunk up to the run's end. Chunks that pass keys need
nothing else. In long steps with rows that ask, exchanges are beside attention (flashinfer_copied.py).

Shapes in this file: T_local new tokens of this rank, H heads, D head size, n pages.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from raycache.attention.flashinfer_copied import CopiedQueries
from raycache.attention.flashinfer_full import FullKernels, Layers
from raycache.attention.flashinfer_kernels import FEW_QUERIES, KernelCache, LseBase, PagedKernel
from raycache.attention.flashinfer_tables import PassedRun, Tokens, are_all, passed_table
from raycache.attention.layout import StepLayout
from raycache.attention.merge import no_keys
from raycache.attention.page_writer import Writer
from raycache.attention.passing import Passing
from raycache.attention.sinks import apply_sinks
from raycache.memory.views import KVView
from raycache.parallel.copy_exchange import CopyExchange


class PassedKernels:
    """Plan of the layers of one kind in a step with chunks; cp is more than 1.

    Args:
        copies: for the rows that pass queries; None if they do not use them.
    """

    def __init__(
        self,
        kernels: KernelCache,
        layers: Layers,
        layout: StepLayout,
        passing: Passing,
        copies: CopyExchange | None = None,
    ) -> None:
        self._kernels, self._layers, self._passing = kernels, layers, passing
        places = layout.inputs.places[layers.space]
        self._writer = Writer(kernels, places.slots)
        self._owned = places.owned
        self._own = self._planned()
        self._asking: tuple[StepLayout, FullKernels] | None = None
        self._copied = None if copies is None else CopiedQueries(kernels, layers, passing, copies)
        if passing.asking is not None and copies is None:
            asking = StepLayout(passing.asking)
            self._asking = asking, FullKernels(kernels, layers, asking)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        heads = k.shape[1]

        def pack(ids: Tensor, to: Tensor) -> None:
            torch.index_select(view.k, 0, ids, out=to[:, :, :heads])
            torch.index_select(view.v, 0, ids, out=to[:, :, heads:])

        def write(new: Tensor) -> None:
            # Only owned ones are there, in order.
            self._writer.write_kv(self._owned, new[:, :heads], new[:, heads:], to=(view.k, view.v))

        if self._copied is not None:
            asked, every = self._passing.asked(q), self._passing.exchange.placed(k, v)
            self._copied.start(asked, every)
            cached = self._copied.attend_early(view, asked)
            buffer = self._passing.fill(every.flatten(0, 1), functools.partial(self._copied.arrive, every), pack, write)
            cached = self._copied.attend_rest(view, asked, cached)
            out, lse = self._attend_own(q, buffer[:, :, :heads], buffer[:, :, heads:], lse_base="log2")
            assert lse is not None
            new = self._passing.asked(out), self._passing.asked(lse)
            answers = self._copied.merge(cached, new, sinks)
            return self._passing.settled((out, lse), answers, sinks, is_log2=True)
        buffer = self._passing.gather((k, v), pack, write)
        keys, values = buffer[:, :, :heads], buffer[:, :, heads:]
        if self._asking is None and sinks is None:
            return self._attend_own(q, keys, values, lse_base=None)[0]
        if self._asking is None:
            out, lse = self._attend_own(q, keys, values, lse_base="log2")
            assert lse is not None and sinks is not None
            return apply_sinks(out, lse, sinks)
        out, lse = self._attend_own(q, keys, values, lse_base="log2")
        assert lse is not None
        asking, plan = self._asking
        every_q = asking.inputs.exchange.gather(self._passing.asked(q))
        return self._passing.answered((out, lse), plan.cached(view, every_q), asking, sinks, is_log2=True)

    def _attend_own(
        self, q: Tensor, keys: Tensor, values: Tensor, *, lse_base: LseBase | None
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's queries [T_local, Hq, D] against keys and values [n, page_len, Hkv, D]."""
        if len(self._own) == 1 and are_all(self._own[0][0], len(q)):
            return self._own[0][1].run(q, keys, values, lse_base=lse_base)
        out, lse = no_keys(q, q.shape[2])
        for tokens, kernel in self._own:
            out[tokens], part_lse = kernel.run(q[tokens], keys, values, lse_base=lse_base)
            if part_lse is not None:
                lse[tokens] = part_lse
        return out, lse

    def _planned(self) -> list[tuple[Tokens, PagedKernel]]:
        by_queries: dict[bool, list[PassedRun]] = {}
        for keys in self._passing.keys:
            for local, run in keys.chunk.local_runs():
                by_queries.setdefault(len(run) < FEW_QUERIES, []).append((keys, local, run))
        found = []
        for is_few, runs in by_queries.items():
            table = passed_table(runs, page_len=self._passing.page_len)
            kernel = self._kernels.paged((self._layers, "passed"), self._layers.heads, is_few=is_few)
            kernel.plan(table, self._layers.heads, is_causal=True, window=self._layers.window)
            found.append((self._kernels.tokens(table.tokens), kernel))
        return found
