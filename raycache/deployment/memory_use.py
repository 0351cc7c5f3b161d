"""Where the memory of a rank's GPU goes, measured while the rank starts, and what is said when there is not enough.

    | others | context | groups | weights | kernels |  activations, graphs: kept free  |      pages      | margin |
    `- - - - - - - - taken, in this order - - - - -'`- - - - - left for pages - - - - - - - - - - - - - - - - - - '

Nothing but a step's activations is allocated in service, and what the largest step needs of them is known from having
run it (peak.py). So a rank that has started does not run out of memory, unless somebody else takes it.
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
"""More than what CUDA itself takes of a GPU for a process (about 0.5 GiB on an H200); beyond it are others."""
_MARGIN = 0.02
_LEAST_MARGIN = 256 << 20
"""Of a GPU, never used: memory comes in pieces that leave gaps, and NCCL and the driver take some when they like."""
_PATIENCE_S = 10.0
_STILL_S = 1.0
_KNOBS = "--max-step-tokens, --max-running, --max-model-len, --kv-memory or --num-pages"


def free_bytes(device: torch.device) -> int:
    """Bytes of a device that can be allocated now.

    On a GPU what torch keeps for later is given back first; do not call it while a graph is captured.
    """
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class MemoryUse:
    """The memory of one rank's GPU, by purpose. Make it with `of` before anything else is on the GPU.

    Args:
        device: of the rank.
        total: bytes of the GPU.
        measure: says how many of them are free.
    Attributes:
        device, total: as given.
        margin: bytes that stay unused.
        taken: purpose -> bytes, in the order in which they were taken. "others" are other processes, and other ranks.
        kept: purpose -> bytes that are free now and that a step will take.
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
        """Of a GPU, which gets a context. Memory that is just being given back is waited for, for some seconds."""
        gc.collect()  # what this process has dropped
        free = free_bytes(device)
        total = torch.cuda.mem_get_info(device)[1]
        deadline = time.monotonic() + _PATIENCE_S
        while total - free >= _CONTEXT_BYTES and time.monotonic() < deadline:
            # A process that was killed a moment ago: its memory goes piece by piece.
            time.sleep(_STILL_S)
            before, free = free, free_bytes(device)
            if free <= before:
                break
        return cls(device, total=total, measure=lambda: free_bytes(device))

    def note(self, purpose: str) -> None:
        """What has been taken since the last note was for this purpose."""
        free = self._measure()
        self.taken[purpose] = self.taken.get(purpose, 0) + self._free - free
        self._free = free

    def keep(self, purpose: str, num_bytes: int) -> None:
        """Keep so much free for what is only taken in service, or later in the start.

        What is noted for a purpose later does not lower what is kept for it: forget it with `keep(purpose, 0)`.
        """
        self.kept[purpose] = num_bytes

    @property
    def left(self) -> int:
        """Bytes for pages, or for what else is still to come; below 0 when too much is taken already."""
        return self._free - sum(self.kept.values()) - self.margin

    @property
    def most(self) -> int:
        """Bytes for which nothing is refused: half of the margin is for what differs from one start to the next."""
        return self.left + self.margin // 2

    def check(self) -> None:
        """To be called when all is in place: what a step takes must still be there.

        Raises:
            ConfigError: it is not.
        """
        if self.most < 0:
            raise ConfigError(
                f"{human_bytes(-self.left)} too little memory on {self.device} for the largest step: {self}; "
                f"use a smaller {_KNOBS}"
            )

    def as_row(self) -> Mapping[str, int]:
        """Purpose -> bytes, all of the GPU."""
        row = Counter(self.taken)
        row.update(self.kept)  # adds
        row["margin"] = self.margin
        row["free"] = self.total - row.total()
        return row

    def __str__(self) -> str:
        parts = ", ".join(f"{purpose} {human_bytes(size)}" for purpose, size in self.as_row().items() if size)
        note = ""
        if self.taken["others"]:
            note = "; others are processes that had memory of this GPU before this rank began, see `nvidia-smi`"
        return f"of {human_bytes(self.total)}: {parts}{note}"


def human_bytes(count: float) -> str:
    """Bytes as people read them, such as "1.5 GiB"."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.0f} MiB"


@contextmanager
def refusing_out_of_memory(device: torch.device, *, doing: str) -> Iterator[None]:
    """Turn a GPU that is full into a refusal that says which settings to lower.

    Args:
        device: for the message.
        doing: what, such as "loading weights".
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
    """Torch's allocator has a class for it; CUDA, cuBLAS and NCCL, which allocate by themselves, have words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return "CUDA error: out of memory" in text or "ALLOC_FAILED" in text or "Cuda failure 2 'out of memory'" in text


def _first_sentences(text: str) -> str:
    """How much was wanted and how much there was; torch goes on with advice for programmers."""
    lines = text.strip().splitlines()
    return ". ".join(lines[0].split(". ")[:3]).rstrip(".") if lines else "no reason given"
