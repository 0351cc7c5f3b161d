"""Collectives over a group of ranks.

`Group` is a group of one rank, where every collective is the identity, so that callers need no special case. Calls have
the group's timeout, except for sums and gathers by `Nccl`; they raise RankLostError if a peer exits or does not answer
in time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from raycache.errors import RankLostError

if TYPE_CHECKING:
    from raycache.parallel.copy_exchange import CopyExchange
    from raycache.parallel.nccl import Nccl
    from raycache.parallel.peer_memory import PeerMemory


class Started:
    """A collective in progress; call it to wait for its end.

    Args:
        wait: raises RankLostError.
        is_done: whether it has ended, successfully or not; does not block. May raise RankLostError.
    """

    def __init__(self, wait: Callable[[], None], is_done: Callable[[], bool]) -> None:
        self._wait = wait
        self.is_done = is_done

    def __call__(self) -> None:
        self._wait()


class Group:
    """A group of one rank.

    Attributes:
        rank: index of this rank in the group.
        size: number of members.
        transport: of small tensors: "gloo", "NCCL" or "peer memory"; "" for one rank.
    """

    transport = ""

    def __init__(self, *, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over members, in place; returns the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[...] of each member -> [size, ...], in group order; shapes must be equal on all members."""
        return tensor.unsqueeze(0)

    def iall_gather(self, tensor: Tensor, *, out: Tensor) -> Started:
        """Start an `all_gather` into `out` [size, ...], contiguous; neither tensor must be written, and `out` not read,
        before the result was called."""
        out.copy_(self.all_gather(tensor))
        return Started(lambda: None, lambda: True)

    def gather_columns(self, tensor: Tensor) -> Tensor:
        """[T, F] of each member -> [T, size * F], in group order; shapes must be equal on all members."""
        return self.all_gather(tensor).transpose(0, 1).flatten(1)

    def peer_memory(self, num_bytes: int) -> PeerMemory | None:
        """Memory for a kernel that exchanges tensors itself, `num_bytes` from each member to each other one; None if
        there is none, or another transport is faster. The same on all members."""
        return None

    def copies(self, area_bytes: int) -> CopyExchange | None:
        """Exchange by copy engines of up to `area_bytes` from each member to each other one; None if there is none. The
        same on all members. Collective, and blocks, if it is for more bytes than before."""
        return None

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """[size, ...] -> [size, ...]: row j goes to member j, row i of the result came from member i."""
        return tensor

    def broadcast(self, tensor: Tensor, *, root: int) -> Tensor:
        """Overwrite with the root's values, in place; returns the tensor."""
        return tensor

    def ibroadcast(self, tensor: Tensor, *, root: int) -> Started:
        """Start a broadcast; the tensor must not be read, written or freed before the result was called."""
        return Started(lambda: None, lambda: True)

    def send(self, tensor: Tensor, *, to: int) -> None:
        """Send to a member; matches its `recv` calls in order."""
        raise AssertionError("a group of one has nobody to send to")

    def isend(self, tensor: Tensor, *, to: int) -> Callable[[], None]:
        """Start a send; the tensor must not be written or freed before the result was called."""
        raise AssertionError("a group of one has nobody to send to")

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        """Receive into the tensor from a member; returns it."""
        raise AssertionError("a group of one has nobody to receive from")

    def irecv(self, tensor: Tensor, *, source: int) -> Callable[[], None]:
        """Start to receive; the tensor must not be read, written or freed before the result was called."""
        raise AssertionError("a group of one has nobody to receive from")

    def close(self) -> None:
        """Leave the group; peers waiting for this rank fail."""


class TorchGroup(Group):
    """A group over a torch.distributed process group (gloo or nccl) that is not registered globally.

    Args:
        backend: a ProcessGroupGloo or ProcessGroupNCCL.
        transport: "gloo" or "NCCL".
        direct_bytes: tensors of which all members together have so many bytes go from each member to all others at once
            in a sum or gather, larger ones by the backend's algorithm.
        nccl: for sums and gathers without the backend; None for none.
    """

    def __init__(
        self,
        backend: Any,
        *,
        rank: int,
        size: int,
        transport: str = "gloo",
        direct_bytes: int = 0,
        nccl: Nccl | None = None,
    ) -> None:
        super().__init__(rank=rank, size=size)
        self.transport = transport
        self.nccl = nccl
        self._backend = backend
        self._direct_bytes = direct_bytes // size if size > 2 else 0  # between two, the backend's algorithm does that

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if 0 < tensor.nbytes <= self._direct_bytes:
            # All members add in the same order, so that their sums are equal.
            return torch.sum(self.all_gather(tensor), dim=0, dtype=tensor.dtype, out=tensor)
        if self.nccl is not None and self.nccl.can_sum(tensor):
            self._call(partial(self.nccl.all_reduce, tensor))
        else:
            self._wait(lambda: self._backend.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        if 0 < tensor.nbytes <= self._direct_bytes:
            return self.all_to_all(tensor.expand(self.size, *tensor.shape))
        out = tensor.new_empty((self.size, *tensor.shape))
        # Shapes are equal, so all members skip an empty gather.
        if tensor.numel() and self.nccl is not None:
            self._call(partial(self.nccl.all_gather, tensor.contiguous(), out))
        elif tensor.numel():
            self._wait(lambda: self._backend._allgather_base(out.view(-1), tensor.contiguous().view(-1)))
        return out

    def iall_gather(self, tensor: Tensor, *, out: Tensor) -> Started:
        if tensor.nbytes <= self._direct_bytes or not tensor.numel():
            return super().iall_gather(tensor, out=out)
        given = tensor.contiguous().view(-1)
        work = self._call(lambda: self._backend._allgather_base(out.view(-1), given))

        def wait(given: Tensor = given) -> None:  # holds on to it until then
            self._call(work.wait)

        return Started(wait, work.is_completed)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        # empty_like would keep the strides of a transposed tensor.
        out = tensor.new_empty(tensor.shape)
        if tensor.numel():
            self._wait(lambda: self._backend.alltoall_base(out.view(-1), tensor.contiguous().view(-1), [], []))
        return out

    def broadcast(self, tensor: Tensor, *, root: int) -> Tensor:
        self.ibroadcast(tensor, root=root)()
        return tensor

    def ibroadcast(self, tensor: Tensor, *, root: int) -> Started:
        options = dist.BroadcastOptions()
        options.rootRank = root
        work = self._call(lambda: self._backend.broadcast([tensor], options))
        return Started(lambda: self._call(work.wait), work.is_completed)

    def send(self, tensor: Tensor, *, to: int) -> None:
        self.isend(tensor, to=to)()

    def isend(self, tensor: Tensor, *, to: int) -> Callable[[], None]:
        work = self._call(lambda: self._backend.send([tensor], to, 0))
        return lambda: self._call(work.wait)

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        self.irecv(tensor, source=source)()
        return tensor

    def irecv(self, tensor: Tensor, *, source: int) -> Callable[[], None]:
        work = self._call(lambda: self._backend.recv([tensor], source, 0))
        return lambda: self._call(work.wait)

    def close(self) -> None:
        self._backend = self.nccl = None

    def _wait(self, start: Callable[[], Any]) -> None:
        self._call(lambda: start().wait())

    def _call(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except RuntimeError as cause:
            # gloo and nccl report lost peers and timeouts as RuntimeError, when started or when waited for.
            raise RankLostError(
                -1, f"member {self.rank} of {self.size}", -1, f"a peer is gone or late: {cause}"
            ) from cause
