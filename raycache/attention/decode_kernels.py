"""Triton kernel for one query per row that attends to its pages, or to a window. Imported only where it runs.

The keys of rows are divided into parts (key_parts.py), each for one program per key head, and the last program of a row
and key head to finish merges what they found, in the same order each time. Attention sinks, and writing the newest key
and value to their page, are part of the same launch. In recorded steps the table and all other keys are on the device
before a step begins, so a program reads its last block, with which it begins, before it waits for the kernel in front.

    row of 300 keys in 3 parts, blocks of 64     [ 0 .. 127 ] [ 128 .. 255 ] [ 256 .. 299 ]
    programs of a key head                       0            1              2

Shapes in this file: T rows, H query heads, Hkv key heads, D head size, P pages, R tokens of a page, N parts at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from raycache.attention.flashinfer_replans import StaticTable
from raycache.attention.key_parts import Division
from raycache.parallel.devices import early
from raycache.rounding import power_of_2

_BLOCK, _WIDE_BLOCK = 64, 32
"""Keys that a program takes at once, of heads of up to 128 features and of larger ones."""
_MOST_PARTS = 64
"""Parts of a row."""
_AT_ONCE = 8
"""Partial results that are read at once."""


def division(num_rows: int, num_heads: int, num_programs: int, *, dim: int, most: int) -> Division | None:
    """Divide the keys of rows; None if a program should take all keys of a row.

    Args:
        num_rows: T.
        num_heads: Hkv.
        num_programs: that should run, about.
        dim: D.
        most: parts of all rows together, for whose results there is room.
    """
    most = min(num_rows + max(num_programs // num_heads, 1), most)
    return Division(most, _MOST_PARTS, _block(dim)) if most > num_rows else None


def _block(dim: int) -> int:
    return _BLOCK if dim <= 128 else _WIDE_BLOCK


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with one query each, and how programs take their keys.

    Attributes:
        table: on the device; rows without keys get zeros.
        keys: of a block, a power of two.
        reads_early: whether no key is written in a step but the last one of each row, which no other row has.
        is_recorded: whether the table, and slots of new keys, are on the device before a step begins, as in a CUDA
            graph.
        num_warps: of a program.
        partial: float32, for the results of parts, [N, Hkv, H / Hkv, D + 2]; any contents. None if a program takes all
            keys of a row, like `counts`.
        counts: int32 [T * Hkv], zeros, and zeros again when a kernel has ended.
    """

    table: StaticTable
    keys: int
    reads_early: bool
    is_recorded: bool = True
    num_warps: int = 4
    partial: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def whole(cls, table: StaticTable, window: int, *, reads_early: bool, is_recorded: bool = True) -> Rows:
        """For one program that takes the keys of a window at once."""
        return cls(table, max(16, power_of_2(window)), reads_early, is_recorded)

    @classmethod
    def divided(
        cls,
        table: StaticTable,
        num_heads: int,
        buffer: Tensor,
        *,
        dim: int,
        reads_early: bool,
        is_recorded: bool = True,
        num_warps: int = 4,
    ) -> Rows:
        """For any number of keys, in the parts of the table if it has some.

        Args:
            num_heads: Hkv.
            buffer: uint8, whose contents may be overwritten.
            dim: D.
        """
        rows = cls(table, _block(dim), reads_early, is_recorded, num_warps)
        if not len(table.parts):
            return rows
        counts = torch.zeros(len(table.lens) * num_heads, dtype=torch.int32, device=buffer.device)
        return replace(rows, partial=buffer.view(torch.float32), counts=counts)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest key and value of each row, which the kernel writes to its last page.

    Attributes:
        k, v: [T, Hkv, D], whose tokens may be apart.
        slots: int32 [T], where they go among the tokens of all pages; if that is not the last token of a row, another
            rank has the newest one. None: every row has its own.
    """

    k: Tensor
    v: Tensor
    slots: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    *,
    scale: float,
    sinks: Tensor | None,
    new: Newest | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of the last token of each row to the keys of its pages.

    Args:
        q: [T, H, D], contiguous in the last dimension.
        k, v: [P, R, Hkv, D], contiguous.
        sinks: [H], scores of the sinks; None for none.
        new: not yet in the pages; None if all keys are.
        lse: float32 [T, H], gets the log-sum-exp of the scores to base 2, without sinks; -inf without keys.
    Returns:
        New [T, H, D].
    """
    (num_rows, num_heads, dim), (_, page, num_keys, _) = q.shape, k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group, table = num_heads // num_keys, rows.table
    assert new is None or (rows.reads_early and new.k[0].is_contiguous() and new.v[0].is_contiguous())
    new_k, new_v, slots = (q, q, None) if new is None else (new.k, new.v, new.slots)
    partial, counts = (q if each is None else each for each in (rows.partial, rows.counts))
    is_divided, num_parts = rows.partial is not None, num_rows if rows.partial is None else len(table.parts)
    assert not is_divided or partial.numel() >= num_parts * num_heads * (dim + 2), "no room for results"
    given = (q if each is None else each for each in (slots, sinks))
    tensors = q, new_k, new_v, *given, k, v, out, q if lse is None else lse
    pointers = table.indptr, table.lens, table.begins, table.ids, table.firsts, table.parts, partial, counts
    strides = *q.stride()[:2], new_k.stride(0), new_v.stride(0)
    sizes = {
        "DIM": dim,
        "PAGE": page,
        "NUM_KEY_HEADS": num_keys,
        "NUM_QUERIES": group,
        "GROUP": power_of_2(group),
        "QUERIES": max(16, power_of_2(group)),
        "KEYS": rows.keys,
        "AT_ONCE": _AT_ONCE,
        "IS_DIVIDED": is_divided,
        "HAS_SINKS": sinks is not None,
        "HAS_NEW": new is not None,
        "HAS_SLOTS": slots is not None,
        "HAS_LSE": lse is not None,
        "READS_EARLY": rows.reads_early,
    }
    grid = num_keys, num_parts
    # What is copied to the device within a step is there for sure only when the kernel in front has ended.
    launch = early(q.device) if rows.is_recorded else {"IS_EARLY": False}
    _attend[grid](*tensors, *pointers, scale, *strides, **sizes, num_warps=rows.num_warps, **launch)
    return out


