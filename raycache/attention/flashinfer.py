"""The backend for CUDA devices: FlashInfer kernels, with the same formula as torch_ref.py.

Where FlashInfer has no kernel, the torch backend's step is used, which is logged once.

    flashinfer_full.py      keys and values         flashinfer_kernels.py  wrappers of the kernels
    flashinfer_latent.py    MLA                     flashinfer_replans.py  plans of CUDA graphs
    flashinfer_selected.py  MLA, selected tokens    flashinfer_tables.py   rows in the layout of the kernels
    selected_latent.py      the same under cp and in float8, in Triton
    flashinfer_short.py     recorded short steps, in Triton
    fp8_latent.py           MLA in float8, in Triton
    recurrent_kernels.py    recurrent, in Triton    sparse_kernels.py      sparse indexers, in Triton
    flashinfer_passed.py    keys and values of chunks under cp
    flashinfer_copied.py    the same, with exchanges beside attention
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.attention import flashinfer_copied, fp8_latent
from raycache.attention.base import Capabilities, LatentProjection, NotRecordableError, Selection
from raycache.attention.flashinfer_full import HALF_TYPES, FullKernels, Layers, why_not_full
from raycache.attention.flashinfer_kernels import Heads, KernelCache
from raycache.attention.flashinfer_latent import LatentKernels, LatentLayers
from raycache.attention.flashinfer_passed import PassedKernels
from raycache.attention.flashinfer_replans import StaticRows
from raycache.attention.flashinfer_selected import SelectedKernels, SlotChoice, attend_choice
from raycache.attention.flashinfer_short import FlashInferShortStep
from raycache.attention.layout import StepLayout
from raycache.attention.passing import Passing
from raycache.attention.selected_latent import SlotAttention
from raycache.attention.sparse import TorchSelection
from raycache.attention.torch_ref import TorchStep
from raycache.attention.triton_works import triton_works
from raycache.memory.views import IndexView, KVView, LatentView
from raycache.parallel.copy_exchange import CopyExchange
from raycache.step.exchange import Exchange
from raycache.step.inputs import StepInputs

if TYPE_CHECKING:
    from raycache.attention.recurrent_kernels import KernelRecurrence
    from raycache.attention.sparse_kernels import KernelIndexer

_log = logging.getLogger(__name__)

LATENT_DIMS = (512, 64)
EXPANDED_DIMS = ((192, 128), (64, 64), (128, 128), (256, 256))
"""Features of a head's key and value where keys and values are computed from latents."""

EXPANDED_BYTES = 512 << 20
"""Limit of the keys and values expanded from cached latents at a time. Each piece costs a pass over the chunk's
results, 5 % of its work for 128 heads."""


class FlashInferBackend:
    """FlashInfer on one device; its steps run on one stream.

    Args:
        max_pages: maximum number of pages per row.
        max_tokens: maximum number of new tokens per step; 0: ranks exchange nothing by copy engines.
        expanded_bytes: limit of the keys and values expanded from cached latents at a time, at least one token's.
    """

    capabilities = Capabilities(
        name="flashinfer",
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
        can_capture=True,
    )

    def __init__(
        self, device: torch.device, *, max_pages: int, max_tokens: int = 0, expanded_bytes: int = EXPANDED_BYTES
    ) -> None:
        self.kernels = KernelCache(device)
        self.max_tokens, self.expanded_bytes = max_tokens, expanded_bytes
        self._max_pages = max_pages
        self._logged: set[str] = set()

    def plan(self, inputs: StepInputs) -> FlashInferStep:
        """Prepare one step."""
        return FlashInferStep(self, inputs)

    def plan_static(
        self, inputs: StepInputs, *, has_chunks: bool = False
    ) -> FlashInferStaticStep | FlashInferShortStep:
        """Prepare a step for many batches."""
        if has_chunks:
            return FlashInferShortStep(self.kernels, inputs, max_pages=self._max_pages)
        return FlashInferStaticStep(self, inputs, static=StaticRows(len(inputs.rows), self._max_pages))

    def warn_once(self, reason: str) -> None:
        """Log why the torch backend is used."""
        if reason not in self._logged:
            self._logged.add(reason)
            _log.warning("attention: no kernel for %s; using torch, which is much slower", reason)


