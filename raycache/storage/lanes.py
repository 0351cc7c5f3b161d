"""Threads that execute the decider's storage commands, so that the decider never blocks on storage.

    post -> find and fetch:  [ owner a: 1 4 ] [ owner b: 2 ] ...  -> lanes -> results
            persist:         [ owner c: 3 5 ] ...

Owners are served round-robin, so a long prompt does not delay a short one. Finds and fetches go before persists, which
never occupy all of several lanes. Queued commands can be cancelled, and expire at their deadline even if none is free.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from raycache.cache.storage_commands import CommandKind, Outcome, StorageCommand, StorageResult

NUM_LANES = 2
"""Of a service: storage commands at a time on each node."""


class StorageLanes:
    """Executes commands concurrently and collects exactly one result for each.

    Args:
        work: executes one command; called from several threads. Raises OSError if the storage is unreachable.
        num_lanes: number of threads.
        name: prefix of their names.
    """

    def __init__(self, work: Callable[[StorageCommand], StorageResult], *, num_lanes: int, name: str) -> None:
        assert num_lanes >= 1, f"num_lanes={num_lanes}"
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._may_begin, self._has_result = threading.Condition(self._lock), threading.Condition(self._lock)
        self._urgent, self._persists = _Turns(), _Turns()
        self._most_persists = max(1, num_lanes - 1)
        self._num_persists = self._num_open = 0
        self._next_deadline_s = math.inf
        self._results: list[StorageResult] = []
        self._is_closed = False
        self._lanes = dict[int, threading.Thread]()
        for lane in range(num_lanes):
            self._start(lane)

    @property
    def num_open(self) -> int:
        """Commands whose results have not been collected yet."""
        return self._num_open

    def post(self, command: StorageCommand) -> None:
        """Queue a command; does not block."""
        with self._lock:
            self._num_open += 1
            if self._is_closed:
                self._give_up([command], Outcome.CANCELLED)
                return
            turns = self._persists if command.kind is CommandKind.PERSIST else self._urgent
            turns.add(command)
            self._next_deadline_s = min(self._next_deadline_s, command.deadline_s)
            self._may_begin.notify()

    def results(self) -> list[StorageResult]:
        """Results since the last call; does not block."""
        with self._lock:
            self._give_up_late()
            results, self._results = self._results, []
            self._num_open -= len(results)
        return results

    def cancel(self, owner: str) -> None:
        """Drop an owner's commands that have not started; their results say CANCELLED."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda command: command.owner == owner), Outcome.CANCELLED)

    def cancel_kind(self, kind: CommandKind) -> None:
        """Drop commands of one kind that have not started; their results say CANCELLED."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda command: command.kind is kind), Outcome.CANCELLED)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next result; returns whether there is one."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._give_up_late()
                left_s = end_s - time.monotonic()
                if self._results or left_s <= 0:
                    return bool(self._results)
                self._has_result.wait(min(left_s, max(0.0, self._next_deadline_s - time.monotonic())))

    def close(self, timeout_s: float) -> bool:
        """Drop queued commands and wait for running ones.

        Returns:
            Whether all of them ended in time. Threads that did not are abandoned and end with the process.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda command: True), Outcome.CANCELLED)
            self._may_begin.notify_all()
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.join(max(0.0, end_s - time.monotonic()))
        return not any(lane.is_alive() for lane in lanes)

    def _start(self, lane: int) -> None:
        self._lanes[lane] = threading.Thread(
            target=self._run, args=(lane,), name=f"{self._name} lane {lane}", daemon=True
        )
        self._lanes[lane].start()

    def _run(self, lane: int) -> None:
        try:
            while (command := self._begin()) is not None:
                self._do(command)
        finally:
            # A bug ends the thread with a traceback; a new thread takes its place, so that no caller waits for ever.
            with self._lock:
                if not self._is_closed:
                    self._start(lane)

    def _begin(self) -> StorageCommand | None:
        """Wait for a command; None after `close`."""
        with self._lock:
            while True:
                self._give_up_late()
                command = self._urgent.take()
                if command is None and self._num_persists < self._most_persists:
                    command = self._persists.take()
                if command is not None:
                    self._num_persists += command.kind is CommandKind.PERSIST
                    return command
                if self._is_closed:
                    return None
                self._may_begin.wait()

    def _do(self, command: StorageCommand) -> None:
        start_s = time.monotonic()
        result = command.not_done(Outcome.UNAVAILABLE, "internal error: the lane died; see its traceback")
        try:
            result = replace(self._work(command), seconds=time.monotonic() - start_s)
        except OSError as error:
            result = command.not_done(Outcome.UNAVAILABLE, str(error) or type(error).__name__)
        finally:
            with self._lock:
                if command.kind is CommandKind.PERSIST:
                    self._num_persists -= 1
                    self._may_begin.notify()
                self._results.append(result)
                self._has_result.notify_all()

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_deadline_s:
            return
        late = [command for turns in (self._urgent, self._persists) for command in turns.remove(_is_late(now_s))]
        self._give_up(late, Outcome.LATE)
        self._next_deadline_s = min(self._urgent.next_deadline_s(), self._persists.next_deadline_s())

    def _give_up(self, commands: Iterable[StorageCommand], outcome: Outcome) -> None:
        self._results += [command.not_done(outcome) for command in commands]
        self._has_result.notify_all()


class _Turns:
    """Queued commands by owner; the next owner to be served comes first."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[StorageCommand]] = OrderedDict()

    def add(self, command: StorageCommand) -> None:
        """Append to its owner's commands; a new owner is served last."""
        self._by_owner.setdefault(command.owner, deque()).append(command)

    def take(self) -> StorageCommand | None:
        """Remove and return the next command; None if there is none."""
        if not self._by_owner:
            return None
        owner, commands = self._by_owner.popitem(last=False)
        command = commands.popleft()
        if commands:
            self._by_owner[owner] = commands
        return command

    def remove(self, is_over: Callable[[StorageCommand], bool]) -> list[StorageCommand]:
        """Remove and return the commands for which `is_over` is true."""
        over = []
        for owner, commands in list(self._by_owner.items()):
            gone = [command for command in commands if is_over(command)]
            over += gone
            if len(gone) == len(commands):
                del self._by_owner[owner]
            elif gone:
                self._by_owner[owner] = deque(command for command in commands if not is_over(command))
        return over

    def next_deadline_s(self) -> float:
        """The earliest deadline; infinity if nothing is queued."""
        return min(
            (command.deadline_s for commands in self._by_owner.values() for command in commands), default=math.inf
        )


def _is_late(now_s: float) -> Callable[[StorageCommand], bool]:
    return lambda command: command.deadline_s <= now_s
