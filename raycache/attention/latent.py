"""Multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1), over latents shared by all heads.

Keys and values of head h are computed from a latent c [R] and a rotary part r [Dr]:

    key_h = [ K_h c, r ]      value_h = V_h c

    part                       how            because
    new tokens of a chunk      expanded       many queries share the keys: T * T * (Dn + Dr + Dv) instead of T * T * 2R
    cached tokens of a chunk   expanded       the same, in pieces of bounded size
    cached tokens of a single  absorbed       one query: (q K_h) c = q (K_h c), so that latents are used directly

The causal part uses the new latents unrounded, while latents read from an fp8 cache have been rounded; so has a single
new token, which is read from the cache.

Shapes in this file: T new tokens of all cp ranks, N single ones, L cached tokens, Hq heads, R rank of latents, Dn and
Dr sizes of queries' plain and rotary part, Dv of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import Part, attend_all, attend_masked, attend_run, join, no_keys, wide
from raycache.attention.sparse import TorchSelection
from raycache.memory.views import LatentView, Runs
from raycache.step.inputs import Prefix


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Attention arguments of one layer."""

    view: LatentView
    projection: LatentProjection
    scale: float
    selection: TorchSelection

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """latent [L, R], rope [L, Dr] -> k [L, Hq, Dn + Dr], v [L, Hq, Dv]."""
        heads, dim, _ = self.projection.key.shape
        k = latent.new_empty((len(latent), heads, dim + rope.shape[1]))
        k[..., :dim] = torch.einsum("lr,hdr->lhd", latent, self.projection.key)
        k[..., dim:] = rope[:, None]
        return k, torch.einsum("lr,hdr->lhd", latent, self.projection.value)

    def expanded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token, both padded to the wider of the two."""
        heads, dim, _ = self.projection.key.shape
        return 2 * heads * max(dim + self.view.rope_dim, self.projection.value.shape[1]) * dtype.itemsize


class LatentAttention:
    """Attention plan of all MLA layers.

    Args:
        expanded_bytes: limit of the keys and values that are expanded from cached latents at a time.
    """

    def __init__(self, layout: StepLayout, *, expanded_bytes: int) -> None:
        self._layout = layout
        self._expanded_bytes = expanded_bytes

    def attend(self, layer: LatentLayer, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        inputs, layout = self._layout.inputs, self._layout
        places = inputs.places[layer.view.space]
        latent, rope = inputs.exchange.gather_parts(latent, rope)
        layer.view.write(places.slots, latent[places.owned], rope[places.owned])
        cached = self._cached(layer, inputs.exchange.gather(q), places.prefixes) if layout.has_cached else None
        causal = self._causal(layer, q, latent, rope) if layout.has_causal else None
        if cached is None and causal is None:
            return q.new_empty((len(q), *layer.projection.value.shape[:2]))
        return layout.combine(cached, causal, None)

    def _cached(self, layer: LatentLayer, q: Tensor, prefixes: tuple[Prefix, ...]) -> Part:
        """All queries [T, Hq, Dn + Dr] against the tokens in this rank's pages."""
        out, lse = no_keys(q, layer.projection.value.shape[1])
        if self._layout.singles:
            singles = self._layout.single_tokens
            out[singles], lse[singles] = self._absorbed(layer, q[singles], prefixes)
        for chunk in self._layout.chunks:
            tokens, prefix = chunk.tokens, prefixes[chunk.row]
            if prefix.runs:
                out[tokens], lse[tokens] = self._expanded(layer, q[tokens], chunk, prefix)
        return out, lse

    def _absorbed(self, layer: LatentLayer, q: Tensor, prefixes: tuple[Prefix, ...]) -> Part:
        """Single queries [N, Hq, Dn + Dr], each against its row's latents as a single key head of size R + Dr."""
        plain, rotary = q.split([q.shape[2] - layer.view.rope_dim, layer.view.rope_dim], dim=2)
        absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", plain, layer.projection.key), rotary], dim=2)
        out, lse = no_keys(absorbed, absorbed.shape[2])
        for i, row in enumerate(self._layout.singles):
            slots = layer.selection.cached[row]
            if slots is not None and len(slots):
                rows = torch.cat(layer.view.take(slots, dtype=q.dtype), dim=1)[:, None]
            elif slots is None and prefixes[row].runs:
                rows = torch.cat(layer.view.read(prefixes[row].runs, dtype=q.dtype), dim=1)[:, None]
            else:
                continue
            # The latents are also the values. Dropping the rotary part of the result costs less than a copy.
            out[i : i + 1], lse[i : i + 1] = attend_all(absorbed[i : i + 1], rows, rows, scale=layer.scale)
        return torch.einsum("nhr,hvr->nhv", out[..., : layer.view.rank], layer.projection.value), lse

    def _expanded(self, layer: LatentLayer, q: Tensor, chunk: Chunk, prefix: Prefix) -> Part:
        """The queries of a chunk [n, Hq, Dn + Dr] against its cached tokens, piece after piece."""
        mask = layer.selection.cached[chunk.row]
        length = max(1, self._expanded_bytes // layer.expanded_bytes(q.dtype))
        # In the precision of the weights, since every piece adds to it.
        out, lse = no_keys(q, layer.projection.value.shape[1])
        whole: Part = (out.to(wide(q.dtype)), lse)
        begin = 0
        for runs, count in pieces(prefix.runs, length):
            k, v = layer.expand(*layer.view.read(runs, dtype=q.dtype))
            if mask is None:
                part = attend_all(q, k, v, scale=layer.scale)
            else:
                part = attend_masked(q, k, v, mask[:, begin : begin + count], scale=layer.scale)
            whole = join(whole, part)
            begin += count
        return whole[0].to(q.dtype), whole[1]

    def _causal(self, layer: LatentLayer, q: Tensor, latent: Tensor, rope: Tensor) -> Part:
        """This rank's queries [T_local, Hq, Dn + Dr] against the new latents [T, R] of their row up to themselves."""
        out, lse = no_keys(q, layer.projection.value.shape[1])
        for chunk in self._layout.chunks:
            if not chunk.runs:
                continue
            k, v = layer.expand(latent[chunk.tokens], rope[chunk.tokens])
            mask = layer.selection.causal[chunk.row]
            for local, run in chunk.local_runs():
                if mask is None:
                    out[local], lse[local] = attend_run(q[local], k, v, run, scale=layer.scale)
                else:
                    mine = mask[local.start - chunk.local.start : local.stop - chunk.local.start, : run.stop]
                    part = attend_masked(q[local], k[: run.stop], v[: run.stop], mine, scale=layer.scale)
                    out[local], lse[local] = part
        return out, lse


def pieces(runs: Runs, length: int) -> Iterator[tuple[Runs, int]]:
    """Split runs into pieces of `length` slots, the last one maybe shorter; yields each with its length."""
    piece: list[tuple[int, int]] = []
    missing = length
    for start, count in runs:
        first, left = start, count
        while left:
            taken = min(missing, left)
            piece.append((first, taken))
            first, left, missing = first + taken, left - taken, missing - taken
            if not missing:
                yield piece, length
                piece, missing = [], length
    if piece:
        yield piece, length - missing
