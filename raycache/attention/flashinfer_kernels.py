"""Wrappers of FlashInfer's kernels, which are planned once per step and run by all layers of a kind.

A plan assigns work to thread blocks. It is made on the host and copied to the device from pinned memory that the
kernel's next plan overwrites, so planning a kernel again waits until that copy has ended (`PinnedUse`). Runs use a
shared buffer for intermediate results, so all kernels of a `KernelCache` must run on one stream.

Shapes in this file: T queries, H heads, D head size, P pages, R tokens of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.flashinfer_replans import Planner, Replans, Shortcut, StaticRows, StaticTable
from raycache.attention.flashinfer_tables import Ints, Segments, Table, Tokens
from raycache.errors import ConfigError
from raycache.memory.streams import PinnedUse
from raycache.parallel.uploads import uploaded

PARTIAL_BYTES = 256 << 20
"""Buffer for results over parts of the keys: 264 tiles of 128 queries with 256 features take 35 MB; a CUDA graph of 512
rows takes 16 queries per row and key head, 134 MB with 32 key heads and 128 features."""

STATIC_PLAN_BYTES = 1 << 20
"""Buffer for the plan of a CUDA graph: fewer than 16,384 tiles of 17 bytes. FlashInfer's default is 8 MB."""

PIECE_PLAN_BYTES = 2 << 20
"""Buffer for the plan of a piece: 28 bytes per head and 128 queries, enough for 64k tokens with 128 heads."""

_MOST_CHECKED = 8192
"""Most tiles of queries that are planned without FlashInfer's checks: it has room for 16,384 parts of their keys, and
splits those of at most one tile per multiprocessor."""

FEW_QUERIES = 128
"""Rows with fewer queries use the kernel for few: that for many has tiles of 128 queries per head. On an H200, one row
of 128 after 8192 takes 83 us with the kernel for few and 120 us with the other, eight rows 402 and 246 us."""

WIDEST_OF_FA3 = 256
"""Largest head size that "fa3" has kernels for; larger heads (Gemma 4) use "fa2" for rows of any length."""

LseBase = Literal["ln", "log2"]
"""Of a log-sum-exp. FlashInfer's kernels give "log2"; "ln" is another launch."""

Kernel = TypeVar("Kernel")


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads that a kernel is made for.

    Attributes:
        queries, keys: number of query and key heads.
        dim, value_dim: features of keys and values.
        scale: of the scores.
    """

    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float


class KernelCache:
    """The kernels of one rank, and what they share.

    Attributes:
        lib: the flashinfer package.
        newest: "fa3" if the device supports it, else "fa2".
        num_blocks: thread blocks that a kernel of "fa2" runs at once.
        partial: uint8, buffer for results over parts of the keys.
        shortcut: for the plans of CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        # Installed on GPU machines only, and takes seconds to import.
        import flashinfer

        self.device = device
        self.lib: Any = flashinfer
        self.newest = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self.num_blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self.partial = torch.empty(PARTIAL_BYTES, dtype=torch.uint8, device=device)
        self.shortcut = Shortcut()
        self._kernels: dict[Hashable, Any] = {}

    def divides_keys(self, num_rows: int, heads: Heads) -> bool:
        """Whether FlashInfer can divide the keys of so many rows of one query: not where they alone fill the device."""
        return num_rows < self.num_blocks // heads.keys

    def family(self, dim: int, *, is_few: bool) -> str:
        """The family of kernels for rows with few or many queries of size `dim`, see `PagedKernel`."""
        return "fa2" if is_few or dim > WIDEST_OF_FA3 else self.newest

    def paged(self, key: Hashable, heads: Heads, *, is_few: bool) -> PagedKernel:
        """The kernel with this key, for rows with few or many queries. If both use one family, they have a plan each,
        since in one plan the keys of a row of few queries would not be split beside a long chunk."""
        family = self.family(heads.dim, is_few=is_few)
        return self.kernel((key, is_few), functools.partial(PagedKernel, self, family, None))

    def kernel(self, key: Hashable, make: Callable[[], Kernel]) -> Kernel:
        """The kernel with this key, made on first use; its buffers are reused in all steps."""
        if key not in self._kernels:
            self._kernels[key] = make()
        found: Kernel = self._kernels[key]
        return found

    def on_device(self, numbers: NDArray[Any]) -> Tensor:
        """Copy to the device asynchronously."""
        return uploaded(torch.from_numpy(np.ascontiguousarray(numbers)), self.device)

    def pinned(self, *columns: Ints) -> Sequence[Tensor]:
        """Copy to pinned memory, all at once, since each allocation takes time."""
        every = torch.from_numpy(np.concatenate(columns)).pin_memory()
        parts: Sequence[Tensor] = every.split([len(column) for column in columns])
        return parts

    def tokens(self, tokens: Tokens) -> Tokens:
        """Copy an index to the device."""
        if isinstance(tokens, slice):
            return tokens
        return uploaded(tokens, self.device)

    @contextmanager
    def building(self, name: str) -> Iterator[None]:
        """Turn errors of a block that may compile a kernel into ConfigError."""
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, OSError) as cause:
            first = str(cause).strip().splitlines() or [type(cause).__name__]
            raise ConfigError(
                f"FlashInfer's kernel {name} cannot be compiled: {first[0]}; install the CUDA toolkit (nvcc) and "
                "ninja, or use --attention torch"
            ) from cause


