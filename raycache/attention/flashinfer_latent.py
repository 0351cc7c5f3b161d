"""Multi-head latent attention with FlashInfer.

    rows  cp    how                                                    keys
    few   1     absorbed, causally                                     their pages, which include their new tokens
    few   more  absorbed; then expanded, causally                      this rank's pages; new latents of all ranks
    many  any   expanded, in pieces; then expanded, causally           this rank's pages; new latents of all ranks

With float8 pages few rows are computed as under cp, since only latents read from pages are rounded (fp8_latent.py).

A pair of query and key costs 2 (2 R + Dr) operations per head absorbed and 2 (Dn + Dr + Dv) expanded, and a key
2 R (Dn + Dv) to expand: for R = 512 and Dn = Dv = 128, a row of 170 new tokens costs the same either way. On an H200,
256 new tokens after 8192 take 953 us absorbed and 1035 us expanded with 128 heads, 161 us and 557 us with 16.

Shapes in this file: T_local new tokens of this rank, T of all cp ranks, L tokens, Hq heads, R rank of latents, Dn and
Dr sizes of queries' plain and rotary part, Dv of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.attention.flashinfer_kernels import Heads, KernelCache, LatentKernel, RaggedKernel
from raycache.attention.flashinfer_replans import StaticRows
from raycache.attention.flashinfer_tables import Tokens, are_all, decode_table, page_table, pieces, run_segments
from raycache.attention.fp8_latent import Fp8LatentKernel
from raycache.attention.layout import StepLayout
from raycache.attention.merge import Part, join, no_keys, wide
from raycache.attention.page_writer import Writer
from raycache.memory.views import LatentView
from raycache.step.inputs import Places

FEW_QUERIES = 256
"""Rows with fewer queries are absorbed."""

FEW_FP8_QUERIES = 64
"""The same with float8 pages, where each query reads its keys anew. Not measured."""

ABSORBED_TILE = 128
"""(query, head) pairs in a tile of the kernel, or half of that. With causal attention, the kernel may drop keys of a
query that spans two tiles; no query does if the number of heads divides this."""

MAX_ABSORBED = 1 << 19
"""Limit of absorbed (query, head) pairs, without those of single tokens: a plan holds up to 16,384 parts of 64 or 128
pairs, more than one per tile where keys are split."""


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """Layers that share a plan.

    Attributes:
        space: of their component.
        heads: of this rank, expanded; one key head per query head.
        rank, rope_dim: features of a latent and of its rotary part.
        is_fp8: whether cached latents are float8.
    """

    space: str
    heads: Heads
    rank: int
    rope_dim: int
    is_fp8: bool = False

    @property
    def absorbed(self) -> Heads:
        """The heads of absorbed attention: a single key head."""
        return replace(self.heads, keys=1, dim=self.rope_dim, value_dim=self.rank)


AbsorbedKernel = LatentKernel | Fp8LatentKernel

AbsorbedRun = Callable[..., tuple[Tensor, Tensor | None]]
"""`AbsorbedKernel.run`, or like it."""


def absorbed_kernel(kernels: KernelCache, layers: LatentLayers, static: StaticRows | None) -> AbsorbedKernel:
    """The kernel for absorbed queries of some layers; `static` for a CUDA graph."""
    return Fp8LatentKernel(kernels, static) if layers.is_fp8 else LatentKernel(kernels, static)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Cached tokens that are expanded together.

    Attributes:
        tokens: queries that attend to them, among all; on the device.
        slots: int64 [L], of the cached tokens.
    """

    tokens: Tokens
    slots: Tensor
    kernel: RaggedKernel


