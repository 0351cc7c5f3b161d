"""Threads that send the network requests of storage calls.

Requests run concurrently, and no caller waits beyond its timeout. A request that times out keeps running, so it must
use only its own memory: the caller copies results into its buffers, which may have been reused by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """A thread pool with a timeout per call.

    Args:
        num_threads: maximum concurrent requests of all calls together.
        timeout_s: for all requests of a call together.
        name: of the storage, for thread names.
    """

    def __init__(self, num_threads: int, *, timeout_s: float, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"storage {name}")
        self._timeout_s = timeout_s

    def run(self, requests: Sequence[Callable[[], T]]) -> list[T]:
        """Run requests and return their results, in order.

        Raises:
            TimeoutError: they did not all end in time; queued ones are cancelled.
            Exception: the first exception of a request.
        """
        results = dict(self.each(requests))
        return [results[i] for i in range(len(requests))]

    def each(self, requests: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """Yield (index of the request, result) in order of completion, keeping none in memory. Raises like `run`."""
        pending = {self._threads.submit(request): i for i, request in enumerate(requests)}
        try:
            for done in as_completed(pending, timeout=self._timeout_s):
                yield pending.pop(done), done.result()
        except TimeoutError as error:
            raise TimeoutError(f"no response within {self._timeout_s:g} s") from error
        finally:
            for late in pending:
                late.cancel()

    def close(self) -> None:
        """Cancel queued requests; does not wait for running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Scratch:
    """Reusable buffers for packing objects; page faults of fresh memory cost many times the copy."""

    def __init__(self) -> None:
        self._free = deque[bytearray]()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[memoryview]:
        """Lend a buffer with arbitrary content for the `with` block."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray()
        if len(buffer) < num_bytes:
            buffer = bytearray(num_bytes)
        try:
            yield memoryview(buffer)[:num_bytes]
        finally:
            self._free.append(buffer)
