"""Step results that the device may still be computing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PendingResult:
    """Results of one plan, copied to the host in the background.

    Args:
        numbers: int64 [result_len, result_width], on the rank's device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> NDArray[np.int64]:
        """Wait for the device and return the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: NDArray[np.int64] = self._numbers.numpy()
        return numbers
