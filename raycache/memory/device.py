"""The device pool: pages of every component of this rank's layers, in the rank's memory.

One tensor per component, field and layer:  [num_pages, page_size / cp, *the field's shape with heads / tp]

A page id means the same tokens on every rank; each cp rank holds its run of the page's tokens, each tp rank its heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from raycache.errors import ConfigError
from raycache.memory.component import Component, RowField
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import kv_head_range, layer_range


def local_shape(field: RowField, ctx: ParallelContext) -> tuple[int, ...]:
    """A field's shape on this tp rank."""
    shape = list(field.shape)
    if field.head_axis is not None:
        shape[field.head_axis] = len(kv_head_range(shape[field.head_axis], ctx.tp.rank, ctx.tp.size))
    return tuple(shape)


def page_bytes(components: Sequence[Component], *, num_layers: int, page_size: int, ctx: ParallelContext) -> int:
    """Bytes of one page in this rank's pool."""
    mine = layer_range(num_layers, ctx.pp.rank, ctx.pp.size)
    return sum(
        component.itemsize * math.prod(local_shape(field, ctx)) * sum(layer in mine for layer in component.layers)
        for component in components
        for field in component.fields
    ) * (page_size // ctx.cp.size)


class KVView:
    """Keys and values of one layer, as an attention backend sees them.

    Attributes:
        k, v: [num_pages, page_size / cp, Hkv, D].
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self._k_rows, self._v_rows = k.flatten(0, 1), v.flatten(0, 1)

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows [T, Hkv, D] at slots [T] (page id * page_size / cp + offset)."""
        self._k_rows.index_copy_(0, slots, k)
        self._v_rows.index_copy_(0, slots, v)

    def read(self, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Rows of consecutive slots; one run is a view, several are copied together.

        Args:
            runs: (first slot, number of rows), at least one.
        Returns:
            k, v: [L, Hkv, D].
        """
        if len(runs) == 1:
            start, count = runs[0]
            return self._k_rows[start : start + count], self._v_rows[start : start + count]
        k = torch.cat([self._k_rows[start : start + count] for start, count in runs])
        v = torch.cat([self._v_rows[start : start + count] for start, count in runs])
        return k, v


class DevicePool:
    """Pages of all components of one rank.

    Args:
        components: of the model.
        num_layers: of the whole model.
        num_pages: the same on every rank.
        page_size: tokens per page.
        ctx: whose part to hold.
        dtype: of the numbers.
    Raises:
        ConfigError: the memory is not there.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        ctx: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        mine = layer_range(num_layers, ctx.pp.rank, ctx.pp.size)
        rows = page_size // ctx.cp.size
        self.num_pages, self.page_size = num_pages, page_size
        # Not cleared: no row is read before it is written, and untouched memory costs nothing.
        self._fields: dict[tuple[str, int], dict[str, Tensor]] = {}
        try:
            for component in components:
                for layer in (layer for layer in component.layers if layer in mine):
                    self._fields[component.name, layer] = {
                        field.name: torch.empty(
                            (num_pages, rows, *local_shape(field, ctx)), dtype=dtype, device=ctx.device
                        )
                        for field in component.fields
                    }
        except (MemoryError, RuntimeError) as cause:
            size = num_pages * page_bytes(components, num_layers=num_layers, page_size=page_size, ctx=ctx)
            raise ConfigError(
                f"no memory for {num_pages} pages ({size / 2**30:.1f} GiB) on {ctx.device} of rank {ctx.rank}; "
                "use a smaller --kv-memory or --num-pages"
            ) from cause
        self._views = {key: KVView(fields["k"], fields["v"]) for key, fields in self._fields.items()}

    def view(self, component: str, layer: int) -> KVView:
        """The view of one layer."""
        return self._views[component, layer]
