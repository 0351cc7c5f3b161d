"""Attention to latents selected by a sparse indexer, in Triton: the host need not know how many a query selects.

    slots    [ 7 9 40 - ]  lengths [ 3 ]      row 0 attends to the slots 7, 9, 40
             [ - - -  - ]          [ 0 ]      row 1 to none on this rank

A kernel splits what it finds in `lengths` among its programs, and another one merges their results. Nothing is planned,
so no layer waits for the host, and a step can be captured in a CUDA graph. It is for cp > 1, where a rank's share of a
selection differs between layers, and for float8 latents, whose kernel it shares (fp8_latent.py).

Shapes in this file: T tokens of all cp ranks, K slots per query, Hq heads, R rank of latents, Dn and Dr sizes of
queries' plain and rotary part, Dv of values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.attention.flashinfer_kernels import KernelCache
from raycache.attention.flashinfer_latent import LatentLayers, attend_absorbed
from raycache.attention.flashinfer_selected import BLOCK_BYTES, SlotChoice
from raycache.attention.fp8_latent import SHAPES, Programs, TileShape, tile_shape
from raycache.attention.layout import StepLayout
from raycache.attention.merge import Part, wide
from raycache.attention.page_writer import Writer
from raycache.memory.views import LatentView
from raycache.step.inputs import StepInputs

# Five stages hold two tiles of keys: two are for their slots.
_HALF_SHAPES = (TileShape(16, 32, 4, 5, 2), TileShape(32, 32, 8, 5, 1), TileShape(64, 32, 8, 3, 1))

_SMALL_SHAPES = (TileShape(16, 32, 4, 3, 1), TileShape(32, 32, 8, 3, 1))
"""Of devices before Hopper, some of which have 99 KiB of shared memory."""


class SlotAttention:
    """Layers that attend to selected latents."""

    def __init__(self, kernels: KernelCache, layers: LatentLayers, layout: StepLayout) -> None:
        self._layers, self._layout = layers, layout
        self._programs = programs_for(kernels, layers.heads.queries, is_fp8=layers.is_fp8)
        self._writer = Writer(kernels, layout.inputs.places[layers.space].slots)

    def replan(self, inputs: StepInputs) -> None:
        """Prepare the next replay of a CUDA graph with other pages."""
        self._writer.refresh(inputs.places[self._layers.space].slots)

    def attend(
        self,
        view: LatentView,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        projection: LatentProjection,
        choice: SlotChoice,
    ) -> Tensor:
        """Implements `AttentionStep.attend_latent`."""
        inputs, heads = self._layout.inputs, self._layers.heads
        if inputs.is_decode:  # starting a transfer takes longer than copying few queries
            latent, rope, every_q = inputs.exchange.gather_parts(latent, rope, q)
        else:
            latent, rope = inputs.exchange.gather_parts(latent, rope)
            every_q = inputs.exchange.gather(q)
        self._writer.write_latents(inputs.places[view.space].owned, latent, rope, to=view.pages)
        most = max(1, BLOCK_BYTES // (heads.dtype.itemsize * heads.queries * self._layers.rank))
        if len(every_q) <= most:
            return self._layout.combine(self._run(view, every_q, projection, choice.slots, choice.lengths), None, None)
        out = every_q.new_empty((*every_q.shape[:2], heads.value_dim))
        lse = torch.empty(every_q.shape[:2], dtype=wide(q.dtype), device=q.device)
        for first in range(0, len(every_q), most):
            some = slice(first, first + most)
            part = self._run(view, every_q[some], projection, choice.slots[some], choice.lengths[some])
            out[some], lse[some] = part
        return self._layout.combine((out, lse), None, None)

    def _run(self, view: LatentView, q: Tensor, projection: LatentProjection, slots: Tensor, lengths: Tensor) -> Part:
        """Queries [n, Hq, Dn + Dr] against the latents at slots [n, K]."""
        run = functools.partial(self._run_absorbed, slots=slots, lengths=lengths)
        out, lse = attend_absorbed(run, view.pages, q, projection)
        assert lse is not None, "always given"
        return out, lse

    def _run_absorbed(
        self, q: Tensor, q_rope: Tensor, *pages: Tensor, slots: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.latent_kernels import attend_selected

        scale = self._layers.heads.scale
        return attend_selected(q, q_rope, pages, slots, lengths, programs=self._programs, scale=scale)


def programs_for(kernels: KernelCache, num_heads: int, *, is_fp8: bool) -> Programs:
    """How the kernel is run for this number of heads, and latents in float8 or in the dtype of queries."""
    shapes: Sequence[TileShape] = SHAPES
    if not is_fp8:
        shapes = _HALF_SHAPES if torch.cuda.get_device_capability(kernels.device) >= (9, 0) else _SMALL_SHAPES
    return Programs.of(kernels, tile_shape(num_heads, shapes))