class FlashInferStep:
    """Attention of one step; see AttentionStep. What a kind of layer needs is planned when its first layer comes.

    Args:
        backend: of the rank.
        inputs: of the step.
        static: for a recorded batch.
    """

    def __init__(self, backend: FlashInferBackend, inputs: StepInputs, *, static: StaticRows | None = None) -> None:
        self._backend, self._inputs, self._static = backend, inputs, static
        self._layout = StepLayout(inputs)
        self._full: dict[Layers, FullKernels] = {}
        self._passings: dict[Layers, Passing] = {}
        self._passed: dict[Layers, PassedKernels] = {}
        self._latent: dict[LatentLayers, LatentKernels] = {}
        self._selected: dict[LatentLayers, SelectedKernels | SlotAttention] = {}
        self._indexers: dict[str, KernelIndexer] = {}
        self._plain: TorchStep | None = None

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        """Keys and values."""
        heads = Heads(q.shape[1], k.shape[1], q.shape[2], q.shape[2], q.dtype, scale)
        layers = Layers(view.space, view.window, heads)
        passing, reason = self._passing(layers), why_not_full(view, q)
        if reason is None and view.window and self._inputs.ctx.cp.size > 1 and not triton_works():
            reason = "windows under cp without Triton"
        if reason is not None:
            return self._torch(reason).attend(view, q, k, v, scale=scale, sinks=sinks)
        if passing is not None:
            if layers not in self._passed:
                copies, most = self._copies(layers), self._backend.max_tokens
                copies = copies if flashinfer_copied.takes(layers, passing, max_tokens=most) else None
                self._passed[layers] = PassedKernels(self._backend.kernels, layers, self._layout, passing, copies)
            return self._passed[layers].attend(view, q, k, v, sinks)
        if layers not in self._full:
            self._full[layers] = FullKernels(self._backend.kernels, layers, self._layout, self._static)
        return self._full[layers].attend(view, q, k, v, sinks)

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
        """Latents."""
        reason = _why_not_latent(view, q)
        if isinstance(selection, SlotChoice):
            if reason is None:
                kernels = self._selected_plan(_latent_layers(view, q, projection, scale), selection)
                return kernels.attend(view, q, latent, rope, projection, selection)
            self._leave_to_torch(reason)
            return attend_choice(self._layout, view, q, latent, rope, projection, selection, scale=scale)
        if reason is None and self._layout.chunks:
            reason = _why_not_expanded(q, projection)
        if reason is None and selection is not None and not _sees_all(selection):
            reason = "a selection that torch made"
        if reason is not None:
            plain = self._torch(reason)
            return plain.attend_latent(view, q, latent, rope, projection, scale=scale, selection=selection)
        return self._latent_plan(_latent_layers(view, q, projection, scale)).attend(view, q, latent, rope, projection)

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> Selection:
        """Index keys."""
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.sparse_kernels import KernelIndexer, missing_kernel

        places = self._inputs.places[view.space]
        if reason := missing_kernel(view, q, top_k=top_k):
            return self._torch(reason).select(view, q, k, weights, top_k=top_k)
        if view.space not in self._indexers:
            max_len = 0 if self._static is None else self._static.max_pages * places.page_size
            self._indexers[view.space] = KernelIndexer(self._layout, places, max_len=max_len)
        found = self._indexers[view.space].select(view, q, k, weights, top_k=top_k)
        return SlotChoice(found.slots, found.lengths, top_k)

    @cached_property
    def recurrent(self) -> KernelRecurrence:
        """Convolutions and scans."""
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.recurrent_kernels import KernelRecurrence

        return KernelRecurrence(self._layout)

    @property
    def exchange(self) -> Exchange:
        """Of the inputs."""
        return self._inputs.exchange

    def _passing(self, layers: Layers) -> Passing | None:
        """How rows are passed between cp ranks in a step with chunks."""
        if self._inputs.ctx.cp.size == 1 or not self._layout.chunks:
            return None
        if layers not in self._passings:
            # Those of a window are few, and only single tokens have a kernel that attends to a rank's share of them.
            moved = None if layers.window else layers.moved
            if moved is not None and self._copies(layers) is not None:
                moved = moved.with_copies(
                    least_tokens=self._inputs.ctx.cp.size * flashinfer_copied.least_tokens(layers)
                )
            self._passings[layers] = Passing(self._layout, layers.space, moved)
        return self._passings[layers]

    def _copies(self, layers: Layers) -> CopyExchange | None:
        return flashinfer_copied.copies_of(layers, self._inputs.ctx.cp, max_tokens=self._backend.max_tokens)

    def _latent_plan(self, layers: LatentLayers) -> LatentKernels:
        if layers not in self._latent:
            bound = self._backend.expanded_bytes
            self._latent[layers] = LatentKernels(
                self._backend.kernels, layers, self._layout, expanded_bytes=bound, static=self._static
            )
        return self._latent[layers]

    def _selected_plan(self, layers: LatentLayers, choice: SlotChoice) -> SelectedKernels | SlotAttention:
        if layers not in self._selected:
            kernels, layout = self._backend.kernels, self._layout
            if layers.is_fp8 or self._inputs.ctx.cp.size > 1:
                self._selected[layers] = SlotAttention(kernels, layers, layout)
            else:
                self._selected[layers] = SelectedKernels(kernels, layers, layout, choice, self._static)
        return self._selected[layers]

    def _torch(self, reason: str) -> TorchStep:
        """The torch backend's step of the same inputs."""
        self._leave_to_torch(reason)
        if self._plain is None:
            self._plain = TorchStep(self._inputs, expanded_bytes=self._backend.expanded_bytes)
        return self._plain

    def _leave_to_torch(self, reason: str) -> None:
        if self._static is not None:
            raise NotRecordableError(f"there is no kernel for {reason}")
        self._backend.warn_once(reason)