class LatentKernels:
    """Plan of the layers of one kind.

    Args:
        expanded_bytes: limit of the keys and values expanded from cached latents at a time, at least one token's.
        static: for a CUDA graph.
    """

    def __init__(
        self,
        kernels: KernelCache,
        layers: LatentLayers,
        layout: StepLayout,
        *,
        expanded_bytes: int,
        static: StaticRows | None = None,
    ) -> None:
        places = layout.inputs.places[layers.space]
        self._kernels, self._layers, self._layout = kernels, layers, layout
        self._heads = layers.absorbed
        self._is_alone = layout.inputs.ctx.cp.size == 1
        # Whether absorbed rows attend to their own new tokens in pages, too.
        self._is_whole = self._is_alone and not layers.is_fp8
        self._writer = Writer(kernels, places.slots)
        few, many = self._few_and_many()
        self._recorded = absorbed_kernel(kernels, layers, static) if static is not None else None
        self._absorbed = self._planned_absorbed(places, few)
        self._pieces = list(self._planned_pieces(places, many, expanded_bytes))
        self._runs = list(self._planned_runs(many))

    def replan(self, places: Places) -> None:
        """Plan the next replay of a CUDA graph with other pages and slots."""
        self._writer.refresh(places.slots)
        self._absorbed = self._planned_absorbed(places, range(len(self._layout.inputs.rows)))

    def attend(self, view: LatentView, q: Tensor, latent: Tensor, rope: Tensor, projection: LatentProjection) -> Tensor:
        """Implements `AttentionStep.attend_latent` over all earlier tokens."""
        inputs = self._layout.inputs
        if not self._is_alone:
            latent, rope = inputs.exchange.gather_parts(latent, rope)
        self._writer.write_latents(inputs.places[view.space].owned, latent, rope, to=view.pages)
        if self._is_alone:
            return self._attend_alone(view, q, latent, rope, projection)
        cached = self._cached(view, inputs.exchange.gather(q), projection) if self._layout.has_cached else None
        causal = self._causal(q, latent, rope, projection) if self._runs else None
        if cached is None and causal is None:
            return q.new_empty((len(q), self._layers.heads.queries, self._layers.heads.value_dim))
        return self._layout.combine(cached, causal, None)

    def _attend_alone(
        self, view: LatentView, q: Tensor, latent: Tensor, rope: Tensor, projection: LatentProjection
    ) -> Tensor:
        """With cp=1, absorbed rows are whole, or all are single tokens; for others, what is cached is merged with the
        causal part."""
        if not self._runs:
            assert self._absorbed is not None, "every row has a token"
            return attend_absorbed(self._absorbed[1].run, view.pages, q, projection)[0]
        out, lse = self._causal(q, latent, rope, projection)
        if self._pieces:
            out, lse = self._join_pieces(view, q, projection, (out, lse))
        if self._absorbed is not None:
            tokens, kernel = self._absorbed
            found, found_lse = attend_absorbed(kernel.run, view.pages, q[tokens], projection)
            out[tokens] = found if found_lse is None else join((out[tokens], lse[tokens]), (found, found_lse))[0]
        return out

    def _cached(self, view: LatentView, q: Tensor, projection: LatentProjection) -> Part:
        """All queries [T, Hq, Dn + Dr] against the tokens in this rank's pages."""
        if self._absorbed is not None and are_all(self._absorbed[0], len(q)):
            out, lse = attend_absorbed(self._absorbed[1].run, view.pages, q, projection)
            assert lse is not None, "planned with it, since parts are merged"
            return out, lse
        part = self._join_pieces(view, q, projection, no_keys(q, self._layers.heads.value_dim))
        if self._absorbed is not None:
            tokens, kernel = self._absorbed
            out, lse = attend_absorbed(kernel.run, view.pages, q[tokens], projection)
            assert lse is not None, "planned with it, since parts are merged"
            part[0][tokens], part[1][tokens] = out, lse
        return part

    def _causal(self, q: Tensor, latent: Tensor, rope: Tensor, projection: LatentProjection) -> Part:
        """This rank's queries [T_local, Hq, Dn + Dr] against the new latents [T, R] of their row up to themselves."""
        k, v = expand(latent, rope, projection)
        if are_all(self._runs[0][0], len(q)):
            return self._runs[0][1].run(q, k, v)
        out, lse = no_keys(q, self._layers.heads.value_dim)
        for tokens, kernel in self._runs:
            out[tokens], lse[tokens] = kernel.run(q[tokens], k, v)
        return out, lse

    def _join_pieces(self, view: LatentView, q: Tensor, projection: LatentProjection, part: Part) -> Part:
        """Merge a part of queries [T, Hq, Dn + Dr] with the cached tokens of rows that are not absorbed."""
        if not self._pieces:
            return part
        # In the precision of the weights, because every piece adds to it.
        out, lse = part[0].to(wide(q.dtype)), part[1]
        for piece in self._pieces:
            k, v = expand(*take(view, piece.slots, dtype=q.dtype), projection)
            both = join((out[piece.tokens], lse[piece.tokens]), piece.kernel.run(q[piece.tokens], k, v))
            out[piece.tokens], lse[piece.tokens] = both
        return out.to(q.dtype), lse

    def _few_and_many(self) -> tuple[Sequence[int], Sequence[int]]:
        """Rows that are absorbed, and the others."""
        rows = self._layout.inputs.rows
        # Rows that include their own new tokens need causal attention.
        is_sure = not self._is_whole or ABSORBED_TILE % self._layers.heads.queries == 0
        most = FEW_FP8_QUERIES if self._layers.is_fp8 else FEW_QUERIES
        pairs = self._layers.heads.queries * sum(len(row.tokens) for row in rows if len(row.tokens) < most)
        most = most if is_sure and pairs < MAX_ABSORBED else 2
        few = [i for i, row in enumerate(rows) if len(row.tokens) < most]
        return few, [i for i, row in enumerate(rows) if len(row.tokens) >= most]

    def _planned_absorbed(self, places: Places, rows: Sequence[int]) -> tuple[Tokens, AbsorbedKernel] | None:
        inputs, page_len = self._layout.inputs, places.page_size // places.cp_size
        lens = places.pages.total if self._is_whole else places.pages.cached
        if self._recorded is not None:
            table = decode_table(places.pages, lens, page_len=page_len)
            self._recorded.plan(table, self._heads, is_causal=False, has_lse=not self._is_whole)
            return table.tokens, self._recorded
        rows = [row for row in rows if lens[row]]
        if not rows:
            return None
        table = page_table(places.pages, rows, lens, queries=[row.tokens for row in inputs.rows], page_len=page_len)
        make = functools.partial(absorbed_kernel, self._kernels, self._layers, None)
        kernel = self._kernels.kernel((self._layers, "absorbed"), make)
        has_chunks = any(len(inputs.rows[row].tokens) > 1 for row in rows)
        kernel.plan(table, self._heads, is_causal=self._is_whole and has_chunks, has_lse=not self._is_whole)
        return self._kernels.tokens(table.tokens), kernel

    def _planned_pieces(self, places: Places, rows: Sequence[int], expanded_bytes: int) -> Iterator[_Piece]:
        kernels, heads = self._kernels, self._layers.heads
        token_bytes = heads.dtype.itemsize * heads.queries * (heads.dim + heads.value_dim)
        cut = pieces(
            places.pages,
            rows,
            inputs=self._layout.inputs.rows,
            page_len=places.page_size // places.cp_size,
            length=max(1, expanded_bytes // token_bytes),
        )
        for i, piece in enumerate(cut):
            kernel = kernels.kernel(
                (self._layers, "piece", i), functools.partial(RaggedKernel, kernels, kernels.newest, is_piece=True)
            )
            kernel.plan(piece.segments, heads, is_causal=False)
            yield _Piece(kernels.tokens(piece.segments.tokens), kernels.on_device(piece.slots), kernel)

    def _planned_runs(self, many: Sequence[int]) -> Iterator[tuple[Tokens, RaggedKernel]]:
        kernels, expanded = self._kernels, set(many)
        chunks = [chunk for chunk in self._layout.chunks if not self._is_whole or chunk.row in expanded]
        for i, segments in enumerate(run_segments(chunks)):
            kernel = kernels.kernel((self._layers, "run", i), functools.partial(RaggedKernel, kernels, kernels.newest))
            kernel.plan(segments, self._layers.heads, is_causal=True)
            yield kernels.tokens(segments.tokens), kernel


def attend_absorbed(
    run: AbsorbedRun, pages: tuple[Tensor, ...], q: Tensor, projection: LatentProjection
) -> tuple[Tensor, Tensor | None]:
    """Queries [n, Hq, Dn + Dr] that a kernel is planned for -> [n, Hq, Dv], and their log-sum-exps.

    Args:
        pages: as those of `LatentView`.
    """
    dim = projection.key.shape[1]
    plain, rotary = q[..., :dim], q[..., dim:]
    # Strides are those that the products produce and expect: [Hq, n, R].
    absorbed = torch.bmm(plain.transpose(0, 1), projection.key).transpose(0, 1)
    out, lse = run(absorbed, rotary, *pages)
    return torch.bmm(out.transpose(0, 1), projection.value.mT).transpose(0, 1), lse


def take(view: LatentView, slots: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`LatentView.take`, with float8 latents in one launch."""
    if len(view.pages) == 2:
        return view.take(slots, dtype=dtype)
    # It needs Triton, which is there on GPU machines only.
    from raycache.attention.fp8_page_kernels import read_latents

    return read_latents(slots, pages=view.pages, dtype=dtype)


def expand(latent: Tensor, rope: Tensor, projection: LatentProjection) -> tuple[Tensor, Tensor]:
    """latent [L, R], rope [L, Dr] -> k [L, Hq, Dn + Dr], v [L, Hq, Dv]."""
    heads, dim, _ = projection.key.shape
    k = latent.new_empty((len(latent), heads, dim + rope.shape[1]))
    # Written in place: a copy would take half as long as the product.
    torch.bmm(latent.expand(heads, -1, -1), projection.key.mT, out=k[..., :dim].transpose(0, 1))
    k[..., dim:] = rope[:, None]
    return k, torch.einsum("lr,hdr->lhd", latent, projection.value)
