"""Attention of recorded steps of few tokens whose rows have any number of them, to keys and values in pages.

FlashInfer's plans differ in size from step to step, so a graph cannot hold them: see short_kernels.py.
"""

from __future__ import annotations

from torch import Tensor

from raycache.attention.base import LatentProjection, NotRecordableError, RecurrentStep, Selection
from raycache.attention.flashinfer_full import Layers, why_not_full
from raycache.attention.flashinfer_kernels import Heads, KernelCache
from raycache.attention.page_writer import Writer
from raycache.attention.query_tiles import QUERIES, QueryTiles, TileRow
from raycache.attention.triton_works import triton_works
from raycache.memory.views import IndexView, KVView, LatentView
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

MOST_DIM = 128
"""Largest head size: wider ones do not fit into registers beside their keys."""


class FlashInferShortStep:
    """A step of few tokens for a CUDA graph, with one cp rank; see StaticStep. Only layers that keep keys and values
    can be recorded.

    Args:
        kernels: of the rank.
        inputs: of a batch of any rows.
        max_pages: of a row.
    """

    def __init__(self, kernels: KernelCache, inputs: StepInputs, *, max_pages: int) -> None:
        self._kernels, self._inputs, self._max_pages = kernels, inputs, max_pages
        self._plans: dict[Layers, _Plan] = {}

    def replan(self, inputs: StepInputs) -> None:
        """Plan the next replay with other rows, pages and slots."""
        self._inputs = inputs
        for layers, plan in self._plans.items():
            plan.fill(inputs, space=layers.space)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """Keys and values."""
        heads = Heads(q.shape[1], k.shape[1], q.shape[2], q.shape[2], q.dtype, scale)
        if reason := why_not_full(view, q) or _why_not_short(heads):
            raise NotRecordableError(f"there is no kernel for {reason}")
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.short_kernels import attend

        layers = Layers(view.space, view.window, heads)
        if layers not in self._plans:
            self._plans[layers] = _Plan(self._kernels, layers, self._inputs, max_pages=self._max_pages)
        plan = self._plans[layers]
        plan.writer.write_kv(self._inputs.places[view.space].owned, k, v, to=(view.k, view.v))
        return attend(q, view.k, view.v, plan.tiles, scale=scale, sinks=sinks)

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
        """Not recorded."""
        raise NotRecordableError("they attend to latents")

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        """Not recorded."""
        raise NotRecordableError("they have an indexer")

    @property
    def recurrent(self) -> RecurrentStep:
        """Not recorded."""
        raise NotRecordableError("they have recurrent layers")

    @property
    def exchange(self) -> Exchange:
        """Of the inputs."""
        return self._inputs.exchange


class _Plan:
    """What layers of one kind read and write.

    Attributes:
        tiles: of the step planned last.
        writer: to its slots.
    """

    def __init__(self, kernels: KernelCache, layers: Layers, inputs: StepInputs, *, max_pages: int) -> None:
        heads, count = layers.heads, inputs.num_tokens
        self.tiles = QueryTiles(
            count,
            max_pages=count * max_pages,
            group=heads.queries // heads.keys,
            num_programs=kernels.num_blocks // heads.keys,
            window=layers.window,
            buffer=kernels.partial,
        )
        self.writer = Writer(kernels, inputs.places[layers.space].slots)
        self.fill(inputs, space=layers.space)

    def fill(self, inputs: StepInputs, *, space: str) -> None:
        """Plan a step; tokens behind its rows are padding."""
        places = inputs.places[space]
        begins = (places.pages.first * places.page_size).tolist()
        rows = [
            TileRow(row.tokens.start, len(row.tokens), row.start - begin)
            for row, begin in zip(inputs.rows, begins, strict=True)
        ]
        if (rest := inputs.num_tokens - sum(row.count for row in rows)) > 0:
            rows.append(TileRow(inputs.num_tokens - rest, rest, -rest))
        self.writer.refresh(places.slots)
        self.tiles.fill(rows, places.pages)


def _why_not_short(heads: Heads) -> str | None:
    """What of a layer has no kernel, or None."""
    if not triton_works():
        return "short steps without Triton"
    if heads.dim > MOST_DIM or heads.queries // heads.keys > QUERIES:
        return f"short steps with {heads.queries} and {heads.keys} heads of {heads.dim}"
    return None
