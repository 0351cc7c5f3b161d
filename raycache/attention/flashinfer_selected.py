"""Attention to latents selected by a sparse indexer, with FlashInfer: each query is a row and each slot a page.

    slots    [ 7 9 40 - ]  lengths [ 3 ]      row 0 has the pages 7, 9, 40
             [ 8 9 12 41 ]         [ 4 ]      row 1 has the pages 8, 9, 12, 41      ids [ 7 9 40 8 9 12 41 ]

New tokens are written to the cache before the selection, so there is no causal part. This is for cp=1, where the host
knows how many tokens a query selects; else see selected_latent.py.

Shapes in this file: T tokens of all cp ranks, K slots per query, Hq heads, R rank of latents, Dn and Dr sizes of
queries' plain and rotary part, Dv of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.attention.flashinfer_kernels import KernelCache, LatentKernel
from raycache.attention.flashinfer_latent import LatentLayers, attend_absorbed
from raycache.attention.flashinfer_replans import StaticRows
from raycache.attention.flashinfer_tables import Ints, Table, starts_of
from raycache.attention.layout import StepLayout
from raycache.attention.merge import Part, no_keys, wide
from raycache.attention.page_writer import Writer
from raycache.memory.views import LatentView
from raycache.step.inputs import StepInputs

BLOCK_BYTES = 256 << 20  # of absorbed queries, or of the latents that torch gathers for a block of queries
MAX_QUERIES = 8192  # per kernel, whose plan holds up to 16,384 parts: each query, and some that are split


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The tokens in this rank's cache that each query attends to.

    Attributes:
        slots: int32 [T, K], padded with -1.
        lengths: int32 [T].
        top_k: maximum per query over all ranks.
    """

    slots: Tensor
    lengths: Tensor
    top_k: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of queries.

    Attributes:
        kernel: planned for them.
        ids: int32 [n * K + 1], the slots that the kernel reads.
        where: int64 [n * K], index in `ids` of each slot; padding goes to the end.
    """

    tokens: slice
    kernel: LatentKernel
    ids: Tensor
    where: Tensor


class SelectedKernels:
    """Plan of layers that attend to selected latents, with cp=1 and latents in the dtype of queries.

    Args:
        choice: of the first layer; those of the others have the same width.
        static: for a CUDA graph.
    """

    def __init__(
        self,
        kernels: KernelCache,
        layers: LatentLayers,
        layout: StepLayout,
        choice: SlotChoice,
        static: StaticRows | None = None,
    ) -> None:
        self._kernels, self._layers, self._layout = kernels, layers, layout
        self._heads, self._width, self._top_k = layers.absorbed, choice.slots.shape[1], choice.top_k
        self._steps = torch.arange(self._width, device=kernels.device)
        self._recorded: tuple[LatentKernel, Tensor] | None = None
        if static is not None:
            where = torch.zeros(static.num_rows * self._width, dtype=torch.int64, device=kernels.device)
            rows = StaticRows(static.num_rows, self._width + 1)
            self._recorded = LatentKernel(kernels, rows), where
        self._writer = Writer(kernels, layout.inputs.places[layers.space].slots)
        self._blocks = self._planned(self._lengths(layout.inputs))

    def replan(self, inputs: StepInputs) -> None:
        """Plan the next replay of a CUDA graph with other pages and slots."""
        self._writer.refresh(inputs.places[self._layers.space].slots)
        self._blocks = self._planned(self._lengths(inputs))

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
        self._writer.write_latents(self._layout.inputs.places[view.space].owned, latent, rope, to=view.pages)
        if len(self._blocks) == 1:
            return self._run(self._blocks[0], view, q, projection, choice)
        out = q.new_empty((*q.shape[:2], self._layers.heads.value_dim))
        for block in self._blocks:
            out[block.tokens] = self._run(block, view, q[block.tokens], projection, choice)
        return out

    def _run(
        self, block: _Block, view: LatentView, q: Tensor, projection: LatentProjection, choice: SlotChoice
    ) -> Tensor:
        block.ids.scatter_(0, block.where, choice.slots[block.tokens].flatten())
        pages = tuple(rows.flatten(0, 1)[:, None] for rows in view.pages)
        return attend_absorbed(block.kernel.run, pages, q, projection)[0]

    def _planned(self, lengths: Ints) -> list[_Block]:
        token_bytes = self._layers.heads.dtype.itemsize * self._layers.heads.queries * self._layers.rank
        most = len(lengths) if self._recorded else max(1, min(MAX_QUERIES, BLOCK_BYTES // token_bytes))
        blocks: list[_Block] = []
        for first in range(0, len(lengths), most):
            tokens = slice(first, min(first + most, len(lengths)))
            # Behind the first top_k tokens of a sequence all blocks are alike. They run one after another.
            if blocks and np.array_equal(lengths[blocks[-1].tokens], lengths[tokens]):
                blocks.append(replace(blocks[-1], tokens=tokens))
            else:
                blocks.append(self._block(len(blocks), tokens, lengths))
        return blocks

    def _block(self, number: int, tokens: slice, lengths: Ints) -> _Block:
        kernels, lens = self._kernels, lengths[tokens].astype(np.int32)
        table = Table(tokens, np.arange(len(lens) + 1, dtype=np.int32), starts_of(lens), lens[:0], lens, 1)
        if self._recorded is not None:
            kernel, where = self._recorded
            assert kernel.static is not None
            indptr, on_device, ids = kernel.static.indptr, kernel.static.lens, kernel.static.ids
        else:
            make = functools.partial(LatentKernel, kernels, None)
            kernel = kernels.kernel((self._layers, "selected", number), make)
            indptr, on_device = kernels.on_device(table.indptr), kernels.on_device(lens)
            ids = kernel.room_for(len(lens) * self._width + 1)
            where = torch.empty(len(lens) * self._width, dtype=torch.int64, device=kernels.device)
        kernel.plan(table, self._heads, ids, is_causal=False, has_lse=False)
        torch.add(indptr[:-1, None], self._steps, out=where.view(-1, self._width))
        where.view(-1, self._width).masked_fill_(self._steps >= on_device[:, None], len(where))
        return _Block(tokens, kernel, ids, where)

    def _lengths(self, inputs: StepInputs) -> Ints:
        """Number of tokens that each query attends to, int32 [T]."""
        ends = inputs.places[self._layers.space].pages.total
        if inputs.num_tokens > len(inputs.rows):
            counts = [len(row.tokens) for row in inputs.rows]
            ends = np.concatenate(
                [np.arange(end - count, end) + 1 for end, count in zip(ends.tolist(), counts, strict=True)]
            )
        known: Ints = np.minimum(ends, self._top_k).astype(np.int32)
        return known


def attend_choice(
    layout: StepLayout,
    view: LatentView,
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    projection: LatentProjection,
    choice: SlotChoice,
    *,
    scale: float,
) -> Tensor:
    """`AttentionStep.attend_latent` of selected tokens in plain torch, for latents of any format."""
    inputs = layout.inputs
    places = inputs.places[view.space]
    latent, rope = inputs.exchange.gather_parts(latent, rope)
    view.write(places.slots, latent[places.owned], rope[places.owned])
    every_q = inputs.exchange.gather(q)
    out, lse = no_keys(every_q, projection.value.shape[1])
    most = max(1, BLOCK_BYTES // (4 * choice.slots.shape[1] * (view.rank + view.rope_dim)))
    for first in range(0, len(every_q), most):
        some = slice(first, first + most)
        out[some], lse[some] = _attend_slots(
            view, every_q[some], projection, choice.slots[some], choice.lengths[some], scale=scale
        )
    return layout.combine((out, lse), None, None)


def _attend_slots(
    view: LatentView, q: Tensor, projection: LatentProjection, slots: Tensor, lengths: Tensor, *, scale: float
) -> Part:
    """Queries [n, Hq, Dn + Dr] against the latents at slots [n, K]."""
    plain, rotary = q.split([q.shape[2] - view.rope_dim, view.rope_dim], dim=2)
    absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", plain, projection.key), rotary], dim=2)
    keys = torch.cat(view.take(slots.clamp_min(0).flatten(), dtype=wide(q.dtype)), dim=1).unflatten(0, slots.shape)
    is_behind = torch.arange(slots.shape[1], device=q.device) >= lengths[:, None]
    keys.masked_fill_(is_behind[..., None], 0)  # padding reads the first slot, which may hold anything
    scores = torch.einsum("nhd,nkd->nhk", absorbed.to(keys.dtype), keys) * scale
    scores.masked_fill_(is_behind[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    # For queries without keys on this rank all weights are NaN.
    weights = (scores - lse[..., None]).exp().nan_to_num(nan=0.0)
    latents = torch.einsum("nhk,nkr->nhr", weights, keys[..., : view.rank]).to(q.dtype)
    return torch.einsum("nhr,hvr->nhv", latents, projection.value), lse
