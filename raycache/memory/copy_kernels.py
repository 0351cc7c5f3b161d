"""Copies between the device pool and envelopes in a buffer on the device, many pieces in one launch.

    pool      [L, U, B]    a field's rows, layer first
    buffer    [U, L, B]    the same rows, page first; unit i of a copy is row i

The kernel does not know fields: its table has the address and the strides of layers and units of each strip.

Imports Triton: only what runs on CUDA may import this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycache.memory.host import Strip

# Shapes in this file: L layers of a strip, U units, B bytes of one unit in one layer and field.

_WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Bytes per access -> dtype; 16 bytes are two consecutive words."""

_BLOCK_BYTES = {16: 16384, 8: 16384, 4: 8192, 2: 4096, 1: 2048}
"""Bytes per access -> bytes that a program reads before it writes."""

_NUM_WARPS = 8


class CopyTable:
    """Strips that are copied together.

    Args:
        strips: of one space; their slab is the buffer.
    """

    def __init__(self, strips: Sequence[Strip]) -> None:
        by_width: dict[int, list[Strip]] = {}
        for strip in strips:
            by_width.setdefault(_width(strip), []).append(strip)
        self._tables = {width: _table(of_width, width) for width, of_width in by_width.items()}

    def copy(self, ids: Tensor, *, to_pool: bool, num_programs: int) -> None:
        """Give the copy of all layers of these units to the current stream.

        Args:
            ids: of units in the pool [U], int64, on the device.
            to_pool: the direction.
            num_programs: how many thread blocks share the work.
        """
        for width, table in self._tables.items():
            word = _WORDS[width].itemsize
            _copy[(num_programs,)](
                table.view(_WORDS[width]),
                table,
                ids,
                len(table),
                len(ids),
                VECTOR=width // word,
                BLOCK=_BLOCK_BYTES[width] // word,
                TO_POOL=to_pool,
                num_warps=_NUM_WARPS,
            )


def _width(strip: Strip) -> int:
    """The most bytes that divide all that the kernel adds up."""
    pool, envelopes = strip.pool, strip.envelopes
    numbers = [pool.data_ptr(), envelopes.data_ptr(), pool.shape[2], *pool.stride()[:2], *envelopes.stride()[:2]]
    return math.gcd(*numbers, max(_WORDS))


def _table(strips: Sequence[Strip], width: int) -> Tensor:
    """What the kernel reads [strips, 8], int64, in units of `width`; addresses from the table's own on."""
    table = torch.empty((len(strips), 8), dtype=torch.int64, device=strips[0].pool.device)
    rows = []
    for strip in strips:
        pool, envelopes = strip.pool, strip.envelopes
        assert pool.stride(2) == envelopes.stride(2) == 1, "rows of one unit and layer are contiguous"
        places = [pool.data_ptr() - table.data_ptr(), *pool.stride()[:2]]
        places += [envelopes.data_ptr() - table.data_ptr(), envelopes.stride(1), envelopes.stride(0), pool.shape[2]]
        rows.append([*(place // width for place in places), len(pool)])
    table.copy_(torch.tensor(rows))
    return table


# Not specialised for values of its arguments: a move of one page or of 16 must not wait for a compiler.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_strips", "num_units"], do_not_specialize_on_alignment=["ids"]
)
def _copy(
    origin: tl.tensor,
    table: tl.tensor,
    ids: tl.tensor,
    num_strips: tl.tensor,
    num_units: tl.tensor,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_POOL: tl.constexpr,
) -> None:
    """Items are (layer, unit, block of a strip), dealt out to the programs; a lane moves `VECTOR` words at once."""
    words = tl.arange(0, BLOCK)
    for strip in range(num_strips):
        row = table + strip * 8
        pool, pool_layer, pool_unit = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        away, away_layer, away_unit = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
        length, num_layers = tl.load(row + 6) * VECTOR, tl.load(row + 7)
        num_blocks = tl.cdiv(length, BLOCK)
        for item in range(tl.program_id(0), num_layers * num_units * num_blocks, tl.num_programs(0)):
            first = item % num_blocks * BLOCK
            unit = item // num_blocks % num_units
            layer = item // num_blocks // num_units
            # A product with VECTOR shows the compiler that addresses are aligned.
            in_pool = (pool + layer * pool_layer + tl.load(ids + unit) * pool_unit) * VECTOR
            in_away = (away + layer * away_layer + unit * away_unit) * VECTOR
            inside = first + words < length
            if TO_POOL:
                tl.store(origin + in_pool + first + words, tl.load(origin + in_away + first + words, inside), inside)
            else:
                tl.store(origin + in_away + first + words, tl.load(origin + in_pool + first + words, inside), inside)
