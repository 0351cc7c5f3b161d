"""Exchange of a step's tokens between cp ranks.

    plan rows    [ row 0: 5 new tokens ][ row 1: 1 ][ row 2: 1 ]        all tokens, T of them, row after row
    cp rank 0    [ 0 4             ][ row 1: 0 ]                        local tokens, in this order
    cp rank 1    [ 1 2 3           ][ row 2: 0 ]

    gather       local tokens of every rank           -> all tokens on every rank
    to_heads     local tokens, all heads of the rank  -> all tokens, 1 / cp of the heads (all-to-all)
    to_tokens    its inverse

Local tokens are padded to the same length on all ranks. With cp = 1 nothing is transferred.

In a decode step with weights split over cp, all tokens are local tokens of every rank. Layers between two exchanges are
then split by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.parallel.collectives import Group, Started
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import shared_head_range
from raycache.parallel.uploads import Uploads


class Exchange(Protocol):
    """The exchange of one step. All methods but `own` are collective over cp.

    After attention, a rank continues with [T_own, H_own]: its local tokens with all heads, or all tokens with 1 / cp of
    the heads.
    """

    def gather(self, local: Tensor) -> Tensor:
        """[T_local, ...] of each rank -> [T, ...] on every rank."""
        ...

    def gather_parts(self, *parts: Tensor) -> Sequence[Tensor]:
        """Gather tensors [T_local, ...] of one dtype at once -> [T, ...] each, whose tokens may be apart."""
        ...

    def give_back(self, every: Tensor) -> Tensor:
        """This rank's partial results for all tokens, [T, ...] -> all ranks' for its local ones, [cp, T_local, ...]."""
        ...

    def scatter(self, every: Tensor) -> Tensor:
        """This rank's partial results [T, H, ...] -> all ranks' for its tokens and heads, [cp, T_own, H_own, ...]."""
        ...

    def own(self, local: Tensor) -> Tensor:
        """[T_local, H, ...] -> [T_own, H_own, ...], what this rank continues with."""
        ...

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Exchange tensors [T_local, H, D] of the same heads at once -> [T, H / cp, D] each.

        With fewer heads than ranks, neighbouring ranks get the same head. Without cp the tensors are returned.
        """
        ...

    def to_tokens(self, every: Tensor) -> Tensor:
        """[T, H / cp, ...] -> [T_local, H, ...]; inverse of `to_heads` if heads were not repeated."""
        ...


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of a step whose tokens are split over cp.

    Attributes:
        num_local: T_local, number of this rank's tokens.
        padded_len: maximum T_local of the cp ranks.
        where: int64 [T]; index of each token among the cp * padded_len gathered ones. Empty with one cp rank.
        what: int64 [cp * padded_len]; inverse of `where`, 0 for padding. Empty with one cp rank.
        order: `where` at the host.
        locals_: per cp rank and row, indices of the new tokens that the rank computes.
    """

    cp: Group
    num_local: int
    padded_len: int
    where: Tensor
    what: Tensor
    order: NDArray[np.int64]
    locals_: Sequence[Sequence[NDArray[np.int64]]]

    @classmethod
    def between(
        cls,
        locals_: Sequence[Sequence[NDArray[np.int64]]],
        starts: NDArray[np.int64],
        ctx: ParallelContext,
        uploads: Uploads | None = None,
    ) -> TokenExchange:
        """Compute the index arrays.

        Args:
            locals_: per cp rank and row, indices of the new tokens that the rank computes.
            starts: start of each row among all tokens, followed by T.
            uploads: collects the arrays, which must be sent before they are read; None to send them here.
        """
        padded_len = max(sum(map(len, rows)) for rows in locals_)
        what = where = np.empty(0, np.int64)
        if ctx.cp.size > 1:
            what, where = np.zeros(len(locals_) * padded_len, np.int64), np.zeros(int(starts[-1]), np.int64)
            for rank, rows in enumerate(locals_):
                tokens = among_all(rows, starts)
                padded = rank * padded_len + np.arange(len(tokens))
                what[padded] = tokens
                where[tokens] = padded
        sent = uploads or Uploads(ctx.device, room=8 * (len(where) + len(what)) + 512)
        where_on_device, what_on_device = sent.add(where), sent.add(what)
        if uploads is None:
            sent.send()
        return cls(
            cp=ctx.cp,
            num_local=sum(map(len, locals_[ctx.cp.rank])),
            padded_len=padded_len,
            where=where_on_device,
            what=what_on_device,
            order=where,
            locals_=locals_,
        )

    def some(self, rows: Sequence[int], ctx: ParallelContext) -> TokenExchange:
        """The exchange of the tokens of some rows, which follow each other."""
        locals_ = [[of_rank[row] for row in rows] for of_rank in self.locals_]
        counts = np.array([sum(len(mine[i]) for mine in locals_) for i in range(len(rows))], np.int64)
        return TokenExchange.between(locals_, np.concatenate([[0], counts.cumsum()]), ctx)

    def start(self, *parts: Tensor) -> tuple[Tensor, Started]:
        """Start to gather tensors [T_local, H, D] side by side: [cp * padded_len, sum of H, D], `where` says in which
        order; complete when the second result was called."""
        first, heads = parts[0], sum(part.shape[1] for part in parts)
        sent = first.new_empty((self.padded_len, heads, *first.shape[2:]))
        torch.cat(parts, dim=1, out=sent[: self.num_local])
        sent[self.num_local :].zero_()
        every = sent.new_empty((self.cp.size, *sent.shape))
        return every.flatten(0, 1), self.cp.iall_gather(sent, out=every)

    def placed(self, *parts: Tensor) -> Tensor:
        """This rank's tensors [T_local, H, D] side by side in the place where `start` gathers them:
        [cp, padded_len, sum of H, D]; nothing else is written."""
        first, heads = parts[0], sum(part.shape[1] for part in parts)
        every = first.new_empty((self.cp.size, self.padded_len, heads, *first.shape[2:]))
        torch.cat(parts, dim=1, out=every[self.cp.rank, : self.num_local])
        return every

    def num_tokens(self, rank: int) -> int:
        """Tokens of a cp rank."""
        return sum(map(len, self.locals_[rank]))

    def gather(self, local: Tensor) -> Tensor:
        if self.cp.size == 1:
            return local
        return self.cp.all_gather(self._padded(local)).flatten(0, 1)[self.where]

    def gather_parts(self, *parts: Tensor) -> Sequence[Tensor]:
        if self.cp.size == 1:
            return parts
        rows = [part.flatten(1) for part in parts]
        every = self.gather(torch.cat(rows, dim=1)).split([row.shape[1] for row in rows], dim=1)
        return [some.unflatten(1, part.shape[1:]) for some, part in zip(every, parts, strict=True)]

    def give_back(self, every: Tensor) -> Tensor:
        if self.cp.size == 1:
            return every[None]
        return self.cp.all_to_all(every[self.what].unflatten(0, (self.cp.size, self.padded_len)))[:, : self.num_local]

    def scatter(self, every: Tensor) -> Tensor:
        return self.give_back(every)

    def own(self, local: Tensor) -> Tensor:
        return local

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        size = self.cp.size
        if size == 1:
            return parts
        local = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        if local.shape[1] < size:
            local = local.repeat_interleave(size // local.shape[1], dim=1)
        sent = self._padded(local).unflatten(1, (size, -1)).transpose(0, 1)
        every = self.cp.all_to_all(sent).flatten(0, 1)[self.where]
        return every.split([part.shape[2] for part in parts], dim=2) if len(parts) > 1 else (every,)

    def to_tokens(self, every: Tensor) -> Tensor:
        if self.cp.size == 1:
            return every
        parts = self.cp.all_to_all(every[self.what].unflatten(0, (self.cp.size, self.padded_len)))
        return parts[:, : self.num_local].transpose(0, 1).flatten(1, 2)

    def _padded(self, local: Tensor) -> Tensor:
        if self.num_local == self.padded_len:
            return local
        padded = local.new_zeros((self.padded_len, *local.shape[1:]))
        padded[: self.num_local] = local
        return padded


def among_all(rows: Sequence[NDArray[np.int64]], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices among all T tokens of some tokens of each row.

    Args:
        rows: indices in each row.
        starts: start of each row among all tokens, followed by T.
    """
    return np.concatenate([np.empty(0, np.int64), *rows]) + np.repeat(starts[:-1], [len(row) for row in rows])


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchange of a decode step of which every rank computes all tokens; cp is more than 1."""

    cp: Group

    def gather(self, local: Tensor) -> Tensor:
        return local

    def gather_parts(self, *parts: Tensor) -> Sequence[Tensor]:
        return parts

    def give_back(self, every: Tensor) -> Tensor:
        return self.cp.all_gather(every)

    def scatter(self, every: Tensor) -> Tensor:
        return self.cp.all_to_all(every.unflatten(1, (self.cp.size, -1)).movedim(1, 0))

    def own(self, local: Tensor) -> Tensor:
        heads = shared_head_range(local.shape[1], self.cp.rank, self.cp.size)
        return local[:, heads.start : heads.stop]

    def to_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.own(part) for part in parts)

    def to_tokens(self, every: Tensor) -> Tensor:
        return self.cp.all_gather(every).transpose(0, 1).flatten(1, 2)