class FlashInferStaticStep(FlashInferStep):
    """A step of a decode batch for a CUDA graph. Its first run, before the capture, makes the plans."""

    def replan(self, inputs: StepInputs) -> None:
        """Plan the next replay with other rows."""
        self._inputs = self._layout.inputs = inputs
        for layers, full in self._full.items():
            full.replan(inputs.places[layers.space])
        for latents, latent in self._latent.items():
            latent.replan(inputs.places[latents.space])
        for selected in self._selected.values():
            selected.replan(inputs)
        for space, indexer in self._indexers.items():
            indexer.replan(inputs, inputs.places[space])


def _why_not_latent(view: LatentView, q: Tensor) -> str | None:
    """What of a layer has no kernel, or None, where all queries are absorbed."""
    stored = view.pages[0].dtype
    if q.dtype not in HALF_TYPES or stored not in (q.dtype, torch.float8_e4m3fn):
        return f"latent attention in {q.dtype} over a cache in {stored}"
    if (view.rank, view.rope_dim) != LATENT_DIMS:
        return f"latents of {view.rank} and {view.rope_dim}"
    if stored != q.dtype and (why := fp8_latent.obstacle(q.device)):
        return f"latents in {stored} {why}"
    return None


def _why_not_expanded(q: Tensor, projection: LatentProjection) -> str | None:
    """The same where keys and values may be computed from latents: in steps with chunks, without a selection."""
    dims = q.shape[2], projection.value.shape[1]
    return None if dims in EXPANDED_DIMS else f"latents for heads of {dims[0]} and {dims[1]}"


def _latent_layers(view: LatentView, q: Tensor, projection: LatentProjection, scale: float) -> LatentLayers:
    heads, value_dim, _ = projection.value.shape
    return LatentLayers(
        view.space,
        Heads(heads, heads, q.shape[2], value_dim, q.dtype, scale),
        view.rank,
        view.rope_dim,
        is_fp8=view.pages[0].dtype == torch.float8_e4m3fn,
    )


def _sees_all(selection: Selection) -> bool:
    assert isinstance(selection, TorchSelection), "a selection is used by the backend that made it"
    return all(one is None for one in (*selection.cached, *selection.causal))
