"""Attention of recorded steps of few tokens whose rows have any number of them, to keys and values in pages.

FlashInfer's plans differ in size from step to step, so a graph cannot hold them: see short_kernels.py.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from raycache.attention.base import NotRecordableError
from raycache.attention.flashinfer_full import Layers
from raycache.attention.flashinfer_kernels import KernelCache
from raycache.attention.flashinfer_replans import StaticRows
from raycache.attention.layout import StepLayout
from raycache.attention.page_writer import Writer
from raycache.attention.triton_works import triton_works
from raycache.memory.views import KVView
from raycache.step.inputs import Places

MOST_DIM = 128
"""Largest head size: wider ones do not fit into registers beside their keys."""
MOST_QUERIES = 64
"""Most query heads per key head, which one tile takes."""


class ShortKernels:
    """Plan of the layers of one kind, with one cp rank.

    Args:
        static: number of tokens, and maximum pages per row.
    Raises:
        NotRecordableError: there is no kernel for these layers.
    """

    def __init__(self, kernels: KernelCache, layers: Layers, layout: StepLayout, static: StaticRows) -> None:
        heads = layers.heads
        if not triton_works() or heads.dim > MOST_DIM or heads.queries // heads.keys > MOST_QUERIES:
            raise NotRecordableError(f"short steps of {heads.queries} and {heads.keys} heads of {heads.dim}")
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.short_kernels import QueryTiles

        self._layout, self._scale = layout, heads.scale
        self._tiles = QueryTiles(
            static.num_rows,
            max_pages=static.num_rows * static.max_pages,
            group=heads.queries // heads.keys,
            num_key_heads=heads.keys,
            window=layers.window,
            buffer=kernels.partial,
        )
        places = layout.inputs.places[layers.space]
        self._writer = Writer(kernels, places.slots)
        self.replan(places)

    def replan(self, places: Places) -> None:
        """Plan the next replay of a CUDA graph with other rows, pages and slots."""
        from raycache.attention.short_kernels import TileRow

        inputs, first = self._layout.inputs, places.pages.first * places.page_size
        rows = [
            TileRow(row.tokens.start, len(row.tokens), row.start - begin)
            for row, begin in zip(inputs.rows, first.tolist(), strict=True)
        ]
        num_used = int(np.sum([row.count for row in rows], dtype=np.int64))
        if num_used < inputs.num_tokens:
            count = inputs.num_tokens - num_used
            rows.append(TileRow(num_used, count, -count))
        self._writer.refresh(places.slots)
        self._tiles.fill(rows, places.pages)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """See `AttentionStep.attend`."""
        from raycache.attention.short_kernels import attend

        self._writer.write_kv(self._layout.inputs.places[view.space].owned, k, v, to=(view.k, view.v))
        return attend(q, view.k, view.v, self._tiles, scale=self._scale, sinks=sinks)
