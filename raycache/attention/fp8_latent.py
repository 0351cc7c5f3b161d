"""Absorbed attention to latents in float8: its work, and a kernel with the interface of `LatentKernel`.

FlashInfer has no kernel for float8 latents with scales, so this one is a Triton kernel, which reads them as they are
stored. Each query is on its own, and attends to all keys of its row; long rows are split (what an indexer has selected
is split on the device, selected_latent.py):

    query    0                  1      2          lens [ 130 40 0 ], 64 keys per item
    items    [ 0 64 ][ 64 128 ][ 128 130 ]  [ 0 40 ]  [ 0 0 ]
    part     0       1         2            -         -              spans [ 0 3 3 3 ]

The longest items begin first, so that short ones fill the gaps at the end.

Shapes in this file: n rows of a table, T queries, N items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.flashinfer_kernels import Heads, KernelCache
from raycache.attention.flashinfer_replans import StaticRows, StaticTable
from raycache.attention.flashinfer_tables import Ints, Table, starts_of
from raycache.attention.triton_works import triton_works
from raycache.memory.streams import PinnedUse
from raycache.parallel.uploads import upload

NUM_COLUMNS = 8
"""Numbers of an item; the last ones are 0, so that what lies behind items is aligned."""

FEWEST_KEYS = 128
"""Of an item of a split row: its partial result of 16 heads is written and read in the time of about 100 keys."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of a program.

    Attributes:
        heads, keys: of a tile.
        num_warps, num_stages: of Triton.
        per_processor: programs that a multiprocessor runs at once.
    """

    heads: int
    keys: int
    num_warps: int
    num_stages: int
    per_processor: int


# What fits into the registers of Hopper. Up to 32 heads are too few for its asynchronous matrix products.
SHAPES = (TileShape(16, 32, 4, 3, 2), TileShape(32, 32, 8, 3, 1), TileShape(64, 32, 8, 3, 1))


def tile_shape(num_heads: int, shapes: Sequence[TileShape] = SHAPES) -> TileShape:
    """The sizes for this number of heads: of the smallest tile that holds them, or the largest one."""
    return next((shape for shape in shapes if shape.heads >= num_heads), shapes[-1])


@cache
def obstacle(device: torch.device) -> str:
    """Why the kernels do not work on a CUDA device, or ""."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "before Hopper"
    return "" if triton_works() else "without Triton"


