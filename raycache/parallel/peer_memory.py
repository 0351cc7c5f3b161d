"""Memory of each member's GPU that all members of a group write to, over NVLink."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # its stubs do not export the stores

PROGRAMS = 128
"""Programs of a kernel that exchange at once, each with memory of its own."""
WORDS = 2048
"""Most words that a program sends to a member at once."""


class PeerMemory:
    """This member's part of the memory, mapped by all members.

    Args:
        name: of the group, unique in this process.
        rank, size: of this member in the group, and number of members.
        store: of the group.
        limit_s: how long a kernel waits for another member.
    Raises:
        RuntimeError: there is no such memory.
    Attributes:
        peers: int64 [size], addresses of the members' memories, on the device; set by `map`.
        numbers: int32 [PROGRAMS], exchanges of each program, on the device.
        limit_ns: how long a kernel waits for another member.
    """

    def __init__(self, name: str, *, rank: int, size: int, store: Store, device: torch.device, limit_s: float) -> None:
        # A CPU build of torch has no such names.
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        # Read when memory is mapped. Multicast objects are not used here, and take long to make. Under Ray each rank
        # sees its own GPU as the first one, which torch takes for the same; their ids have been compared before.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self.rank, self.size, self.device = rank, size, device
        self.limit_ns = int(1e9 * limit_s)
        # Torch looks for the members of a memory in its table of groups. This one has no backend.
        self._group = ProcessGroup(store, rank, size)
        _register_process_group(name, self._group)  # type: ignore[arg-type]  # a NewType of str in newer versions
        shape = (2 * PROGRAMS * size * WORDS,)
        self._own = _SymmetricMemory.empty_strided_p2p(shape, (1,), torch.int64, device, name).zero_()
        # No kernel may write before all have zeroed their memory.
        torch.cuda.synchronize(device)
        self._name = name
        self._mapped: Any = None
        self._shared: list[tuple[Any, Any]] = []
        self.peers = torch.empty(0, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)

    def map(self) -> None:
        """Map the memory of all members. Collective; may block for longer than the store's timeout.

        Raises:
            RuntimeError: the GPUs do not reach each other's memory, or a member did not come in time.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        torch.cuda.set_device(self.device)
        self._mapped = _SymmetricMemory.rendezvous(self._own, self._name)
        self.peers = torch.tensor(self._mapped.buffer_ptrs, dtype=torch.int64, device=self.device)

    def share(self, num_bytes: int) -> list[Tensor]:
        """Allocate more memory and map that of all members. Collective; may block for longer than the store's timeout.

        Returns:
            uint8 [num_bytes] of each member, zero; valid as long as this object.

        Raises:
            RuntimeError: there is not enough memory, or a member did not come in time.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        torch.cuda.set_device(self.device)
        own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device, self._name).zero_()
        # No member may write before all have zeroed their memory.
        torch.cuda.synchronize(self.device)
        mapped = _SymmetricMemory.rendezvous(own, self._name)
        self._shared.append((own, mapped))
        return [mapped.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size)]
