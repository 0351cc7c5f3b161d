"""Token embedding and language-model head, with the vocabulary split over tp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers.fused import vocab_kernels_for
from raycache.layers.linear import linear
from raycache.layers.precision import precise, precise_dtype

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.parallel.collectives import Group

BEST_PARTS = 16
"""Parts of a rank's logits whose best are exchanged, one for each program of a kernel."""

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
        if kernels := vocab_kernels_for(self.weight):
            return self._group.all_reduce(kernels.embed(ids, self.weight, self._first))
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
        factor: of the logits, after the cap.
        cp: size of the cp group, if rows are split over cp too; `group` is then all ranks of the stage.
    """

    def __init__(
        self,
        weight: Tensor,
        vocab_size: int,
        group: Group,
        *,
        cap: float | None = None,
        factor: float = 1.0,
        cp: int = 1,
    ) -> None:
        self.weight = weight
        self._cp = cp
        self._vocab_size = vocab_size
        self._group = group
        self._cap, self._factor = cap, factor

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V] on every rank, in at least float32."""
        return self.gathered(self.part(hidden))

    def part(self, hidden: Tensor) -> Tensor:
        """What this rank computes of the logits, without cap and factor: [N, C] -> [N, R]."""
        return linear(hidden, self.weight)

    def gathered(self, own: Tensor) -> Tensor:
        """Logits, from the part of each rank: [N, R] -> [N, V] on every rank, in at least float32. Collective."""
        if self._group.size == 1:
            return self._adjusted(precise(own))
        parts: Tensor = self._group.all_gather(own).unflatten(0, (self._cp, -1))  # [cp, tp, N, R / cp]
        # One copy, which also widens the numbers.
        every = parts.permute(2, 1, 0, 3).to(precise_dtype(own.dtype), memory_format=torch.contiguous_format, copy=True)
        return self._adjusted(every.flatten(1)[:, : self._vocab_size])

    def likeliest(self, own: Tensor) -> Tensor:
        """The argmax of the logits, from the part of each rank: [N, R] -> int64 [N] on every rank. Collective.

        The first of several equal logits counts, as everywhere in torch. Each rank sends int64 [N, BEST_PARTS, 2],
        tokens and the bits of their logits in float64, whether it has kernels or not.
        """
        logits = own if self._cap is None and self._factor == 1.0 else self._adjusted(precise(own))
        tokens = self._own_tokens()
        if kernels := vocab_kernels_for(own):
            best = kernels.best_of_part(logits, tokens, num_parts=BEST_PARTS)
            found: Tensor = kernels.best_of_all(best[None] if self._group.size == 1 else self._group.all_gather(best))
            return found
        if self._group.size == 1:
            return logits.argmax(-1)
        best = own.new_zeros((len(own), BEST_PARTS, 2), dtype=torch.int64)
        best.view(torch.float64)[..., 1] = -torch.inf
        if tokens:  # else all rows of the weight are beyond the vocabulary
            values, columns = logits[:, : len(tokens)].max(-1)
            torch.add(columns, tokens.start, out=best[:, 0, 0])
            best.view(torch.float64)[:, 0, 1].copy_(values)
        parts: Tensor = self._group.all_gather(best).unflatten(0, (self._cp, -1))  # [cp, tp, N, BEST_PARTS, 2]
        parts = parts.permute(2, 1, 0, 3, 4).flatten(1, 3)  # in the order of the vocabulary
        winners = parts.view(torch.float64)[..., 1].argmax(1, keepdim=True)
        return parts[..., 0].gather(1, winners)[:, 0]

    def over_cp(self, split: CpSplit) -> VocabHead:
        """Each cp rank computes its run of the rows; all of them if cp does not divide them."""
        if self.weight.shape[0] % split.cp.size:
            return self
        rows = self.weight[split.part(self.weight.shape[0], what="rows of the head")]
        return VocabHead(rows, self._vocab_size, split.stage, cap=self._cap, factor=self._factor, cp=split.cp.size)

    def _own_tokens(self) -> range:
        """Tokens of this rank's rows of the weight, without those beyond the vocabulary."""
        cp_rank, tp_rank = divmod(self._group.rank, self._group.size // self._cp)
        rows = self.weight.shape[0]
        first = (tp_rank * self._cp + cp_rank) * rows
        return range(first, min(first + rows, self._vocab_size))

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Apply cap and factor to logits in at least float32."""
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap).mul_(self._cap)
        return logits if self._factor == 1.0 else logits * self._factor