# Names that begin with NUM are exact; other sizes in capitals are powers of two, as Triton requires.


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: tl.tensor,
    new_k: tl.tensor,
    new_v: tl.tensor,
    slots: tl.tensor,
    sinks: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    indptr: tl.tensor,
    lens: tl.tensor,
    begins: tl.tensor,
    ids: tl.tensor,
    firsts: tl.tensor,
    parts: tl.tensor,
    partial: tl.tensor,
    counts: tl.tensor,
    scale: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    v_token: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_NEW: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    READS_EARLY: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """One program per key head and part, with all query heads of the key head."""
    if IS_EARLY:
        gdc_launch_dependents()
    key_head, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, first_part, num_parts = part, part, 1
    if IS_DIVIDED:
        row = tl.load(parts + part).to(tl.int64)
        first_part = tl.load(firsts + row).to(tl.int64)
        num_parts = tl.load(firsts + row + 1) - first_part.to(tl.int32)
    query, feature, key = tl.arange(0, QUERIES), tl.arange(0, DIM), tl.arange(0, KEYS)
    head, is_query = key_head * NUM_QUERIES + query, query < NUM_QUERIES
    length, pages = tl.load(lens + row), ids + tl.load(indptr + row)
    first = tl.load(begins + row)
    part_len = tl.cdiv(tl.cdiv(length - first, KEYS), num_parts) * KEYS
    begin = first + (part - first_part).to(tl.int32) * part_len
    end = tl.minimum(begin + part_len, length)
    last = begin + tl.maximum(tl.cdiv(end - begin, KEYS) - 1, 0) * KEYS
    place = last + key
    is_key = place < end
    is_new = (is_key & (place == length - 1))[:, None]
    is_old = (is_key & (place < length - 1))[:, None] if READS_EARLY else is_key[:, None] & False
    if HAS_SLOTS:
        page = tl.load(pages + (length - 1) // PAGE, mask=length > 0, other=0).to(tl.int64)
        is_own = tl.load(slots + row) == page * PAGE + (length - 1) % PAGE
        is_old, is_new = is_old | (is_new & ~is_own), is_new & is_own
    at = _places(pages, place, is_key, key_head, feature, DIM, PAGE, NUM_KEY_HEADS)
    keys, values = tl.load(k + at, mask=is_old, other=0.0), tl.load(v + at, mask=is_old, other=0.0)
    if IS_EARLY:
        gdc_wait()
    if begin >= end and part > first_part:
        return
    from_ = q + row * q_token + head[:, None] * q_head + feature[None, :]
    queries = tl.load(from_, mask=is_query[:, None], other=0.0)
    if HAS_NEW:
        last_key = tl.load(new_k + row * k_token + key_head * DIM + feature)[None, :]
        last_value = tl.load(new_v + row * v_token + key_head * DIM + feature)[None, :]
        keys, values = tl.where(is_new, last_key, keys), tl.where(is_new, last_value, values)
        tl.store(k + at, keys, mask=is_new)
        tl.store(v + at, values, mask=is_new)
    else:
        is_late = is_new if READS_EARLY else is_key[:, None]
        late_keys, late_values = tl.load(k + at, mask=is_late, other=0.0), tl.load(v + at, mask=is_late, other=0.0)
        keys, values = tl.where(is_late, late_keys, keys), tl.where(is_late, late_values, values)
    factor = scale * 1.4426950408889634
    scores = tl.where(is_key[None, :], tl.dot(queries, tl.trans(keys)) * factor, -1e30)
    most = tl.max(scores, 1)
    shares = tl.where(is_key[None, :], tl.exp2(scores - most[:, None]), 0.0)
    total = tl.sum(shares, 1)
    result = tl.dot(shares.to(values.dtype), values)
    result, most, total = _with_keys(
        result, most, total, queries, k, v, pages, begin, last, key_head, factor, DIM, PAGE, NUM_KEY_HEADS, KEYS
    )
    if IS_DIVIDED and num_parts > 1:
        stats = partial + tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * NUM_QUERIES * DIM
        own = (part * NUM_KEY_HEADS + key_head) * NUM_QUERIES + query
        tl.store(partial + own[:, None] * DIM + feature[None, :], result, mask=is_query[:, None])
        tl.store(stats + own * 2, most, mask=is_query)
        tl.store(stats + own * 2 + 1, total, mask=is_query)
        tl.debug_barrier()
        group = row * NUM_KEY_HEADS + key_head
        if tl.atomic_add(counts + group, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counts + group, 0)
            member = tl.arange(0, GROUP)
            earliest = (first_part * NUM_KEY_HEADS + key_head) * NUM_QUERIES
            every, highest, weights = _merged(
                partial, stats, earliest, num_parts, member, feature, DIM, NUM_KEY_HEADS, NUM_QUERIES, GROUP, AT_ONCE
            )
            _store(
                every,
                highest,
                weights,
                sinks,
                out,
                lse,
                row,
                key_head * NUM_QUERIES + member,
                member < NUM_QUERIES,
                feature,
                DIM,
                NUM_KEY_HEADS * NUM_QUERIES,
                HAS_SINKS,
                HAS_LSE,
            )
    else:
        _store(
            result,
            most,
            total,
            sinks,
            out,
            lse,
            row,
            head,
            is_query,
            feature,
            DIM,
            NUM_KEY_HEADS * NUM_QUERIES,
            HAS_SINKS,
            HAS_LSE,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _merged(
    partial: tl.tensor,
    stats: tl.tensor,
    first: tl.tensor,
    num_parts: tl.tensor,
    query: tl.tensor,
    feature: tl.tensor,
    DIM: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What all programs of a row and key head have found: values [G, D], highest scores and sums of weights [G].

    `first` is where the results of its first part are.
    """
    result = tl.zeros([GROUP, DIM], tl.float32)
    most = tl.full([GROUP], -1e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for begin in tl.range(0, num_parts, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            part = first + (begin + number) * NUM_KEY_HEADS * NUM_QUERIES + query
            is_part = (query < NUM_QUERIES) & (begin + number < num_parts)
            # Written by other programs of this launch, so not from the cache of this multiprocessor.
            score = tl.load(stats + part * 2, mask=is_part, other=-1e30, cache_modifier=".cg")
            weight = tl.load(stats + part * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            at = partial + part[:, None] * DIM + feature[None, :]
            values = tl.load(at, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
            new = tl.maximum(most, score)
            before, share = tl.exp2(most - new), tl.exp2(score - new)
            result = result * before[:, None] + values * share[:, None]
            total = total * before + weight * share
            most = new
    return result, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _with_keys(
    result: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    key_head: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the keys of whole blocks to sums of values [Q, D], highest scores and sums of weights [Q]."""
    key, feature = tl.arange(0, KEYS), tl.arange(0, DIM)
    for start in tl.range(begin, end, KEYS):
        at = _places(pages, start + key, key >= 0, key_head, feature, DIM, PAGE, NUM_KEY_HEADS)
        keys, values = tl.load(k + at), tl.load(v + at)
        scores = tl.dot(queries, tl.trans(keys)) * factor
        new = tl.maximum(most, tl.max(scores, 1))
        before, shares = tl.exp2(most - new), tl.exp2(scores - new[:, None])
        total = total * before + tl.sum(shares, 1)
        result = tl.dot(shares.to(values.dtype), values, acc=result * before[:, None])
        most = new
    return result, most, total


@triton.jit  # type: ignore[untyped-decorator]
def _places(
    pages: tl.tensor,
    place: tl.tensor,
    mask: tl.tensor,
    key_head: tl.tensor,
    feature: tl.tensor,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
) -> tl.tensor:
    """Where the features of some keys of a row are, [K, D]."""
    page = tl.load(pages + place // PAGE, mask=mask, other=0).to(tl.int64)
    return ((page * PAGE + place % PAGE) * NUM_KEY_HEADS + key_head)[:, None] * DIM + feature[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    result: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    is_head: tl.tensor,
    feature: tl.tensor,
    DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
) -> None:
    """Divide sums of values [N, D] of N heads by the sums of their weights [N], whose highest score is `most`."""
    at = row * NUM_HEADS + head
    if HAS_LSE:
        tl.store(lse + at, tl.where(total > 0.0, most + tl.log2(total), float("-inf")), mask=is_head)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(most, sink)
        less = tl.exp2(most - highest)
        result, total = result * less[:, None], total * less + tl.exp2(sink - highest)
    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
    tl.store(
        out + at[:, None] * DIM + feature[None, :],
        (result * inverse[:, None]).to(out.dtype.element_ty),
        mask=is_head[:, None],
    )
