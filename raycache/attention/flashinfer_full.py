"""Attention to keys and values with FlashInfer, to all earlier tokens or a window of them.

    cp    queries                                   keys
    1     every row's queries, causally             its pages, which include its new tokens
          rows as long as a window, causally        copies of the cached keys in the window, and the new keys
    more  the queries of all ranks                  this rank's pages
          this rank's queries of chunks, causally   the keys of all ranks (flashinfer_passed.py)

With cp=1 nothing needs to be merged. Rows as long as a window are special, since only their last new tokens stay in
pages. With more ranks the parts are merged as in layout.py.

Rows with few and with many queries use different kernels, since neither kernel is fast for both. Rows of one query run
a Triton kernel (decode_kernels.py), except with large heads.

Shapes in this file: T_local new tokens of this rank, T of all cp ranks, H heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raycache.attention.flashinfer_kernels import FEW_QUERIES, Heads, KernelCache, LseBase, PagedKernel, RaggedKernel
from raycache.attention.flashinfer_replans import StaticRows, StaticTable
from raycache.attention.flashinfer_tables import (
    Ints,
    Segments,
    Table,
    Tokens,
    are_all,
    cached_slots,
    decode_table,
    is_partition,
    page_table,
    starts_of,
    together,
)
from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import Part, no_keys
from raycache.attention.page_writer import Writer
from raycache.attention.passing import PassedBytes
from raycache.attention.sinks import apply_sinks
from raycache.attention.triton_works import triton_works
from raycache.memory.views import KVView
from raycache.step.inputs import Places

_Kind = Literal["one", "few", "many"]
"""How many queries a row has."""

WIDE, WIDEST = 128, 256
"""Features of the largest heads for which our own kernel is better, and for which it is better with many rows. A block
of keys of larger ones does not fit into registers."""

SHORT_WINDOW = 128
"""Longest window whose keys one program takes at once, of heads of 128: 72 KiB of shared memory."""

HALF_TYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256, 512)

FEW_KEY_HEADS = 32
"""Rows times key heads, up to which recorded steps run two programs of four warps per multiprocessor; others run four
of two warps, which is faster for many (docs/adr/0023)."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that share a plan.

    Attributes:
        space: of their component.
        window: number of keys that a query attends to, including itself; 0 for no limit.
        heads: of this rank.
    """

    space: str
    window: int
    heads: Heads

    @property
    def moved(self) -> PassedBytes:
        """Bytes that a token takes between cp ranks."""
        heads = self.heads
        return PassedBytes.of(
            queries=heads.queries,
            dim=heads.dim,
            value_dim=heads.value_dim,
            key=heads.keys * (heads.dim + heads.value_dim),
            dtype=heads.dtype,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """Queries, and the kernel that is planned for them.

    Attributes:
        tokens: the queries among all, on the device.
    """

    tokens: Tokens
    kernel: PagedKernel | _Singles


class _Copies:
    """Rows at least as long as a window: the cached keys in their window are copied in front of their new keys."""

    def __init__(self, kernels: KernelCache, layers: Layers, chunks: Sequence[Chunk], places: Places) -> None:
        slots = []
        for chunk in chunks:
            held = int(places.pages.cached[chunk.row])
            seen = range(max(held - layers.window + 1, 0), held)
            slots.append(cached_slots(places.pages, chunk.row, seen, page_len=places.page_size))
        self._slots = [kernels.on_device(some) for some in slots]
        self._new = [chunk.tokens for chunk in chunks]
        lens = [chunk.tokens.stop - chunk.tokens.start for chunk in chunks]
        keys = starts_of([len(some) + count for some, count in zip(slots, lens, strict=True)])
        tokens = together([range(span.start, span.stop) for span in self._new])
        family = kernels.family(layers.heads.dim, is_few=False)
        self._kernel = kernels.kernel((layers, "copies"), functools.partial(RaggedKernel, kernels, family))
        self._kernel.plan(Segments(tokens, starts_of(lens), keys), layers.heads, is_causal=True, window=layers.window)
        self.tokens = kernels.tokens(tokens)

    def run(self, view: KVView, q: Tensor, k: Tensor, v: Tensor) -> Part:
        """Attention of these rows, given q, k, v of all tokens; the log-sum-exp is to base 2."""
        keys, values = (
            torch.cat(
                [part for slots, new in zip(self._slots, self._new, strict=True) for part in (old[slots], x[new])]
            )
            for old, x in ((view.k.flatten(0, 1), k), (view.v.flatten(0, 1), v))
        )
        return self._kernel.run(q[self.tokens], keys, values, lse_base="log2")


class OneQuery:
    """One query per row, by our own kernel.

    Args:
        is_apart: whether no row attends to what another one writes in the same step.
        is_recorded: whether it is for a CUDA graph.
    """

    def __init__(
        self, kernels: KernelCache, layers: Layers, static: StaticRows, *, is_apart: bool, is_recorded: bool
    ) -> None:
        # It needs Triton, which is there on GPU machines only.
        from raycache.attention.decode_kernels import Rows, division

        heads, self.is_apart, self._is_recorded = layers.heads, is_apart, is_recorded
        self._scale = heads.scale
        if _is_short(layers):
            self._table = StaticTable(static, kernels.device)
            self._rows = Rows.whole(self._table, layers.window, reads_early=is_apart, is_recorded=is_recorded)
            return
        # Steps that are not recorded have any number of rows, but one kernel. Larger heads, or more queries per key
        # head, need the registers of four warps.
        is_few = is_recorded and static.num_rows * heads.keys <= FEW_KEY_HEADS
        num_warps = 4 if is_few or heads.dim > WIDE or heads.queries > 16 * heads.keys else 2
        # The buffer has float32 results and two more numbers for each query head.
        most = kernels.partial.nbytes // (4 * heads.queries * (heads.dim + 2))
        num_programs = kernels.num_blocks * 4 // num_warps
        divided = division(static.num_rows, heads.keys, num_programs, dim=heads.dim, most=most)
        self._table = StaticTable(static, kernels.device, divided)
        self._rows = Rows.divided(
            self._table,
            heads.keys,
            kernels.partial,
            dim=heads.dim,
            reads_early=is_apart,
            is_recorded=is_recorded,
            num_warps=num_warps,
        )

    @staticmethod
    def is_better(kernels: KernelCache, layers: Layers, num_rows: int) -> bool:
        """Whether to use it instead of FlashInfer, with one cp rank or without a window."""
        heads = layers.heads
        if heads.dim <= WIDE:
            return triton_works()
        # Where FlashInfer does not divide keys, all rows wait for the longest one, unless a window bounds it.
        is_held_up = not layers.window and not kernels.divides_keys(num_rows, heads)
        return heads.dim <= WIDEST and is_held_up and triton_works()

    def fill(self, table: Table) -> None:
        """Give the rows their pages."""
        self._table.fill(table)
        if not self._is_recorded:
            self._table.keep()

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        new: tuple[Tensor, Tensor] | None = None,
        slots: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """See `decode_kernels.attend`, and `Newest` there for `new` and `slots`."""
        from raycache.attention.decode_kernels import Newest, attend

        newest = None if new is None else Newest(*new, slots)
        return attend(q, k, v, self._rows, scale=self._scale, sinks=sinks, new=newest, lse=lse)


class _Singles:
    """Rows of one query in a step that has other rows, too, and is not recorded."""

    def __init__(self, kernels: KernelCache, layers: Layers, table: Table) -> None:
        rows = StaticRows.of(len(table.lens), len(table.ids))
        self._one_query = OneQuery(kernels, layers, rows, is_apart=False, is_recorded=False)
        self._one_query.fill(table)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, lse_base: LseBase | None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `PagedKernel.run`. Log-sum-exps are to base 2; there are always some, so that one kernel is built."""
        assert lse_base != "ln"
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        found = self._one_query.run(q, k, v, lse=lse)
        return found if out is None else out.copy_(found), lse


