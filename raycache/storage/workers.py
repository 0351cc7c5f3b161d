"""Threads that carry the requests of a call to a storage across the network.

Many requests are under way at once, and none keeps the caller past its time. A request that is late runs on, so it may
only touch memory of its own: what it brings is copied to the caller's buffers by the caller, who is not there any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Threads with a deadline for each call.

    Args:
        num_threads: requests at once, of all calls together.
        timeout_s: for all requests of a call, from when they are handed in.
        name: of the threads.
    """

    def __init__(self, num_threads: int, *, timeout_s: float, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"storage {name}")
        self._timeout_s = timeout_s

    def run(self, requests: Sequence[Callable[[], T]]) -> list[T]:
        """Results of all requests, in their order.

        Raises:
            TimeoutError: they are not done in time; those that have not begun never will.
            Exception: that the first request to fail raised.
        """
        results = dict(self.each(requests))
        return [results[i] for i in range(len(requests))]

    def each(self, requests: Sequence[Callable[[], T]]) -> Iterator[tuple[int, T]]:
        """(place of the request, its result) as they come in, of which nothing is kept. Raises as `run`."""
        pending = {self._threads.submit(request): i for i, request in enumerate(requests)}
        try:
            for done in as_completed(pending, timeout=self._timeout_s):
                yield pending.pop(done), done.result()
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
        finally:
            for late in pending:
                late.cancel()

    def close(self) -> None:
        """Begin nothing more; does not wait for requests under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Scratch:
    """Memory that requests pack objects in, used again: to touch fresh memory costs many times the copy."""

    def __init__(self) -> None:
        self._free = deque[bytearray]()

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[memoryview]:
        """So many bytes of whatever content, for the block."""
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