@dataclass(frozen=True, slots=True)
class Programs:
    """How a kernel without a plan is run.

    Attributes:
        shape: of its programs.
        at_once: how many run at once.
        partial: float32, memory for their partial results.
    """

    shape: TileShape
    at_once: int
    partial: Tensor

    @classmethod
    def of(cls, kernels: KernelCache, shape: TileShape) -> Programs:
        """On the device of some kernels."""
        return cls(shape, kernels.num_blocks // 2 * shape.per_processor, kernels.partial.view(torch.float32))


@dataclass(frozen=True, slots=True)
class Work:
    """What the kernel computes, on the device.

    Attributes:
        shape: of its programs.
        items: int32 [N, NUM_COLUMNS]: the query, or -1 for none; where the page ids of its row begin; its first key
            and the end of its keys, in tokens; the partial result that it writes, or -1 if it is the query's only item.
        spans: int32 [T + 1]; the partial results of query t are spans[t]:spans[t + 1]. None if there are none.
        ids: int32, page ids.
        partial: float32, memory for partial results.
    """

    shape: TileShape
    items: Tensor
    spans: Tensor | None
    ids: Tensor
    partial: Tensor


@cache
def num_splits(num_programs: int, *, at_once: int, most_keys: int) -> int:
    """Among how many programs to divide the work of one, where each takes up to `most_keys` keys, to end first.

    Args:
        num_programs: without a split.
        at_once: programs that run at once.
    """

    def end(splits: int) -> float:
        # Partial results are written, read and merged.
        return -(-num_programs * splits // at_once) * (most_keys / splits + FEWEST_KEYS * (splits > 1))

    return min(range(1, max(1, most_keys // FEWEST_KEYS) + 1), key=end)


def split_keys(first_ids: Ints, lens: Ints, *, most: int, step: int) -> tuple[Ints, Ints]:
    """Split the keys of queries into items of about equal length.

    Args:
        first_ids, lens: int32 [T]; see `Work`.
        most: items if there were one query; each query may add one.
        step: items of split rows end at its multiples.
    Returns:
        items and spans as in `Work`: at most T + `most` items, and at most 2 * `most` partial results.
    """
    least = max(FEWEST_KEYS, -(-int(lens.sum(dtype=np.int64)) // most))
    length = -(-least // step) * step
    counts = np.maximum(-(-lens // length), 1)
    first = starts_of(counts)
    spans = starts_of(np.where(counts > 1, counts, 0))
    query = np.arange(len(lens)).repeat(counts)
    number = np.arange(len(query)) - first[query]
    begin = number * length
    end = np.minimum(begin + length, lens[query])
    part = np.where(counts[query] > 1, spans[query] + number, -1)
    items = np.zeros((len(query), NUM_COLUMNS), np.int32)
    for column, numbers in enumerate((query, first_ids[query], begin, end, part)):
        items[:, column] = numbers
    return items[np.argsort(begin - end, kind="stable")], spans


class Fp8LatentKernel:
    """Absorbed queries against float8 latents in pages; see `LatentKernel`.

    Args:
        static: for a CUDA graph.
    """

    def __init__(self, kernels: KernelCache, static: StaticRows | None) -> None:
        self._kernels, self._has_lse, self._scale = kernels, False, 1.0
        self._static = None if static is None else StaticTable(static, kernels.device)
        self._fixed: _FixedItems | None = None
        self._work: Work | None = None

    def plan(self, table: Table, heads: Heads, *, is_causal: bool, has_lse: bool) -> None:
        """Plan a step; see `LatentKernel.plan`. It cannot be causal."""
        assert not is_causal, "new latents of a chunk are not in float8"
        self._has_lse, self._scale = has_lse, heads.scale
        shape = tile_shape(heads.queries)
        programs = self._kernels.num_blocks // 2 * shape.per_processor
        most = max(1, programs // -(-heads.queries // shape.heads))
        counts = np.diff(table.queries)
        items, spans = split_keys(
            table.indptr[:-1].repeat(counts), table.lens.repeat(counts), most=most, step=shape.keys
        )
        if self._static is None:
            ids = self._kernels.on_device(table.ids)
            both = self._kernels.on_device(np.concatenate([items.ravel(), spans]))
            on_device: tuple[Tensor, Tensor | None] = _parted(both, len(items))
            if not spans[-1]:
                on_device = on_device[0], None
        else:
            self._static.fill(table)
            ids = self._static.ids
            if self._fixed is None:
                self._fixed = _FixedItems(len(table.lens), most, self._kernels.device)
            on_device = self._fixed.fill(items, spans)
        self._work = Work(shape, *on_device, ids, self._kernels.partial.view(torch.float32))

    def run(self, q: Tensor, q_rope: Tensor, *pages: Tensor) -> tuple[Tensor, Tensor | None]:
        """Attend to pages.

        Args:
            q: [T, H, Rank].
            q_rope: [T, H, Dr].
            pages: float8 latents [P, R, Rank], rotary parts [P, R, Dr], scales [P, R, Rank / FP8_BLOCK].
        Returns:
            [T, H, Rank], and the log-sum-exp of the scores [T, H] if planned with it.
        """
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.latent_kernels import attend

        assert self._work is not None, "planned before"
        out, lse = attend(q, q_rope, pages, self._work, scale=self._scale)
        return out, lse if self._has_lse else None


class _FixedItems:
    """Items and spans of a CUDA graph, at fixed addresses; unused items have no query.

    Args:
        num_queries: T.
        most: see `split_keys`.
    """

    def __init__(self, num_queries: int, most: int, device: torch.device) -> None:
        self._num_items, self._filling = num_queries + most, PinnedUse(device)
        size = NUM_COLUMNS * self._num_items + num_queries + 1
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        items, spans = _parted(self._host, self._num_items)
        self._items, self._spans = items.numpy(), spans.numpy()

    def fill(self, items: Ints, spans: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Copy to the device; gives both there."""
        with self._filling:
            self._items[: len(items)] = items
            self._items[len(items) :] = -1
            self._spans[:] = spans
            upload(self._host, self._device)
        return _parted(self._device, self._num_items)


def _parted(both: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """Items and spans in one tensor."""
    return both[: NUM_COLUMNS * num_items].view(-1, NUM_COLUMNS), both[NUM_COLUMNS * num_items :]
