"""FlashInfer's kernels, one object per use: planned once per step, then run by all layers of a kind.

A plan says which block of the device computes what. It is made on the host and copied to the device from pinned memory
that the kernel's next plan overwrites: whoever plans waits until the copies of the plan before are done. What a run
leaves in the shared buffer is used up before the run ends. So all kernels of a `KernelCache` belong to one stream.

Shapes in this file: T queries, H heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.flashinfer_tables import Ints, Segments, Table, Tokens
from raycache.errors import ConfigError

PARTIAL_BYTES = 256 << 20
"""For results over parts of the keys: 264 tiles of 128 queries with 256 numbers take 35 MB; a recorded batch of 512
rows takes 16 queries per row and key head, with 32 of those and 128 numbers 134 MB."""

STATIC_PLAN_BYTES = 1 << 20
"""For the plan of a recorded batch, which has fewer than 16,384 tiles of 17 bytes; FlashInfer takes 8 MB otherwise."""

PIECE_PLAN_BYTES = 2 << 20
"""For the plan of one of many pieces, 28 bytes per head and 128 queries: those of 64k tokens with 128 heads."""

Kernel = TypeVar("Kernel")


@dataclass(frozen=True, slots=True)
class Heads:
    """What a kernel is made for.

    Attributes:
        queries, keys: heads.
        dim, value_dim: of each.
        dtype: of all.
        scale: of the scores.
    """

    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float


@dataclass(frozen=True, slots=True)
class StaticRows:
    """Bounds of a recorded batch.

    Attributes:
        num_rows: of one query each.
        max_pages: of a row.
    """

    num_rows: int
    max_pages: int


class KernelCache:
    """The kernels of one rank, and what they share.

    Args:
        device: of the rank.
    Attributes:
        device: as given.
        lib: the package.
        newest: "fa3" where the device has what that needs, else "fa2".
        num_blocks: that a kernel of "fa2" runs at once.
        partial: uint8, for results over parts of the keys.
    """

    def __init__(self, device: torch.device) -> None:
        # It exists on GPU machines only, and takes seconds to import.
        import flashinfer

        self.device = device
        self.lib: Any = flashinfer
        self.newest = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self.num_blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self.partial = torch.empty(PARTIAL_BYTES, dtype=torch.uint8, device=device)
        self._kernels: dict[Hashable, Any] = {}

    def kernel(self, key: Hashable, make: Callable[[], Kernel]) -> Kernel:
        """The kernel of a use, made at its first: its buffers and pinned memory serve all steps."""
        if key not in self._kernels:
            self._kernels[key] = make()
        found: Kernel = self._kernels[key]
        return found

    def on_device(self, numbers: NDArray[Any]) -> Tensor:
        """A copy on the device, without waiting for it."""
        return torch.from_numpy(np.ascontiguousarray(numbers)).pin_memory().to(self.device, non_blocking=True)

    def pinned(self, *columns: Ints) -> Sequence[Tensor]:
        """Copies on the host from which copies to the device need not wait; in one piece, since each takes time."""
        every = torch.from_numpy(np.concatenate(columns)).pin_memory()
        parts: Sequence[Tensor] = every.split([len(column) for column in columns])
        return parts

    def tokens(self, tokens: Tokens) -> Tokens:
        """The same on the device."""
        if isinstance(tokens, slice):
            return tokens
        return tokens.pin_memory().to(self.device, non_blocking=True)

    @contextmanager
    def building(self, name: str) -> Iterator[None]:
        """Around what may compile a kernel: that it could not is a setting that cannot work."""
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, OSError) as cause:
            first = str(cause).strip().splitlines() or [type(cause).__name__]
            raise ConfigError(
                f"FlashInfer's kernel {name} cannot be had: {first[0]}; install the CUDA toolkit (nvcc) and ninja, "
                "with which it is compiled, or use --attention torch"
            ) from cause


class PagedKernel:
    """Queries against keys and values in pages.

    Args:
        kernels: whose buffer to use.
        family: "fa2" shares a key head's tile among its query heads and splits keys, which is best for few queries per
            row; "fa3" keeps the matrix units of a Hopper busy where there are many.
        static: for a recorded batch.
    """

    def __init__(self, kernels: KernelCache, family: str, static: StaticRows | None) -> None:
        self._kernels, self._family, self._static = kernels, family, static
        buffers: dict[str, Any] = {}
        if static is not None:
            counts = {"qo_indptr": 1, "paged_kv_indptr": 1, "paged_kv_last_page_len": 0}
            for name, more in counts.items():
                buffers[f"{name}_buf"] = _ints(static.num_rows + more, kernels.device)
            buffers["paged_kv_indices_buf"] = _ints(static.num_rows * static.max_pages, kernels.device)
        self._wrapper = kernels.lib.BatchPrefillWithPagedKVCacheWrapper(
            kernels.partial, "NHD", use_cuda_graph=static is not None, backend=family, **buffers
        )
        if static is not None:
            plan = torch.empty(STATIC_PLAN_BYTES, dtype=torch.uint8, device=kernels.device)
            self._wrapper.reset_workspace_buffer(kernels.partial, plan)

    def plan(self, table: Table, heads: Heads, *, is_causal: bool, window: int) -> None:
        """Prepare for a step.

        Args:
            table: of the rows.
            heads: of the layers.
            is_causal: the queries stand at the end of the keys, and see none behind themselves.
            window: keys that a query sees, itself included; 0 for all.
        """
        kernels, static = self._kernels, self._static
        queries, indptr, last, lens, ids = kernels.pinned(
            table.queries, table.indptr, table.last, table.lens, table.ids
        )
        with kernels.building(f"{self._family} for heads of {heads.dim} in {heads.dtype}{_windowed(window)}"):
            self._wrapper.plan(
                queries,
                indptr,
                # Of a recorded batch FlashInfer would wait for a copy from the host.
                ids.to(kernels.device, non_blocking=True),
                last,
                heads.queries,
                heads.keys,
                heads.dim,
                table.page_len,
                causal=is_causal,
                sm_scale=heads.scale,
                window_left=window - 1,
                q_data_type=heads.dtype,
                seq_lens=lens,
                # With as many rows no keys would be split; what joins the parts of a recorded batch would run still.
                disable_split_kv=static is not None and static.num_rows >= kernels.num_blocks // heads.keys,
                uniform_q_len=None if static is None else 1,
            )

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, has_lse: bool) -> tuple[Tensor, Tensor | None]:
        """q [T, Hq, D], k and v [P, R, Hkv, D] -> [T, Hq, D], and if wanted the log-sum-exp of the scores [T, Hq]."""
        # Its own would be zeroed first.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        found = self._wrapper.run(q, (k, v), out=out, return_lse=has_lse, lse_base="ln")
        return (found[0], found[1]) if has_lse else (found, None)


class RaggedKernel:
    """Queries against keys and values that are packed like themselves.

    Args:
        kernels: whose buffer to use.
        is_piece: one of many, so that small buffers matter.
    """

    def __init__(self, kernels: KernelCache, *, is_piece: bool = False) -> None:
        self._kernels = kernels
        self._wrapper = kernels.lib.BatchPrefillWithRaggedKVCacheWrapper(kernels.partial, "NHD", backend=kernels.newest)
        if is_piece:
            plan = torch.empty(PIECE_PLAN_BYTES, dtype=torch.uint8, device=kernels.device)
            self._wrapper.reset_workspace_buffer(kernels.partial, plan)

    def plan(self, segments: Segments, heads: Heads, *, is_causal: bool, window: int = 0) -> None:
        """Prepare for a step; see PagedKernel.plan."""
        kernels = self._kernels
        name = f"{kernels.newest} for heads of {heads.dim} and {heads.value_dim} in {heads.dtype}{_windowed(window)}"
        with kernels.building(name):
            self._wrapper.plan(
                *kernels.pinned(segments.queries, segments.keys),
                heads.queries,
                heads.keys,
                heads.dim,
                heads.value_dim,
                causal=is_causal,
                window_left=window - 1,
                sm_scale=heads.scale,
                q_data_type=heads.dtype,
            )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [T, Hq, Dv], and the log-sum-exp of the scores [T, Hq]."""
        out, lse = self._wrapper.run(q, k, v, return_lse=True, lse_base="ln")
        return out, lse


