"""Copy engines as threads, and groups of threads that have them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from raycache.parallel.copy_exchange import CopyExchange, memory_bytes
from tests.oracle.attention import ThreadGroup


class SlowCopyStream:
    """Does what is submitted in order, on a thread, each at some time or other."""

    def __init__(self, *, seed: int) -> None:
        self._tasks: Queue[Callable[[], None]] = Queue()
        self._random = random.Random(seed)
        self._is_released = threading.Event()
        self._failure: Exception | None = None
        self.num_copied = 0
        threading.Thread(target=self._work, daemon=True).start()

    def after_compute(self) -> None:
        """Work on a CPU is done when it is submitted."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        assert to.is_contiguous() and source.is_contiguous() and to.shape == source.shape and to.dtype == source.dtype
        self.num_copied += source.nbytes
        self._tasks.put(lambda: (to.copy_(source), None)[1])

    def write(self, to: Tensor, number: int) -> None:
        self._tasks.put(lambda: (to.fill_(number), None)[1])

    def wait(self, source: Tensor, number: int) -> None:
        def until_it_is_there() -> None:
            deadline = time.monotonic() + 20
            while int(source) < number and not self._is_released.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.0002)

        self._tasks.put(until_it_is_there)

    def before_compute(self) -> None:
        self._tasks.join()
        if self._failure is not None:
            raise self._failure

    def release(self, numbers: Tensor, number: int) -> None:
        numbers.fill_(number)
        self._is_released.set()

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            time.sleep(self._random.choice([0, 0, 0.001, 0.003]))
            try:
                task()
            except (AssertionError, RuntimeError) as cause:
                self._failure = cause
            self._tasks.task_done()


class CopyingGroup(ThreadGroup):
    """A member of a group of threads with copy engines."""

    _made: CopyExchange | None = None
    _bytes = 0

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.stream = SlowCopyStream(seed=self.rank)

    def copies(self, area_bytes: int) -> CopyExchange | None:
        if area_bytes > self._bytes:
            self._bytes = area_bytes
            self._made = CopyExchange(self.rank, self.shared(memory_bytes(area_bytes, size=self.size)), self.stream)
        return self._made

    def shared(self, num_bytes: int) -> list[Tensor]:
        """Memory of each member, which all can write."""
        self._board[self.rank] = torch.zeros(num_bytes, dtype=torch.uint8)
        self._barrier.wait(20)
        found = list(self._board)
        self._barrier.wait(20)
        return found