def _is_short(layers: Layers) -> bool:
    """Whether one program takes all keys of a window at once."""
    return 0 < layers.window <= SHORT_WINDOW * 128 // layers.heads.dim


class FullKernels:
    """Plan of the layers of one kind, with cp > 1 only for steps of single tokens; `static` is for a CUDA graph."""

    def __init__(
        self, kernels: KernelCache, layers: Layers, layout: StepLayout, static: StaticRows | None = None
    ) -> None:
        places = layout.inputs.places[layers.space]
        self._kernels, self._layers, self._layout = kernels, layers, layout
        self._recorded: PagedKernel | None = None
        self._one_query = self._without_plan(static)
        self._writes_itself = self._one_query is not None and self._one_query.is_apart
        if static is not None and self._one_query is None:
            self._recorded = PagedKernel(kernels, "fa2", static)
        self._writer = Writer(kernels, places.slots)
        tokens = layers.window if layers.window else layout.inputs.num_tokens + 1
        copied = [chunk for chunk in layout.chunks if len(layout.inputs.rows[chunk.row].tokens) >= tokens]
        self._copied = {chunk.row for chunk in copied}
        self._copies = _Copies(kernels, layers, copied, places) if copied else None
        self._is_partition = False  # whether plans cover all tokens, each once, in slices
        self._cached_plans = self._plan_cached(places)

    def replan(self, places: Places) -> None:
        """Plan the next replay of a CUDA graph with other pages and slots."""
        if not self._writes_itself or self._layout.inputs.ctx.cp.size > 1:
            self._writer.refresh(places.slots)
        self._cached_plans = self._plan_cached(places)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        inputs = self._layout.inputs
        owned = inputs.places[view.space].owned
        if inputs.ctx.cp.size == 1:
            if self._writes_itself:
                assert self._one_query is not None
                return self._one_query.run(q, view.k, view.v, sinks=sinks, new=(k, v))
            self._writer.write_kv(owned, k, v, to=(view.k, view.v))
            if self._one_query is not None:
                return self._one_query.run(q, view.k, view.v, sinks=sinks)
            out, lse = self._cached(view, q, lse_base=None if sinks is None else "log2")
            if self._copies is not None:
                assert lse is not None
                out[self._copies.tokens], lse[self._copies.tokens] = self._copies.run(view, q, k, v)
            if sinks is None:
                return out
            assert lse is not None
            return apply_sinks(out, lse, sinks)
        every_q, k, v = inputs.exchange.gather_parts(q, k, v)
        new = (k, v) if self._writes_itself else None
        if new is None:
            self._writer.write_kv(owned, k, v, to=(view.k, view.v))
        return self._layout.combine(self.cached(view, every_q, new), None, sinks, is_log2=True)

    def cached(self, view: KVView, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Part:
        """Queries [T, Hq, D] against this rank's pages, with cp > 1; the log-sum-exp is to base 2.

        Args:
            new: keys and values [T, Hkv, D] of all ranks, of which this rank's are not yet in its pages; or None.
        """
        if self._one_query is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            slots = None if new is None else self._writer.slots
            return self._one_query.run(q, view.k, view.v, new=new, slots=slots, lse=lse), lse
        out, found = self._cached(view, q, lse_base="log2")
        assert found is not None
        return out, found

    def _cached(self, view: KVView, q: Tensor, *, lse_base: LseBase | None) -> tuple[Tensor, Tensor | None]:
        """Queries [T, Hq, D] against this rank's pages; the log-sum-exp is -inf for queries without keys."""
        plans = self._cached_plans
        if len(plans) == 1 and are_all(plans[0].tokens, len(q)):
            return plans[0].kernel.run(q, view.k, view.v, lse_base=lse_base)
        if lse_base is None and self._is_partition:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            for planned in plans:
                span = planned.tokens
                planned.kernel.run(q[span], view.k, view.v, lse_base=None, out=out[span])
            return out, None
        out, lse = no_keys(q, q.shape[2])
        for planned in plans:
            part, part_lse = planned.kernel.run(q[planned.tokens], view.k, view.v, lse_base=lse_base)
            out[planned.tokens] = part
            if part_lse is not None:
                lse[planned.tokens] = part_lse
        return out, lse

    def _without_plan(self, static: StaticRows | None) -> OneQuery | None:
        layers, inputs = self._layers, self._layout.inputs
        if layers.window and inputs.ctx.cp.size > 1:
            # What is in the window differs between rows, and FlashInfer takes one number for all.
            if static is None:
                assert not self._layout.chunks, "with a window, chunks pass keys"
                pages = inputs.places[layers.space].pages
                static = StaticRows.of(len(pages.total), len(pages.ids))
                return OneQuery(self._kernels, layers, static, is_apart=False, is_recorded=False)
        elif static is None or not OneQuery.is_better(self._kernels, layers, static.num_rows):
            return None
        longest = 1 if inputs.state_rows is None else inputs.state_rows.longest
        return OneQuery(self._kernels, layers, static, is_apart=longest == 1, is_recorded=True)

    def _plan_cached(self, places: Places) -> list[Planned]:
        is_alone = self._layout.inputs.ctx.cp.size == 1
        lens = places.pages.total if is_alone else places.pages.cached
        rows, page_len = self._layout.inputs.rows, places.page_size // places.cp_size
        heads, window = self._layers.heads, self._layers.window
        if self._one_query is not None:
            self._one_query.fill(decode_table(places.pages, lens, page_len=page_len))
            return []
        if self._recorded is not None:
            # All rows: a CUDA graph may change which of them have keys.
            table = decode_table(places.pages, lens, page_len=page_len)
            self._recorded.plan(table, heads, is_causal=is_alone, window=window)
            return [Planned(table.tokens, self._recorded)]
        found = list[Planned]()
        for kind, some in self._by_queries(lens).items():
            table = page_table(places.pages, some, lens, queries=[row.tokens for row in rows], page_len=page_len)
            kernel: PagedKernel | _Singles
            if kind == "one":
                kernel = _Singles(self._kernels, self._layers, table)
            else:
                kernel = self._kernels.paged(self._layers, heads, is_few=kind == "few")
                kernel.plan(table, heads, is_causal=is_alone, window=window)
            found.append(Planned(self._kernels.tokens(table.tokens), kernel))
        self._is_partition = is_partition([planned.tokens for planned in found], self._layout.inputs.num_tokens)
        return found

    def _by_queries(self, lens: Ints) -> dict[_Kind, list[int]]:
        """Rows with keys, by how many queries they have."""
        rows = self._layout.inputs.rows
        num_singles = sum(len(row.tokens) == 1 for row in rows)
        has_kernel = OneQuery.is_better(self._kernels, self._layers, num_singles)
        found: dict[_Kind, list[int]] = {}
        for i, (row, count) in enumerate(zip(rows, lens.tolist(), strict=True)):
            if not count or i in self._copied:
                continue
            if has_kernel and len(row.tokens) == 1:
                kind: _Kind = "one"
            else:
                kind = "few" if len(row.tokens) < FEW_QUERIES else "many"
            found.setdefault(kind, []).append(i)
        return found


def why_not_full(view: KVView, q: Tensor) -> str | None:
    """What of a layer has no kernel, or None."""
    if q.dtype not in HALF_TYPES or view.k.dtype != q.dtype:
        return f"attention in {q.dtype} over a cache in {view.k.dtype}"
    if q.shape[2] not in HEAD_DIMS:
        return f"a head size of {q.shape[2]}"
    return None