class PagedKernel:
    """Queries against keys and values in pages.

    Args:
        family: "fa2" shares a key head's tile among its query heads and splits keys, which is best for few queries per
            row; "fa3" is best for many, on Hopper.
        static: for a CUDA graph.
    """

    def __init__(self, kernels: KernelCache, family: str, static: StaticRows | None) -> None:
        self._kernels, self._family, self._static = kernels, family, static
        self._planning = PinnedUse(kernels.device)
        self._replans: Replans | None = None
        buffers: dict[str, Any] = {}
        if static is not None:
            self._replans = Replans(static, kernels.device, kernels.shortcut)
            fixed = self._replans.table
            buffers = {
                "qo_indptr_buf": fixed.queries,
                "paged_kv_indptr_buf": fixed.indptr,
                "paged_kv_last_page_len_buf": fixed.last,
                "paged_kv_indices_buf": fixed.ids,
            }
        self._wrapper = kernels.lib.BatchPrefillWithPagedKVCacheWrapper(
            kernels.partial, "NHD", use_cuda_graph=static is not None, backend=family, **buffers
        )
        if static is not None:
            plan = torch.empty(STATIC_PLAN_BYTES, dtype=torch.uint8, device=kernels.device)
            self._wrapper.reset_workspace_buffer(kernels.partial, plan)

    def plan(self, table: Table, heads: Heads, *, is_causal: bool, window: int) -> None:
        """Plan a step.

        Args:
            is_causal: the queries are the last of the keys, and attend to none after themselves.
            window: number of keys that a query attends to, including itself; 0 for no limit.
        """
        by_wrapper = functools.partial(self._plan_by_wrapper, table, heads, is_causal=is_causal, window=window)
        planner = functools.partial(self._planner, table, heads, is_causal=is_causal, window=window)
        with self._planning:
            if self._replans is None:
                by_wrapper()
            else:
                self._replans.plan(table, by_wrapper, planner)

    def _plan_by_wrapper(self, table: Table, heads: Heads, *, is_causal: bool, window: int) -> Sequence[int]:
        kernels, static = self._kernels, self._static
        queries, indptr, last, lens, ids = kernels.pinned(
            table.queries, table.indptr, table.last, table.lens, table.ids
        )
        # For a CUDA graph, FlashInfer would wait for a copy from the host.
        on_device = uploaded(ids, kernels.device)
        with kernels.building(f"{self._family} for heads of {heads.dim} in {heads.dtype}{_windowed(window)}"):
            self._wrapper.plan(
                queries,
                indptr,
                on_device,
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
                disable_split_kv=self._is_whole(heads),
                uniform_q_len=None if static is None else 1,
            )
        info: Sequence[int] = self._wrapper._plan_info
        return info

    def _planner(self, table: Table, heads: Heads, *, is_causal: bool, window: int) -> Planner:
        assert self._static is not None
        wrapper, rows = self._wrapper, self._static.num_rows
        buffers = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        sizes = [rows, rows, heads.queries, heads.keys, table.page_len, True, heads.dim, heads.dim]
        # No fixed number of keys per part, no thread blocks of another kernel, and one query per row.
        options = [is_causal, window - 1, -1, self._is_whole(heads), 0, 1]
        return Planner(wrapper._cached_module.plan, buffers, sizes + options, is_copied=True)

    def _is_whole(self, heads: Heads) -> bool:
        """Whether keys are never split. With this many rows they would not be, but a CUDA graph would run the merge."""
        return self._static is not None and not self._kernels.divides_keys(self._static.num_rows, heads)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, lse_base: LseBase | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """q [T, Hq, D], k and v [P, R, Hkv, D] -> [T, Hq, D], and with a base the log-sum-exp of scores [T, Hq].

        Args:
            out: where to write the first result, contiguous; None for a new tensor.
        """
        if out is None:  # FlashInfer would zero an output that it allocates
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse_base is None:
            return self._wrapper.run(q, (k, v), out=out), None
        found: tuple[Tensor, Tensor] = self._wrapper.run(q, (k, v), out=out, return_lse=True, lse_base=lse_base)
        return found


class RaggedKernel:
    """Queries against packed keys and values.

    Args:
        family: see `PagedKernel`.
        is_piece: whether it is one of many, so that its buffers should be small.
    """

    def __init__(self, kernels: KernelCache, family: str, *, is_piece: bool = False) -> None:
        self._kernels, self._family, self._planning = kernels, family, PinnedUse(kernels.device)
        self._wrapper = kernels.lib.BatchPrefillWithRaggedKVCacheWrapper(kernels.partial, "NHD", backend=family)
        if is_piece:
            plan = torch.empty(PIECE_PLAN_BYTES, dtype=torch.uint8, device=kernels.device)
            self._wrapper.reset_workspace_buffer(kernels.partial, plan)

    def plan(self, segments: Segments, heads: Heads, *, is_causal: bool, window: int = 0) -> None:
        """Plan a step; see `PagedKernel.plan`."""
        kernels = self._kernels
        name = f"{self._family} for heads of {heads.dim} and {heads.value_dim} in {heads.dtype}{_windowed(window)}"
        with self._planning, kernels.building(name):
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

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, lse_base: LseBase = "ln") -> tuple[Tensor, Tensor]:
        """q [T, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv] -> [T, Hq, Dv], and the log-sum-exp of the scores [T, Hq]."""
        out, lse = self._wrapper.run(q, k, v, return_lse=True, lse_base=lse_base)
        return out, lse


