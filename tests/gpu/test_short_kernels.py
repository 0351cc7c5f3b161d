"""The kernels of short steps against attention in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention.query_tiles import QueryTiles, TileRow
from raycache.step.inputs import Pages

pytestmark = pytest.mark.gpu

ERROR = 0.008
"""Relative, of each token; bfloat16 rounds by 0.2 %."""
STEPS = [
    [(48, 20_000)],
    [(5, 0), (1, 700), (70, 300), (1, 64), (33, 31)],
    [(1, 9000), (120, 5)],
    [(1, start) for start in range(1, 1000, 47)],
]
"""(new tokens, tokens before them) of the rows of some steps."""
NUM_TOKENS = 160


class Cache:
    """Pages of rows, in any order; with a window, those that its first new token sees."""

    def __init__(self, rows: Sequence[tuple[int, int]], *, heads: tuple[int, int], dim: int, page: int, window: int):
        self.rows, self.window, self.page = rows, window, page
        first = [max(start - window + 1, 0) // page if window else 0 for _, start in rows]
        counts = [-(-(start + count) // page) - begin for (count, start), begin in zip(rows, first, strict=True)]
        ids = np.random.default_rng(0).permutation(sum(counts) + 3)[: sum(counts)].astype(np.int32)
        indptr, nothing = np.array([0, *np.cumsum(counts)], np.int32), np.zeros(len(rows), np.int32)
        self.pages = Pages(indptr, ids, np.array(first, np.int32), nothing, nothing, nothing)
        self.k, self.v = (drawn(sum(counts) + 3, page, heads[1], dim) for _ in range(2))
        self.q = drawn(NUM_TOKENS, heads[0] + 2 * heads[1], dim)[:, : heads[0]]

    def right(self, sinks: Tensor | None) -> Tensor:
        """[T, H, D] of the rows' tokens."""
        outs, at = [], 0
        for i, (count, start) in enumerate(self.rows):
            ids = torch.from_numpy(self.pages.ids[self.pages.indptr[i] : self.pages.indptr[i + 1]]).cuda().long()
            begin = int(self.pages.first[i]) * self.page
            k, v = (x[ids].flatten(0, 1)[: start + count - begin].double() for x in (self.k, self.v))
            q = self.q[at : at + count].double()
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            place = torch.arange(begin, start + count, device="cuda")
            own = torch.arange(start, start + count, device="cuda")[:, None]
            is_seen = place <= own if not self.window else (place <= own) & (place > own - self.window)
            scores = torch.einsum("thd,lhd->thl", q, k) * q.shape[2] ** -0.5
            scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[None, :, None].expand(count, -1, 1)], -1)
            outs.append(torch.einsum("thl,lhd->thd", scores.softmax(-1)[..., : len(k)], v))
            at += count
        return torch.cat(outs)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(
    ("heads", "dim", "page", "window", "has_sinks"),
    [
        ((32, 8), 128, 64, 0, False),
        ((28, 4), 128, 16, 0, True),
        ((8, 8), 64, 48, 0, False),
        ((64, 8), 64, 64, 128, True),
        ((5, 1), 128, 32, 1024, False),
        ((64, 1), 128, 64, 0, False),
    ],
)
def test_rows_of_any_length_replayed(heads: tuple[int, int], dim: int, page: int, window: int, has_sinks: bool) -> None:
    from raycache.attention.short_kernels import attend

    torch.manual_seed(0)
    buffer = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")  # no numbers
    tiles = QueryTiles(
        NUM_TOKENS,
        max_pages=40_000 // page,
        group=heads[0] // heads[1],
        num_programs=264 // heads[1],
        window=window,
        buffer=buffer,
    )
    sinks = drawn(heads[0]) if has_sinks else None
    for rows in STEPS:
        cache = Cache(rows, heads=heads, dim=dim, page=page, window=window)
        count = sum(count for count, _ in rows)
        starts = np.cumsum([0, *(count for count, _ in rows)]).tolist()
        given = [
            TileRow(first, new, start - int(begin) * page)
            for first, (new, start), begin in zip(starts, rows, cache.pages.first, strict=False)
        ]
        given.append(TileRow(count, NUM_TOKENS - count, count - NUM_TOKENS))

        def run(cache: Cache = cache) -> Tensor:
            return attend(cache.q, cache.k, cache.v, tiles, scale=dim**-0.5, sinks=sinks)

        tiles.fill([TileRow(0, NUM_TOKENS, -NUM_TOKENS)], Pages(*[np.zeros(1, np.int32)] * 6))
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        tiles.fill(given, cache.pages)
        out.fill_(torch.nan)
        graph.replay()
        right = cache.right(sinks)
        errors = (out[:count].double() - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
        assert errors.max() < ERROR, (rows, errors.argmax())
        assert not out[count:].any(), "padding"
