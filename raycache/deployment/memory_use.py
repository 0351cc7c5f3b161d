"""Accounts for a rank's GPU memory by purpose during startup, and reports shortages.

    | others | context | groups | weights | kernels |  activations, graphs: reserved   |      pages      | margin |
    `- - - - - - - - taken, in this order - - - - -'`- - - - - left for pages - - - - - - - - - - - - - - - - - - '

While serving only activations are allocated, and their peak is known from running the largest step (peak.py). So a
rank that has started does not run out of memory unless another process takes it.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

from raycache.errors import ConfigError

_CONTEXT_BYTES = 1 << 30
"""Above what CUDA itself uses per process (about 0.5 GiB on an H200); more is attributed to other processes."""
_MARGIN = 0.02
_LEAST_MARGIN = 256 << 20
"""GPU memory never used: fragmentation leaves gaps, and NCCL and the driver allocate at any time."""
_PATIENCE_S = 10.0
_STILL_S = 1.0
_KNOBS = "--max-step-tokens, --max-running, --max-model-len, --kv-memory or --num-pages"


def free_bytes(device: torch.device) -> int:
    """Bytes of a device that can be allocated now.

    On a GPU torch's cached memory is released first; do not call during graph capture.
    """
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class MemoryUse:
    """The memory of one rank's GPU, by purpose. Make it with `of` before anything else is on the GPU.

    Args:
        total: bytes of the GPU.
        measure: returns the number of free bytes.
    Attributes:
        margin: bytes never used.
        taken: purpose -> bytes, in order of allocation. "others" are other processes, including other ranks.
        kept: purpose -> free bytes reserved for a step.
    """

    def __init__(self, device: torch.device, *, total: int, measure: Callable[[], int]) -> None:
        self.device, self.total = device, total
        self.margin = max(_LEAST_MARGIN, int(total * _MARGIN))
        self._measure = measure
        self._free = measure()
        used = total - self._free
        is_alone = used < _CONTEXT_BYTES
        self.taken = {"others": 0 if is_alone else used, "context": used if is_alone else 0}
        self.kept: dict[str, int] = {}

    @classmethod
    def of(cls, device: torch.device) -> MemoryUse:
        """Start accounting for a GPU; creates its context. Waits some seconds for memory that is being released."""
        gc.collect()  # frees what this process no longer references
        free = free_bytes(device)
        total = torch.cuda.mem_get_info(device)[1]
        deadline = time.monotonic() + _PATIENCE_S
        while total - free >= _CONTEXT_BYTES and time.monotonic() < deadline:
            # A process that was just killed releases its memory in steps.
            time.sleep(_STILL_S)
            before, free = free, free_bytes(device)
            if free <= before:
                break
        return cls(device, total=total, measure=lambda: free_bytes(device))

    def note(self, purpose: str) -> None:
        """Attribute memory allocated since the last note to `purpose`."""
        free = self._measure()
        self.taken[purpose] = self.taken.get(purpose, 0) + self._free - free
        self._free = free

    def keep(self, purpose: str, num_bytes: int) -> None:
        """Reserve bytes for what is allocated later in startup or while serving.

        A later `note` for the same purpose does not lower the reservation: cancel it with `keep(purpose, 0)`.
        """
        self.kept[purpose] = num_bytes

    @property
    def left(self) -> int:
        """Bytes left for pages and later allocations; negative if too much is taken."""
        return self._free - sum(self.kept.values()) - self.margin

    @property
    def most(self) -> int:
        """Largest accepted allocation in bytes: `left` and half of the margin, as use varies between starts."""
        return self.left + self.margin // 2

    def check(self) -> None:
        """Check at the end of startup that the largest step still fits.

        Raises:
            ConfigError: it does not.
        """
        if self.most < 0:
            raise ConfigError(
                f"{human_bytes(-self.left)} too little memory on {self.device} for the largest step: {self}; "
                f"use a smaller {_KNOBS}"
            )

    def as_row(self) -> Mapping[str, int]:
        """Purpose -> bytes; adds up to the whole GPU."""
        row = Counter(self.taken)
        row.update(self.kept)  # adds counts
        row["margin"] = self.margin
        row["free"] = self.total - row.total()
        return row

    def __str__(self) -> str:
        parts = ", ".join(f"{purpose} {human_bytes(size)}" for purpose, size in self.as_row().items() if size)
        note = ""
        if self.taken["others"]:
            note = "; others are processes that used this GPU before this rank started, see `nvidia-smi`"
        return f"of {human_bytes(self.total)}: {parts}{note}"


def human_bytes(count: float) -> str:
    """Format bytes, for example as "1.5 GiB"."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.0f} MiB"


@contextmanager
def refusing_out_of_memory(device: torch.device, *, doing: str) -> Iterator[None]:
    """Turn out-of-memory errors into a ConfigError that says which settings to lower.

    Args:
        device: for the message.
        doing: the activity for the message, such as "loading weights".
    Raises:
        ConfigError: memory ran out inside.
    """
    try:
        yield
    except RuntimeError as cause:
        if not _is_out_of_memory(cause):
            raise
        raise ConfigError(
            f"no memory left on {device} while {doing} ({_first_sentences(str(cause))}); use a smaller {_KNOBS}, or "
            "more ranks; `nvidia-smi` shows who else is on the GPU"
        ) from cause


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means out of memory: torch has a class for it; CUDA, cuBLAS and NCCL only messages."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "CUDA error: out of memory" in text or "ALLOC_FAILED" in text or "Cuda failure 2 'out of memory'" in text


def _first_sentences(text: str) -> str:
    """The requested and available amounts, without torch's advice for programmers."""
    lines = text.strip().splitlines()
    return ". ".join(lines[0].split(". ")[:3]).rstrip(".") if lines else "no reason given"
