"""The kernel for one query per row against attention in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

PAGE = 64
ERROR = 0.008
"""Relative, of each row; bfloat16 rounds by 0.2 %."""
LENGTHS = [0, 17, 1, 64, 65, 300, 1100, 9000]


class Pages:
    """Of rows of some lengths, in any order."""

    def __init__(self, lengths: list[int], heads: tuple[int, int], dim: int, window: int = 0) -> None:
        counts = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(counts) + 3, device="cuda")[: sum(counts)].int()
        ends = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        self.table: Any = SimpleNamespace(indptr=ends, lens=torch.tensor(lengths, device="cuda").int(), ids=order)
        self.table.firsts = self.table.parts = ends  # unused where one program takes all keys of a row
        self.table.begins = (self.table.lens - window).clamp(min=0) if window else torch.zeros_like(self.table.lens)
        self.lengths, self.dim, self.num_key_heads = lengths, float(dim), heads[1]
        last = self.table.lens - 1
        self.slots = (order[(ends[:-1] + last // PAGE).clamp(0, len(order) - 1).long()] * PAGE + last % PAGE).int()
        self.k, self.v = (drawn(sum(counts) + 3, PAGE, heads[1], dim) for _ in range(2))
        self.q = drawn(len(lengths), heads[0] + 2 * heads[1], dim)[:, : heads[0]]

    def divided(self, buffer: Tensor, num_programs: int, *, reads_early: bool = True, num_warps: int = 4) -> Any:
        """Rows whose keys are divided among programs."""
        from raycache.attention.decode_kernels import Rows, division

        lens, begins = (column.cpu().numpy() for column in (self.table.lens, self.table.begins))
        dim = self.q.shape[2]
        divided = division(len(lens), self.num_key_heads, num_programs, dim=dim, most=20_000)
        assert divided is not None
        parts = divided.parts(lens, begins)
        self.table.firsts, self.table.parts = (torch.from_numpy(column).cuda() for column in parts)
        return Rows.divided(
            self.table, self.num_key_heads, buffer, dim=dim, reads_early=reads_early, num_warps=num_warps
        )

    def right(self, window: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """[T, H, D] and [T, H] to base 2, without sinks."""
        outs, lses = [], []
        ids = self.table.ids.split([-(-length // PAGE) for length in self.lengths])
        for q, pages, length in zip(self.q.double(), ids, self.lengths, strict=True):
            first = max(length - window, 0) if window else 0
            k, v = (x[pages.long()].flatten(0, 1)[first:length].double() for x in (self.k, self.v))
            k, v = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("hd,lhd->hl", q, k) * self.dim**-0.5
            lses.append(scores.logsumexp(1) / math.log(2))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            outs.append(torch.einsum("hl,lhd->hd", scores.softmax(1)[:, : len(k)], v))
        return torch.stack(outs), torch.stack(lses)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def check(found: Tensor, right: Tensor) -> None:
    for row, (one, other) in enumerate(zip(found.double(), right, strict=True)):
        assert one.isfinite().all(), row
        assert (one - other).norm() <= ERROR * other.norm(), row


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim"), [((16, 4), 128), ((64, 8), 64), ((16, 2), 256), ((5, 5), 128), ((14, 2), 64)]
)
@pytest.mark.parametrize(("programs", "num_warps"), [(1, 4), (64, 2), (528, 4), (528, 2), (5000, 4)])
def test_rows_of_any_length(programs: int, num_warps: int, heads: tuple[int, int], dim: int, has_sinks: bool) -> None:
    from raycache.attention.decode_kernels import attend

    if dim > 128 and num_warps < 4:
        pytest.skip("heads of 256 features need the registers of four warps")
    torch.manual_seed(programs)
    pages = Pages(LENGTHS, heads, dim)
    sinks = drawn(heads[0]) if has_sinks else None
    rows = pages.divided(torch.full([256 << 20], 127, dtype=torch.uint8, device="cuda"), programs, num_warps=num_warps)
    right, right_lse = pages.right(0, sinks)
    before = None
    for _ in range(20):
        lse = torch.full(pages.q.shape[:2], 5.0, device="cuda")
        out = attend(pages.q, pages.k, pages.v, rows, scale=dim**-0.5, sinks=sinks, lse=lse)
        check(out, right)
        torch.testing.assert_close(lse.double(), right_lse, atol=0.01, rtol=0)
        assert before is None or torch.equal(out, before), "the order of a sum differs"
        before = out


def test_a_program_takes_all_keys_of_a_row_where_there_is_no_room_for_parts() -> None:
    from raycache.attention.decode_kernels import Rows, attend, division

    assert division(8, 4, 528, dim=128, most=8) is None
    pages = Pages(LENGTHS, (16, 4), 128)
    pages.table.parts = pages.table.ids[:0]
    for is_recorded in (True, False):
        buffer = torch.empty(0, dtype=torch.uint8, device="cuda")
        rows = Rows.divided(pages.table, 4, buffer, dim=128, reads_early=False, is_recorded=is_recorded)
        check(attend(pages.q, pages.k, pages.v, rows, scale=128**-0.5, sinks=None), pages.right(0, None)[0])


@pytest.mark.parametrize("window", [100, 128, 1000])
def test_windows_with_sinks(window: int) -> None:
    from raycache.attention.decode_kernels import Rows, attend

    pages, sinks = Pages(LENGTHS, (64, 8), 64, window), drawn(64)
    buffer = torch.full([8 << 20], 127, dtype=torch.uint8, device="cuda")
    right, right_lse = pages.right(window, sinks)
    for reads_early in (True, False):
        lse = torch.empty(pages.q.shape[:2], device="cuda")
        if window < 256:
            rows = Rows.whole(pages.table, window, reads_early=reads_early)
        else:
            rows = pages.divided(buffer, 256, reads_early=reads_early)
        out = attend(pages.q, pages.k, pages.v, rows, scale=0.125, sinks=sinks, lse=lse)
        check(out, right)
        torch.testing.assert_close(lse.double(), right_lse, atol=0.01, rtol=0)


@pytest.mark.parametrize("num_warps", [2, 4])
@pytest.mark.parametrize("window", [0, 100])
def test_only_the_newest_keys_of_this_rank_are_new(window: int, num_warps: int) -> None:
    from raycache.attention.decode_kernels import Newest, Rows, attend

    lengths = [1, 64, 65, 300, 1100, 1, 64, 65, 300, 1100, 0]
    pages, is_own = Pages(lengths, (16, 4), 128, window), torch.arange(11, device="cuda") < 5
    buffer = torch.full([8 << 20], 127, dtype=torch.uint8, device="cuda")
    whole = Rows.whole(pages.table, window, reads_early=True)
    rows = whole if window else pages.divided(buffer, 264, num_warps=num_warps)
    free = next(page for page in range(len(pages.k)) if not bool((pages.table.ids == page).any()))
    elsewhere = free * PAGE + PAGE - 1
    slots, kv = torch.where(is_own, pages.slots, elsewhere).int(), drawn(11, 8, 128)
    (k, v), before = (kv[:, :4], kv[:, 4:]), [x.clone() for x in (pages.k, pages.v)]
    lse = torch.empty(pages.q.shape[:2], device="cuda")
    found = attend(pages.q, pages.k, pages.v, rows, scale=128**-0.5, sinks=None, new=Newest(k, v, slots), lse=lse)
    for page, old, new in zip((pages.k, pages.v), before, (k, v), strict=True):
        old.flatten(0, 1)[slots[is_own].long()] = new[is_own]
        assert torch.equal(page, old)
    right, right_lse = pages.right(window, None)
    check(found, right)
    torch.testing.assert_close(lse.double(), right_lse, atol=0.01, rtol=0)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("writer", ["a kernel in front", "attention", "attention, by slots"])
def test_the_newest_key_comes_from_the_kernel_in_front(writer: str, window: int) -> None:
    """As in a decode step: many layers in one CUDA graph, each replay with other keys, which their pages have then."""
    from raycache.attention.decode_kernels import Newest, Rows, attend
    from raycache.attention.page_kernels import write_rows

    layers = [Pages([1, 0, 64, 1100, 2049], (16, 4), 128, window) for _ in range(8)]
    buffer = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    of_layers = [
        Rows.whole(pages.table, window, reads_early=True) if window else pages.divided(buffer, 264) for pages in layers
    ]
    first = drawn(5, 8, 128)
    some = torch.tensor([0, 2, 3, 4], device="cuda")  # rows with keys

    def step() -> list[Tensor]:
        found, kv = [], first
        for pages, rows in zip(layers, of_layers, strict=True):
            new = kv[:, :4], kv[:, 4:]
            if writer == "a kernel in front":
                write_rows(
                    kv[some, :4], kv[some, 4:], pages.slots[some], to=(pages.k.flatten(0, 1), pages.v.flatten(0, 1))
                )
            q = kv.repeat(1, 2, 1)
            slots = pages.slots if writer == "attention, by slots" else None
            given = None if writer == "a kernel in front" else Newest(*new, slots)
            out = attend(q, pages.k, pages.v, rows, scale=0.08, sinks=None, new=given)
            found.append(out)
            kv = out[:, :8] * 20 + first
        return found

    eager = [out.clone() for out in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(outs, eager, strict=True))
    for _ in range(50):
        first.normal_()
        graph.replay()
        kv = first
        for pages, out in zip(layers, outs, strict=True):
            written = pages.k.flatten(0, 1)[pages.slots.long()], pages.v.flatten(0, 1)[pages.slots.long()]
            for place, wanted in zip(written, (kv[:, :4], kv[:, 4:]), strict=True):
                assert all(torch.equal(place[row], wanted[row]) for row in range(5) if pages.lengths[row])
            pages.q, pages.dim = kv.repeat(1, 2, 1), 0.08**-2
            check(out, pages.right(window, None)[0])
            kv = out[:, :8] * 20 + first