class LatentKernel:
    """Absorbed queries against latents in pages, which are keys and values at once.

    Args:
        kernels: whose buffer to use.
        static: for a recorded batch.
    Attributes:
        ids: int32, where a recorded batch reads the ids of its pages.
    """

    def __init__(self, kernels: KernelCache, static: StaticRows | None) -> None:
        self._kernels, self._has_lse = kernels, False
        buffers: dict[str, Any] = {}
        if static is not None:
            buffers = {
                "qo_indptr": _ints(static.num_rows + 1, kernels.device),
                "kv_indptr": _ints(static.num_rows + 1, kernels.device),
                "kv_indices": _ints(static.num_rows * static.max_pages, kernels.device),
                "kv_len_arr": _ints(static.num_rows, kernels.device),
            }
        self._wrapper = kernels.lib.mla.BatchMLAPagedAttentionWrapper(
            kernels.partial, use_cuda_graph=static is not None, backend=kernels.newest, **buffers
        )
        self.ids: Tensor | None = buffers.get("kv_indices")

    def plan(self, table: Table, heads: Heads, ids: Tensor, *, is_causal: bool, has_lse: bool) -> None:
        """Prepare for a step; see PagedKernel.plan.

        Args:
            table: of the rows.
            heads: `dim` is that of the rotary part, `value_dim` the rank of the latents.
            ids: int32, the pages on the device, instead of those in the table; read by `run`, not before, except of a
                recorded batch, which reads `self.ids`.
            is_causal: the queries stand at the end of the latents, and see none behind themselves.
            has_lse: whether `run` also gives the log-sum-exp.
        """
        kernels, self._has_lse = self._kernels, has_lse
        queries, indptr, lens = kernels.pinned(table.queries, table.indptr, table.lens)
        with kernels.building(f"{kernels.newest} for latents of {heads.value_dim} in {heads.dtype}"):
            self._wrapper.plan(
                metadata=kernels.lib.mla.MLAPlanMetadata.csr(queries, indptr, ids, lens),
                num_heads=heads.queries,
                head_dim_ckv=heads.value_dim,
                head_dim_kpe=heads.dim,
                page_size=table.page_len,
                causal=is_causal,
                sm_scale=heads.scale,
                q_data_type=heads.dtype,
                kv_data_type=heads.dtype,
                query_layout="split",
                kv_cache_layout="split",
                lse_mode="basee" if has_lse else "none",
            )

    def run(self, q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor | None]:
        """q [T, H, Rank] and q_rope [T, H, Dr], latent [P, R, Rank] and rope [P, R, Dr] -> [T, H, Rank], lse [T, H]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        found = self._wrapper.run(
            query=(q, q_rope),
            kv_cache=(latent, rope),
            out=out,
            return_lse=self._has_lse,
            return_lse_base_on_e=self._has_lse,
        )
        return (found[0], found[1]) if self._has_lse else (found, None)


class Writer:
    """Puts the new rows of one component space into its pages, in one launch per layer.

    FlashInfer writes to places within rows of pages. Here every slot is a page of one token and a row of its own.

    Args:
        kernels: of the rank.
        slots: int64 [T], where the rows go; read again by `refresh`.
    """

    def __init__(self, kernels: KernelCache, slots: Tensor) -> None:
        self._lib = kernels.lib
        self._indptr = torch.arange(len(slots) + 1, dtype=torch.int32, device=kernels.device)
        self._rows = self._indptr[:-1]
        self._zeros = torch.zeros(len(slots), dtype=torch.int32, device=kernels.device)
        self._ones = torch.ones(len(slots), dtype=torch.int32, device=kernels.device)
        self._slots = slots.to(torch.int32)

    def refresh(self, slots: Tensor) -> None:
        """Other slots, as many."""
        self._slots.copy_(slots)

    def write_kv(self, owned: Tensor, k: Tensor, v: Tensor, *, to: tuple[Tensor, Tensor]) -> None:
        """Those of the tokens k, v [T, Hkv, D] that this rank owns -> [P, R, Hkv, D] each."""
        self._write(self._lib.append_paged_kv_cache, owned, k, v, to)

    def write_latents(self, owned: Tensor, latent: Tensor, rope: Tensor, *, to: tuple[Tensor, Tensor]) -> None:
        """Those of the tokens latent [T, Rank], rope [T, Dr] that this rank owns -> [P, R, Rank], [P, R, Dr]."""
        self._write(self._lib.append_paged_mla_kv_cache, owned, latent, rope, to)

    def _write(self, append: Any, owned: Tensor, one: Tensor, other: Tensor, to: tuple[Tensor, Tensor]) -> None:
        if not len(owned):
            return
        # As many as all are all, in order.
        if len(owned) < len(one):
            one, other = one[owned], other[owned]
        pages = tuple(x.flatten(0, 1)[:, None] for x in to)
        if len(one.shape) == 2:
            append(one, other, self._rows, self._zeros, *pages, self._slots, self._indptr, self._ones)
        else:
            append(one, other, self._rows, self._zeros, pages, self._slots, self._indptr, self._ones)


def _windowed(window: int) -> str:
    return " with a window" if window else ""


def _ints(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
