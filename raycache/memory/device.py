"""The device pool: the cache of all components of this rank's layers.

One tensor per component and field, for all L layers of this rank that have it:

    rows of tokens       [L, num_pages, page_size / cp, *the field's shape with heads / tp]
    states of sequences  [L, num_slots, *the field's shape with heads / (tp * cp)]

An id refers to the same tokens on every rank; each cp rank holds its share of a page's tokens, each tp rank its heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from raycache.errors import ConfigError
from raycache.memory.component import FULL, ITEMSIZE, STATE, Component, Reuse, RowField
from raycache.memory.views import IndexView, KVView, LatentView, StateView, View, view_type
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Coords, Split, shared_head_range, state_part

V = TypeVar("V", KVView, LatentView, IndexView, StateView)


def local_shape(component: Component, field: RowField, split: Split, at: Coords) -> tuple[int, ...]:
    """A field's shape on one rank."""
    shape = list(field.shape)
    if field.head_axis is not None:
        part, parts = at.tp, split.tp
        if component.reuse is Reuse.STATE_HERE:
            part, parts = state_part(split, at)
        shape[field.head_axis] = len(shared_head_range(shape[field.head_axis], part, parts))
    return tuple(shape)


def unit_bytes(component: Component, *, num_layers: int, page_size: int, split: Split, at: Coords) -> int:
    """Bytes of one page, or of one state slot, of a component on one rank."""
    mine = split.held_layers(num_layers, at.pp)
    rows = 1 if component.reuse is Reuse.STATE_HERE else page_size // split.cp
    row = sum(math.prod(local_shape(component, field, split, at)) * ITEMSIZE[field.dtype] for field in component.fields)
    return row * rows * sum(layer in mine for layer in component.layers)


class DevicePool:
    """Rows of all components of one rank.

    Args:
        num_layers: of the whole model, without its draft model.
        sizes: component space -> number of pages or slots, the same on every rank.
        page_size: tokens per page.
        has_scratch: whether to add a scratch unit to each space, which padding rows of CUDA graphs read and write.
        num_spare_states: additional state slots of the draft model, used while drafting.
    Attributes:
        windows: component space of pages -> tokens that a query attends to; 0 for no limit.
        first_spare_state: first of the additional slots.
        gate: called with a layer before any of its views is handed out; returns when what is on its way there has
            arrived (mover.py). At first nothing is.
    Raises:
        ConfigError: there is not enough memory, or there is no view for a component's fields.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        num_layers: int,
        sizes: Mapping[str, int],
        page_size: int,
        ctx: ParallelContext,
        has_scratch: bool = False,
        num_spare_states: int = 0,
    ) -> None:
        mine = ctx.split.held_layers(num_layers, ctx.pp.rank)
        self.sizes, self.page_size = dict(sizes), page_size
        self.windows = {FULL: 0} | {c.space: c.window for c in components if c.reuse is not Reuse.STATE_HERE}
        self.device = ctx.device
        self._num_layers, self._num_scratch, self._num_spare = num_layers, int(has_scratch), num_spare_states
        self.first_spare_state = self.sizes.get(STATE, 0) + self._num_scratch
        self.gate: Callable[[int], None] = _nothing_on_its_way
        self._rows: dict[str, dict[str, Tensor]] = {}
        self._views: dict[tuple[type[View], int], View] = {}
        for component in components:
            kind = view_type(component)
            if kind is None:
                raise ConfigError(
                    f"component {component.name!r} has fields {[field.name for field in component.fields]} "
                    "that no view can serve"
                )
            layers = [layer for layer in component.layers if layer in mine]
            self._rows[component.name] = rows = self._allocate(component, len(layers), ctx) if layers else {}
            for i, layer in enumerate(layers):
                assert (kind, layer) not in self._views, f"layer {layer} has two components of one kind"
                self._views[kind, layer] = kind(component, {name: of_layers[i] for name, of_layers in rows.items()})

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components."""
        return tuple(self._rows)

    def rows(self, component: str) -> Mapping[str, Tensor]:
        """A component's rows [L, units, ...] by field, in the order of its layers; empty where L is 0.

        Only the first `sizes` units are anybody's.
        """
        return self._rows[component]

    def kv(self, layer: int) -> KVView:
        """Keys and values of a layer, of all tokens or of a window's."""
        return self._view(KVView, layer)

    def latent(self, layer: int) -> LatentView:
        """Latents of an MLA layer."""
        return self._view(LatentView, layer)

    def index(self, layer: int) -> IndexView:
        """Keys of a layer's sparse indexer."""
        return self._view(IndexView, layer)

    def state(self, layer: int) -> StateView:
        """States of a recurrent layer."""
        return self._view(StateView, layer)

    def behind(self) -> DraftLayers:
        """The layers of the draft model, which follow the model's own, numbered from 0."""
        return DraftLayers(self, self._num_layers)

    def _view(self, kind: type[V], layer: int) -> V:
        self.gate(layer)
        view = self._views[kind, layer]
        assert isinstance(view, kind)
        return view

    def _allocate(self, component: Component, num_layers: int, ctx: ParallelContext) -> dict[str, Tensor]:
        """Allocate rows by field. Not cleared: rows are written before they are read, and untouched memory is free."""
        lead = [num_layers, self.sizes[component.space] + self._num_scratch]
        if component.reuse is Reuse.STATE_HERE and component.is_draft:
            lead[1] += self._num_spare
        if component.reuse is not Reuse.STATE_HERE:
            lead.append(self.page_size // ctx.cp.size)
        try:
            return {
                field.name: torch.empty(
                    (*lead, *local_shape(component, field, ctx.split, ctx.coords)),
                    dtype=getattr(torch, field.dtype),
                    device=ctx.device,
                )
                for field in component.fields
            }
        except (MemoryError, RuntimeError) as cause:
            raise ConfigError(
                f"no memory on {ctx.device} of rank {ctx.rank} for {lead[1]} pages or slots of cache "
                f"{component.name!r}; use a smaller --kv-memory, --num-pages, --max-running or --restore-points"
            ) from cause


class DraftLayers:
    """Layers of a pool from some layer on, as whose layers begin at 0 sees them.

    Args:
        pool: of all layers.
        first: of those layers.
    """

    def __init__(self, pool: DevicePool, first: int) -> None:
        self._pool, self._first = pool, first

    def kv(self, layer: int) -> KVView:
        return self._pool.kv(self._first + layer)

    def latent(self, layer: int) -> LatentView:
        return self._pool.latent(self._first + layer)

    def index(self, layer: int) -> IndexView:
        return self._pool.index(self._first + layer)

    def state(self, layer: int) -> StateView:
        return self._pool.state(self._first + layer)


def _nothing_on_its_way(layer: int) -> None:
    """The gate of a pool without loads."""
