"""What the device can do at most, measured: the floors that figures of serving are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """Of one device.

    Attributes:
        copy_bytes_s: bytes read and written per second by a copy within its memory.
        matmul_flops: of a large square product.
        link_bytes_s: pinned host memory to device; without a GPU a plain copy.
    """

    copy_bytes_s: float
    matmul_flops: float
    link_bytes_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        """Takes a second on a GPU, mostly to pin host memory."""
        is_cuda = device.type == "cuda"
        num_bytes, size = (4 << 30, 8192) if is_cuda else (32 << 20, 512)
        source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_s = seconds(lambda: target.copy_(source), device)
        host = torch.ones(num_bytes // 8, dtype=torch.uint8, pin_memory=is_cuda)
        link_s = seconds(lambda: target[: len(host)].copy_(host, non_blocking=True), device)
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        matmul_s = seconds(lambda: torch.mm(a, b), device)
        return cls(num_bytes / copy_s, 2 * size**3 / matmul_s, len(host) / link_s)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"copy within the device {self.copy_bytes_s / 1e9:,.0f} GB/s read and written, "
            f"matrix product {self.matmul_flops / 1e12:,.1f} TFLOP/s, "
            f"host to device {self.link_bytes_s / 1e9:,.1f} GB/s"
        )


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of some calls after a first one that does not count."""
    found = []
    for _ in range(_REPEATS + 1):
        finish(device)
        start_s = time.perf_counter()
        call()
        finish(device)
        found.append(time.perf_counter() - start_s)
    return statistics.median(found[1:])


def finish(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
