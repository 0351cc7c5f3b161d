"""Threads that do the decider's commands to the storage, so that it never waits for one.

    post -> finding and fetching:  [ owner a: 1 4 ] [ owner b: 2 ] ...  -> lanes -> results
            persisting:            [ owner c: 3 5 ] ...

Owners take turns, so that a long prompt does not keep a short one waiting. Finding and fetching go before persisting,
which leaves one lane free for them where there are several. What has not begun can be cancelled, and is late after its
deadline even if all lanes hang in a slow storage.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from raycache.cache.storage_commands import CommandKind, Outcome, StorageCommand, StorageResult


class StorageLanes:
    """Does commands side by side and collects the results: exactly one for each command.

    Args:
        work: does one command; called from several threads. Raises OSError if there is nobody who can.
        num_lanes: commands at once.
        name: of the threads.
    """

    def __init__(self, work: Callable[[StorageCommand], StorageResult], *, num_lanes: int, name: str) -> None:
        assert num_lanes >= 1, f"{num_lanes} lanes do no commands"
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
        """Commands whose results were not taken yet."""
        return self._num_open

    def post(self, command: StorageCommand) -> None:
        """Have a command done."""
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
        """Answers that have come since the last call; never blocks."""
        with self._lock:
            self._give_up_late()
            results, self._results = self._results, []
            self._num_open -= len(results)
        return results

    def cancel(self, owner: str) -> None:
        """Answer those commands of an owner as cancelled that did not begin."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda command: command.owner == owner), Outcome.CANCELLED)

    def cancel_kind(self, kind: CommandKind) -> None:
        """The same for all commands of a kind."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda command: command.kind is kind), Outcome.CANCELLED)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an result; False if there was none in time."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._give_up_late()
                left_s = end_s - time.monotonic()
                if self._results or left_s <= 0:
                    return bool(self._results)
                self._has_result.wait(min(left_s, max(0.0, self._next_deadline_s - time.monotonic())))

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait for what has begun.

        Returns:
            Whether all of that ended in time. What did not is of no use to anybody: its threads end with the process.
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
            # An error that is ours ends the thread and shows; the next one goes on, so that nobody waits for ever.
            with self._lock:
                if not self._is_closed:
                    self._start(lane)

    def _begin(self) -> StorageCommand | None:
        """Wait for a command; None at the end."""
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
        result = command.not_done(Outcome.UNAVAILABLE, "a defect: the lane ended, see its traceback")
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
    """Commands that wait, by owner; the owner whose turn it is comes first."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[StorageCommand]] = OrderedDict()

    def add(self, command: StorageCommand) -> None:
        """After those of its owner; an owner without any comes last."""
        self._by_owner.setdefault(command.owner, deque()).append(command)

    def take(self) -> StorageCommand | None:
        """The next command."""
        if not self._by_owner:
            return None
        owner, commands = self._by_owner.popitem(last=False)
        command = commands.popleft()
        if commands:
            self._by_owner[owner] = commands
        return command

    def remove(self, is_over: Callable[[StorageCommand], bool]) -> list[StorageCommand]:
        """Take out all that are over, whosever turn it is."""
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
        """The first of all deadlines, infinite for none."""
        return min(
            (command.deadline_s for commands in self._by_owner.values() for command in commands), default=math.inf
        )


def _is_late(now_s: float) -> Callable[[StorageCommand], bool]:
    return lambda command: command.deadline_s <= now_s