class LatentKernel:
    """Absorbed queries against latents in pages, which are both keys and values.

    Args:
        static: for a CUDA graph.
    Attributes:
        static: the last planned table, where a CUDA graph reads it; None without one.
    """

    def __init__(self, kernels: KernelCache, static: StaticRows | None) -> None:
        self._kernels, self._has_lse = kernels, False
        self._planning = PinnedUse(kernels.device)
        self._replans: Replans | None = None
        self._ids: Tensor | None = None
        self._planned: Hashable = None
        self.static: StaticTable | None = None
        buffers: dict[str, Any] = {}
        if static is not None:
            self._replans = Replans(static, kernels.device, kernels.shortcut)
            fixed = self.static = self._replans.table
            buffers = {
                "qo_indptr": fixed.queries,
                "kv_indptr": fixed.indptr,
                "kv_indices": fixed.ids,
                "kv_len_arr": fixed.lens,
            }
        self._wrapper = kernels.lib.mla.BatchMLAPagedAttentionWrapper(
            kernels.partial, use_cuda_graph=static is not None, backend=kernels.newest, **buffers
        )

    def plan(self, table: Table, heads: Heads, ids: Tensor | None = None, *, is_causal: bool, has_lse: bool) -> None:
        """Plan a step; see `PagedKernel.plan`.

        Args:
            heads: `dim` is that of the rotary part, `value_dim` the rank of the latents.
            ids: int32, page ids on the device, used instead of those in the table and read only by `run`: from
                `room_for`, or a CUDA graph's `static.ids`.
            has_lse: whether `run` also returns the log-sum-exp.
        """
        self._has_lse = has_lse
        by_wrapper = functools.partial(self._plan_by_wrapper, table, heads, ids, is_causal=is_causal)
        if self._replans is not None:
            with self._planning:
                self._replans.plan(table, by_wrapper, functools.partial(self._planner, heads, is_causal=is_causal))
            return
        kind = None if ids is None else (heads, table.page_len, is_causal, has_lse, ids.data_ptr())
        if kind is None or kind != self._planned or not self._plan_again(table, heads, is_causal=is_causal):
            by_wrapper()  # which copies from memory of its own, as `_plan_again` does
        self._planned = kind

    def room_for(self, count: int) -> Tensor:
        """Memory for `count` page ids, the same each time while it is large enough; without a CUDA graph."""
        if self._ids is None or len(self._ids) < count:
            self._ids = torch.empty(count, dtype=torch.int32, device=self._kernels.device)
        return self._ids

    def _plan_again(self, table: Table, heads: Heads, *, is_causal: bool) -> bool:
        """Plan other lengths with the buffers of the last plan; gives whether that was possible.

        The wrapper's plan checks every row in Python, twice, and allocates new buffers.
        """
        if not self._kernels.shortcut.is_open or len(table.lens) * -(-heads.queries // 64) > _MOST_CHECKED:
            return False
        planner = self._planner(heads, is_causal=is_causal)
        at_host = (torch.from_numpy(np.ascontiguousarray(x)) for x in (table.queries, table.indptr, table.lens))
        try:
            # This one copies from memory of its own, so that it need not wait for an earlier copy.
            plan = self._wrapper._cached_module.plan_with_staged_workspace_bytes
            info, _ = plan(*planner.buffers, *at_host, *planner.sizes)
        except (AttributeError, TypeError, ValueError, RuntimeError) as cause:
            self._kernels.shortcut.close(f"{type(cause).__name__}: {cause}")
            return False
        return list(info) == list(self._wrapper._plan_info)

    def _plan_by_wrapper(self, table: Table, heads: Heads, ids: Tensor | None, *, is_causal: bool) -> Sequence[int]:
        kernels = self._kernels
        queries, indptr, lens = kernels.pinned(table.queries, table.indptr, table.lens)
        if ids is None:
            ids = kernels.on_device(table.ids)
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
                lse_mode="basee" if self._has_lse else "none",
            )
        info: Sequence[int] = self._wrapper._plan_info
        return info

    def _planner(self, heads: Heads, *, is_causal: bool) -> Planner:
        wrapper = self._wrapper
        buffers = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        # Under FlashInfer's own adapter, which allocates memory to copy the plan from.
        function = wrapper._cached_module._module.plan
        return Planner(function, buffers, [heads.queries, heads.value_dim, is_causal], is_copied=False)

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


def _windowed(window: int) -> str:
    return " with a window" if window else ""
