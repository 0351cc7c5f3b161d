"""The reference backend: attention in plain torch, on any device; other backends are tested against it.

    out = merge( causal(new tokens of this chunk), all(prefix held by cp rank 0), ..., all(prefix held by cp rank n-1) )

1. Gather q, k, v of the new tokens over cp.
2. Write the tokens that this rank owns into its pages.
3. Causal part: this rank's queries against the chunk's keys.
4. Prefix part: all queries against this rank's tokens; partial results return to the queries' ranks by all-to-all.
5. Merge.

Chunks with keys and values under cp may gather cached keys instead of queries (passing.py).

    full.py    keys and values, with or without window    latent.py   MLA      sparse.py  sparse indexers
    states.py  recurrent layers                           layout.py   rows of a step by kind
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from raycache.attention.base import Capabilities, LatentProjection, Selection, StaticStep
from raycache.attention.full import FullAttention, PassedAttention
from raycache.attention.latent import LatentAttention, LatentLayer
from raycache.attention.layout import StepLayout
from raycache.attention.passing import PassedBytes, Passing
from raycache.attention.sparse import Indexer, TorchSelection, see_all
from raycache.attention.states import Recurrence
from raycache.memory.views import IndexView, KVView, LatentView
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

EXPANDED_BYTES = 128 << 20


class TorchBackend:
    """Plain torch attention.

    Args:
        expanded_bytes: limit of the keys and values expanded from cached latents at a time, at least one token's.
    """

    capabilities = Capabilities(
        name="torch",
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
    )

    def __init__(self, *, expanded_bytes: int = EXPANDED_BYTES) -> None:
        self._expanded_bytes = expanded_bytes

    def plan(self, inputs: StepInputs) -> TorchStep:
        """Prepare one step."""
        return TorchStep(inputs, expanded_bytes=self._expanded_bytes)

    def plan_static(self, inputs: StepInputs, *, has_chunks: bool = False) -> StaticStep:
        """Not supported: steps process rows one by one on the host."""
        raise AssertionError("the torch backend does not support CUDA graphs")


class TorchStep:
    """Attention of one step. Each kind of layer is planned when the first layer of the kind runs."""

    def __init__(self, inputs: StepInputs, *, expanded_bytes: int) -> None:
        self._inputs = inputs
        self._layout = StepLayout(inputs)
        self._full: dict[str, FullAttention] = {}
        self._passed: dict[str, PassedAttention] = {}
        self._indexers: dict[str, Indexer] = {}
        self._latent = LatentAttention(self._layout, expanded_bytes=expanded_bytes)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """Attention to keys and values."""
        if self._layout.chunks and self._inputs.ctx.cp.size > 1:
            return self._passed_plan(view, q, k).attend(view, q, k, v, scale=scale, sinks=sinks)
        places = self._inputs.places[view.space]
        if view.space not in self._full:
            self._full[view.space] = FullAttention(self._layout, places.prefixes, window=view.window)
        plan = self._full[view.space]
        every_q, every_k, every_v = self._gather(q, k, v)
        view.write(places.slots, every_k[places.owned], every_v[places.owned])
        cached = plan.cached(view, every_q, scale=scale) if self._layout.has_cached else None
        causal = plan.causal(q, every_k, every_v, scale=scale) if self._layout.has_causal else None
        if cached is None and causal is None:
            return torch.empty_like(q)
        return self._layout.combine(cached, causal, sinks)

    def attend_latent(
        self,
        view: LatentView,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        projection: LatentProjection,
        *,
        scale: float,
        selection: Selection | None,
    ) -> Tensor:
        """Attention to latents."""
        if selection is None:
            selection = see_all(self._inputs)
        assert isinstance(selection, TorchSelection), "a selection is used by the backend that made it"
        return self._latent.attend(LatentLayer(view, projection, scale, selection), q, latent, rope)

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> TorchSelection:
        """Selection by index keys."""
        if view.space not in self._indexers:
            self._indexers[view.space] = Indexer(self._layout, self._inputs.places[view.space].prefixes)
        return self._indexers[view.space].select(view, q, k, weights, top_k=top_k)

    @cached_property
    def recurrent(self) -> Recurrence:
        """Convolutions and scans."""
        return Recurrence(self._layout)

    @property
    def exchange(self) -> Exchange:
        """Exchange of tokens and heads between cp ranks."""
        return self._inputs.exchange

    def _passed_plan(self, view: KVView, q: Tensor, k: Tensor) -> PassedAttention:
        if view.space not in self._passed:
            _, heads, dim = q.shape
            moved = PassedBytes.of(queries=heads, dim=dim, value_dim=dim, key=2 * k.shape[1] * dim, dtype=q.dtype)
            # As a rank with kernels, which has none for the queries of chunks to a part of their window.
            passing = Passing(self._layout, view.space, None if view.window else moved)
            self._passed[view.space] = PassedAttention(self._layout, view.space, passing, window=view.window)
        return self._passed[view.space]

    def _gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's [T_local, H, D] -> all cp ranks' [T, H, D]."""
        every_q, every_k, every_v = self._inputs.exchange.gather_parts(q, k, v)
        return every_q.contiguous(), every_k, every_v
