"""Step results that the device may still be computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.parallel.uploads import download


class Pending(Protocol):
    """Results of one plan, int64 [result_len, result_width]."""

    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> NDArray[np.int64]:
        """Wait for the device and return the numbers."""
        ...


class PendingResult:
    """Results of one plan, copied to the host in the background.

    Args:
        numbers: int64 [result_len, result_width], on the rank's device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers, self._copied = download(numbers)

    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> NDArray[np.int64]:
        """Wait for the device and return the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: NDArray[np.int64] = self._numbers.numpy()
        return numbers


class ResultInParts:
    """Results whose last part can be launched only once the host has the first.

    Args:
        first: what to wait for before the launch.
        launch: returns the results.
    """

    def __init__(self, first: PendingResult, launch: Callable[[], PendingResult]) -> None:
        self._first, self._launch = first, launch
        self._launched: PendingResult | None = None

    def launch(self) -> PendingResult:
        """Launch the last part, unless it has been; waits for the first."""
        if self._launched is None:
            self._first.wait()
            self._launched = self._launch()
            del self._launch  # and what it holds on the device
        return self._launched

    def is_ready(self) -> bool:
        """Whether `wait` returns at once. Launches the last part as soon as the first is there."""
        if self._launched is None and not self._first.is_ready():
            return False
        return self.launch().is_ready()

    def wait(self) -> NDArray[np.int64]:
        """Wait for the device and return the numbers."""
        return self.launch().wait()
