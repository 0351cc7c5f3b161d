"""Token embedding and language-model head, with the vocabulary split over tp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.linear import linear
from raycache.layers.precision import precise, precise_dtype

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.parallel.collectives import Group

# Shapes in this file: T packed tokens, N tokens to sample after, C hidden size, V vocabulary, R = ceil(V / tp).
# Weights are [R, C] on every tp rank; rows beyond the vocabulary, on the last ranks, are zeros.


class VocabEmbedding:
    """Token embedding; `weight` is [R, C], `group` the tp group."""

    def __init__(self, weight: Tensor, group: Group) -> None:
        self.weight = weight
        self._group = group
        self._first = group.rank * weight.shape[0]

    def __call__(self, ids: Tensor) -> Tensor:
        """[T] integers in [0, V) -> [T, C] on every rank."""
        if self._group.size == 1:
            return F.embedding(ids, self.weight)
        row = ids - self._first
        is_elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill_(is_elsewhere, 0), self.weight)
        return self._group.all_reduce(found.masked_fill_(is_elsewhere[:, None], 0))


class VocabHead:
    """Language-model head.

    Args:
        weight: [R, C]; may be the embedding's tensor.
        vocab_size: V.
        group: the tp group.
        cap: soft cap of the logits, cap * tanh(x / cap), or None.
        cp: size of the cp group, if rows are split over cp too; `group` is then all ranks of the stage.
    """

    def __init__(self, weight: Tensor, vocab_size: int, group: Group, *, cap: float | None = None, cp: int = 1) -> None:
        self.weight = weight
        self._cp = cp
        self._vocab_size = vocab_size
        self._group = group
        self._cap = cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V] on every rank, in at least float32."""
        logits = self._gathered(linear(hidden, self.weight))
        return logits if self._cap is None else torch.tanh(logits / self._cap).mul_(self._cap)

    def _gathered(self, own: Tensor) -> Tensor:
        """[N, R] of each rank -> [N, V], in at least float32."""
        if self._group.size == 1:
            return precise(own)
        parts: Tensor = self._group.all_gather(own).unflatten(0, (self._cp, -1))  # [cp, tp, N, R / cp]
        # One copy, which also widens the numbers.
        every = parts.permute(2, 1, 0, 3).to(precise_dtype(own.dtype), memory_format=torch.contiguous_format, copy=True)
        return every.flatten(1)[:, : self._vocab_size]

    def over_cp(self, split: CpSplit) -> VocabHead:
        """Each cp rank computes its run of the rows; all of them if cp does not divide them."""
        if self.weight.shape[0] % split.cp.size:
            return self
        rows = self.weight[split.part(self.weight.shape[0], what="rows of the head")]
        return VocabHead(rows, self._vocab_size, split.stage, cap=self._cap, cp=split.cp.size)
