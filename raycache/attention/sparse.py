"""Sparse indexer: selects the tokens that each query attends to, across all cp ranks.

    1. Each rank scores its cached index keys for all queries and keeps its top_k candidates per query.
    2. Candidates are sent to the queries' ranks, which add the new keys and find the last selected one. Its score and
       position are a threshold (of equal scores, the earlier token's wins).
    3. Thresholds are sent to all ranks, and each selects those of its own candidates that reach them.

A rank's candidates include all its tokens of the global top_k. Rows that end within top_k tokens attend to all tokens
and are not scored. No two candidates are equal, since positions differ, so the selection is independent of the split.

Shapes in this file: T new tokens of all cp ranks, n queries, L keys, Hi index heads, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycache.attention.layout import Chunk, StepLayout
from raycache.attention.merge import wide
from raycache.memory.views import IndexView, Runs
from raycache.step.inputs import Prefix, RowInputs, StepInputs

MAX_SCORES = 1 << 25  # per-head scores held at once
NO_TOKEN = (1 << 31) - 1  # position of padding in a table of candidates; its score is -inf


@dataclass(frozen=True, slots=True)
class TorchSelection:
    """The tokens that the queries of each row attend to; None for all.

    Attributes:
        cached: per row; for a chunk bool [queries, L] of this rank's cached tokens, for a single their int64 slots.
        causal: per row; for a chunk bool [this rank's queries, new tokens].
    """

    cached: tuple[Tensor | None, ...]
    causal: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores and positions of keys, per query.

    Attributes:
        scores: [n, K].
        positions: int64 [n, K] in the sequence; `NO_TOKEN` for padding.
    """

    scores: Tensor
    positions: Tensor

    def some(self, queries: range) -> Scored:
        """Select some of the queries."""
        return Scored(self.scores[_slice(queries)], self.positions[_slice(queries)])

    @classmethod
    def beside(cls, parts: Sequence[Scored]) -> Scored:
        """Concatenate the keys of parts with the same queries."""
        return cls(torch.cat([part.scores for part in parts], 1), torch.cat([part.positions for part in parts], 1))

    def last_chosen(self, top_k: int) -> Scored:
        """The lowest of the `top_k` of each query, K = 1; below all keys if there are not more."""
        if self.scores.shape[1] <= top_k:
            lowest = self.scores.new_full((len(self.scores), 1), float("-inf"))
            return Scored(lowest, torch.full_like(lowest, NO_TOKEN - 1, dtype=torch.int64))
        positions, order = self.positions.sort(dim=1)
        scores, order = self.scores.gather(1, order).sort(dim=1, descending=True, stable=True)
        last = order[:, top_k - 1 : top_k]
        return Scored(scores[:, top_k - 1 : top_k], positions.gather(1, last).clamp_(max=NO_TOKEN - 1))

    def reach(self, last: Scored) -> Tensor:
        """Which keys are not below `last`: bool [n, K]."""
        return (self.scores > last.scores) | ((self.scores == last.scores) & (self.positions <= last.positions))

    def pack(self) -> Tensor:
        """Pack into integers [n, K, 2] for transfer."""
        bits = torch.int64 if self.scores.dtype == torch.float64 else torch.int32
        return torch.stack([self.scores.view(bits), self.positions.to(bits)], dim=-1)

    @classmethod
    def unpack(cls, packed: Tensor) -> Scored:
        """Inverse of `pack`."""
        dtype = torch.float64 if packed.dtype == torch.int64 else torch.float32
        return cls(packed[..., 0].contiguous().view(dtype), packed[..., 1].to(torch.int64))


class Indexer:
    """Selection plan of all layers with an indexer of one component space.

    Args:
        prefixes: cached tokens of each row in this space.
    """

    def __init__(self, layout: StepLayout, prefixes: tuple[Prefix, ...]) -> None:
        self._layout = layout
        self._prefixes = prefixes
        device = layout.inputs.ctx.device
        self._positions = [torch.from_numpy(p.positions).to(device, non_blocking=True) for p in prefixes]
        self._slots = {i: _slots(prefixes[i].runs, device) for i in layout.singles}

    def select(self, view: IndexView, q: Tensor, k: Tensor, weights: Tensor, *, top_k: int) -> TorchSelection:
        inputs = self._layout.inputs
        places = inputs.places[view.space]
        keys = inputs.exchange.gather(k.to(view.key.dtype))
        view.write(places.slots, keys[places.owned])
        rows = {i: row for i, row in enumerate(inputs.rows) if row.start + len(row.tokens) > top_k}
        if not rows:
            return see_all(inputs)
        every_q, every_weight = inputs.exchange.gather(q), inputs.exchange.gather(weights)
        found = {
            i: self._best(i, view, every_q[_slice(row.tokens)], every_weight[_slice(row.tokens)], top_k=top_k)
            for i, row in rows.items()
            if self._prefixes[i].runs
        }
        fresh = {
            chunk.row: self._fresh(chunk, q[chunk.local], keys[chunk.tokens], weights[chunk.local])
            for chunk in self._layout.chunks
            if chunk.row in rows and chunk.runs
        }
        dtype = wide(q.dtype)
        theirs = self._exchange(rows, {i: best for i, (best, _) in found.items()}, top_k=top_k, dtype=dtype)
        last = self._last_chosen(rows, [theirs, fresh], top_k=top_k, dtype=dtype)
        every_last = Scored.unpack(inputs.exchange.gather(last.pack()))
        cached = (self._chosen(i, *found[i], every_last) if i in found else None for i in range(len(inputs.rows)))
        causal = (fresh[i].reach(last.some(row.local)) if i in fresh else None for i, row in enumerate(inputs.rows))
        return TorchSelection(tuple(cached), tuple(causal))

    def _best(self, row: int, view: IndexView, q: Tensor, weights: Tensor, *, top_k: int) -> tuple[Scored, Tensor]:
        """Candidates of a row's queries [n, Hi, D] in this rank's pages, and their indices among L cached tokens."""
        keys = view.read(self._prefixes[row].runs)
        block = max(1, MAX_SCORES // (q.shape[1] * len(keys)))
        scores, index = [], []
        for some, weight in zip(q.split(block), weights.split(block), strict=True):
            all_scores = index_scores(some, keys, weight)
            index.append(best_first_come(all_scores, min(top_k, len(keys))))
            scores.append(all_scores.gather(1, index[-1]))
        chosen = torch.cat(index)
        return Scored(torch.cat(scores), self._positions[row][chosen]), chosen

    def _fresh(self, chunk: Chunk, q: Tensor, k: Tensor, weights: Tensor) -> Scored:
        """Scores of this rank's queries of a chunk [n, Hi, D] for its new keys [L, D], up to themselves."""
        block = max(1, MAX_SCORES // (q.shape[1] * len(k)))
        parts = zip(q.split(block), weights.split(block), strict=True)
        scores = torch.cat([index_scores(some, k, weight) for some, weight in parts])
        inputs = self._layout.inputs
        positions = torch.arange(chunk.start, chunk.start + len(k), device=k.device).expand_as(scores)
        is_future = positions > inputs.positions[chunk.local, None]
        return Scored(scores.masked_fill_(is_future, float("-inf")), positions.masked_fill(is_future, NO_TOKEN))

    def _exchange(
        self, rows: Mapping[int, RowInputs], found: Mapping[int, Scored], *, top_k: int, dtype: torch.dtype
    ) -> Mapping[int, Scored]:
        """Candidates of all queries on this rank -> those of this rank's queries on all ranks, per row."""
        inputs = self._layout.inputs
        if inputs.ctx.cp.size == 1:
            return found
        # Must be the same width on every rank; no rank holds more of a row than all of it.
        width = min(top_k, max(row.start for row in rows.values()) + 1)
        shape = (inputs.num_tokens, width)
        scores = torch.full(shape, float("-inf"), dtype=dtype, device=inputs.ctx.device)
        positions = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=inputs.ctx.device)
        for i, best in found.items():
            tokens, count = _slice(rows[i].tokens), best.scores.shape[1]
            scores[tokens, :count], positions[tokens, :count] = best.scores, best.positions
        parts = Scored.unpack(inputs.exchange.give_back(Scored(scores, positions).pack()))
        table = Scored(*(part.transpose(0, 1).flatten(1) for part in (parts.scores, parts.positions)))
        return {i: table.some(row.local) for i, row in rows.items()}

    def _last_chosen(
        self,
        rows: Mapping[int, RowInputs],
        candidates: Sequence[Mapping[int, Scored]],
        *,
        top_k: int,
        dtype: torch.dtype,
    ) -> Scored:
        """The last selected token of each of this rank's queries, [T_local, 1]."""
        inputs = self._layout.inputs
        scores = torch.zeros((len(inputs.ids), 1), dtype=dtype, device=inputs.ctx.device)
        positions = torch.zeros_like(scores, dtype=torch.int64)
        for i, row in rows.items():
            if len(row.local):
                every = Scored.beside([some[i] for some in candidates if i in some])
                last = every.last_chosen(top_k)
                scores[_slice(row.local)], positions[_slice(row.local)] = last.scores, last.positions
        return Scored(scores, positions)

    def _chosen(self, row: int, best: Scored, index: Tensor, every_last: Scored) -> Tensor:
        """`TorchSelection.cached` of a row, given its candidates [n, K] and the last selected token of every query."""
        is_chosen = best.reach(every_last.some(self._layout.inputs.rows[row].tokens))
        if row in self._slots:
            return self._slots[row][index[is_chosen]]
        size = (len(index), len(self._positions[row]))
        mask: Tensor = torch.zeros(size, dtype=torch.bool, device=index.device).scatter_(1, index, is_chosen)
        return mask


def see_all(inputs: StepInputs) -> TorchSelection:
    """A selection of all tokens before each query."""
    nothing = (None,) * len(inputs.rows)
    return TorchSelection(nothing, nothing)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of weight * relu(q . k): q [n, Hi, D], k [L, D], weights [n, Hi] -> [n, L]; NaN becomes -inf."""
    dtype = wide(q.dtype)
    products = (q.to(dtype).flatten(0, 1) @ k.to(dtype).T).relu_().unflatten(0, q.shape[:2])
    scores: Tensor = (weights.to(dtype)[:, None] @ products)[:, 0]
    return scores.masked_fill_(scores.isnan(), float("-inf"))


def best_first_come(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of [n, L] scores, ascending, [n, count]; of equal scores, the first ones."""
    if count == scores.shape[1]:
        return torch.arange(count, device=scores.device).expand_as(scores)
    last = scores.topk(count, dim=1).values[:, -1:]
    is_above, is_equal = scores > last, scores == last
    missing = count - is_above.sum(1, keepdim=True)
    chosen = is_above | (is_equal & (is_equal.cumsum(1) <= missing))
    index: Tensor = chosen.nonzero()[:, 1].view(-1, count)
    return index


def _slots(runs: Runs, device: torch.device) -> Tensor:
    slots = np.concatenate([np.empty(0, np.int64), *(np.arange(first, first + count) for first, count in runs)])
    return torch.from_numpy(slots).to(device, non_blocking=True)


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)
