"""Lanes do every command once and answer it once, whatever the storage does."""

from __future__ import annotations

import pickle
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Final, get_origin, get_type_hints

import pytest

from raycache.cache.storage_commands import (
    CommandKind,
    Fetch,
    Found,
    Outcome,
    StorageCommand,
    StorageResult,
    StoredUnit,
    StoredUnits,
)
from raycache.storage.lanes import StorageLanes

WAIT_S = 20.0  # longer than a busy machine takes
UNIT = StoredUnit("full", 3, bytes(range(32)))


def command(
    number: int, owner: str = "a", kind: CommandKind = CommandKind.FETCH, deadline_s: float = 1e18
) -> StorageCommand:
    return StorageCommand(kind, number, owner, units=StoredUnits.of([UNIT]), deadline_s=deadline_s)


def persist(number: int, owner: str = "a") -> StorageCommand:
    return command(number, owner, CommandKind.PERSIST)


class Desk:
    """Does commands when it is told to, and remembers in which order it began them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.errors: dict[int, Exception] = {}
        self._may_end = threading.Semaphore(0)
        self._changed = threading.Condition()

    def work(self, command: StorageCommand) -> StorageResult:
        with self._changed:
            self.begun.append(command.number)
            self._changed.notify_all()
        assert self._may_end.acquire(timeout=WAIT_S)
        if command.number in self.errors:
            raise self.errors[command.number]
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE, found=Found(command.number))

    def let_end(self, count: int = 1) -> None:
        self._may_end.release(count)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, WAIT_S)


@contextmanager
def lanes_of(work: Callable[[StorageCommand], StorageResult], num_lanes: int = 1) -> Iterator[StorageLanes]:
    lanes = StorageLanes(work, num_lanes=num_lanes, name="test")
    try:
        yield lanes
    finally:
        lanes.close(0)


def take(lanes: StorageLanes, count: int) -> list[StorageResult]:
    """The next answers, as many as that."""
    answers: list[StorageResult] = []
    while len(answers) < count:
        assert lanes.wait(WAIT_S)
        answers += lanes.results()
    assert len(answers) == count
    return answers


def test_every_order_is_answered_once() -> None:
    def work(command: StorageCommand) -> StorageResult:
        time.sleep(random.random() / 2000)
        return StorageResult(command.number, command.kind, command.owner, Outcome.DONE)

    with lanes_of(work, num_lanes=4) as lanes:
        for number in range(200):
            lanes.post(command(number, f"owner {number % 7}", list(CommandKind)[number % 3]))
        assert lanes.num_open == 200
        answers = take(lanes, 200)
        assert sorted(answer.number for answer in answers) == list(range(200))
        assert all(answer.outcome is Outcome.DONE and answer.seconds > 0 for answer in answers)
        assert lanes.num_open == 0 and lanes.results() == []
        assert lanes.close(WAIT_S)


def test_owners_take_turns() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(command(0, "first"))
        desk.wait_for(1)
        for number, owner in enumerate("aaaabbc", start=1):
            lanes.post(command(number, owner))
        desk.let_end(8)
        take(lanes, 8)
    assert desk.begun == [0, 1, 5, 7, 2, 6, 3, 4]


def test_fetching_goes_before_persisting_and_has_a_lane_of_its_own() -> None:
    desk = Desk()
    with lanes_of(desk.work, num_lanes=2) as lanes:
        for number in range(3):
            lanes.post(persist(number))
        desk.wait_for(1)
        time.sleep(0.05)  # for another lane to begin what it must not
        lanes.post(command(3))
        desk.wait_for(2)
        assert sorted(desk.begun) == [0, 3], "one lane is left free by persists"
        lanes.post(command(4))
        desk.let_end(5)
        take(lanes, 5)
    assert sorted(desk.begun) == [0, 1, 2, 3, 4]


def test_a_single_lane_persists_when_there_is_nothing_else() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(persist(0))
        desk.wait_for(1)
        lanes.post(persist(1))
        lanes.post(command(2))
        desk.let_end(3)
        take(lanes, 3)
    assert desk.begun == [0, 2, 1]


def test_what_has_not_begun_can_be_cancelled() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(command(0, "a"))
        desk.wait_for(1)
        for number, owner in ((1, "a"), (2, "b"), (3, "a")):
            lanes.post(command(number, owner))
        lanes.post(persist(4, "a"))
        lanes.cancel("a")
        cancelled = take(lanes, 3)
        assert [(answer.number, answer.outcome) for answer in cancelled] == [(n, Outcome.CANCELLED) for n in (1, 3, 4)]
        assert [answer.fetches for answer in cancelled] == [(Fetch.UNAVAILABLE,), (Fetch.UNAVAILABLE,), ()]
        assert [answer.stored for answer in cancelled] == [b"", b"", bytes([False])]
        desk.let_end(2)
        assert {answer.number: answer.outcome for answer in take(lanes, 2)} == {0: Outcome.DONE, 2: Outcome.DONE}
    assert desk.begun == [0, 2]


def test_all_of_a_kind_that_has_not_begun_can_be_cancelled() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(persist(0))
        desk.wait_for(1)
        for each in (persist(1), command(2), persist(3, "b")):
            lanes.post(each)
        lanes.cancel_kind(CommandKind.PERSIST)
        assert {answer.number: answer.outcome for answer in take(lanes, 2)} == dict.fromkeys((1, 3), Outcome.CANCELLED)
        desk.let_end(2)
        assert {answer.number: answer.outcome for answer in take(lanes, 2)} == dict.fromkeys((0, 2), Outcome.DONE)
    assert desk.begun == [0, 2]


def test_what_does_not_begin_in_time_is_late_even_if_all_lanes_hang() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(command(0))
        desk.wait_for(1)
        now_s = time.monotonic()
        lanes.post(command(1, "b", deadline_s=now_s + 60))
        lanes.post(command(2, "b", deadline_s=now_s + 0.05))
        lanes.post(command(3, "c"))
        assert lanes.results() == []
        (late,) = take(lanes, 1)
        assert (late.number, late.outcome) == (2, Outcome.LATE)
        assert 0.05 <= time.monotonic() - now_s < WAIT_S
        assert lanes.num_open == 3
        lanes.post(command(4, deadline_s=now_s))
        assert [answer.number for answer in lanes.results()] == [4], "nobody has to wait for it"
        desk.let_end(3)
        assert {answer.outcome for answer in take(lanes, 3)} == {Outcome.DONE}
    assert desk.begun == [0, 1, 3]


def test_what_has_begun_is_not_late() -> None:
    desk = Desk()
    with lanes_of(desk.work) as lanes:
        lanes.post(command(0, deadline_s=time.monotonic() + 0.02))
        desk.wait_for(1)
        assert not lanes.wait(0.05)
        desk.let_end()
        (answer,) = take(lanes, 1)
        assert answer.outcome is Outcome.DONE and answer.seconds >= 0.05


def test_nobody_to_ask_is_an_answer() -> None:
    desk = Desk()
    desk.errors[0] = ConnectionError("the owner of the arena is gone")
    desk.errors[1] = TimeoutError()
    desk.let_end(2)
    with lanes_of(desk.work) as lanes:
        lanes.post(command(0))
        lanes.post(persist(1))
        gone, slow = take(lanes, 2)
        assert (gone.outcome, gone.error, gone.fetches) == (
            Outcome.UNAVAILABLE,
            "the owner of the arena is gone",
            (Fetch.UNAVAILABLE,),
        )
        assert (slow.outcome, slow.error, slow.stored) == (Outcome.UNAVAILABLE, "TimeoutError", bytes([False]))


def test_a_defect_is_answered_and_shows_and_costs_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = queue.SimpleQueue[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", shown.put)
    desk = Desk()
    desk.errors = {number: ZeroDivisionError("ours") for number in range(3)}
    desk.let_end(4)
    with lanes_of(desk.work) as lanes:
        for number in range(4):
            lanes.post(command(number) if number != 1 else persist(number))
        answers = {answer.number: answer.outcome for answer in take(lanes, 4)}
        assert answers == {0: Outcome.UNAVAILABLE, 1: Outcome.UNAVAILABLE, 2: Outcome.UNAVAILABLE, 3: Outcome.DONE}
        assert [shown.get(timeout=WAIT_S).exc_type for _ in range(3)] == [ZeroDivisionError] * 3
        assert lanes.close(WAIT_S)


def test_closing_answers_all_and_does_not_wait_for_what_hangs() -> None:
    desk = Desk()
    with lanes_of(desk.work, num_lanes=2) as lanes:
        for number in range(4):
            lanes.post(command(number))
        desk.wait_for(2)
        assert not lanes.close(0.05)
        assert [(answer.number, answer.outcome) for answer in lanes.results()] == [
            (2, Outcome.CANCELLED),
            (3, Outcome.CANCELLED),
        ]
        lanes.post(command(4))
        assert [answer.outcome for answer in lanes.results()] == [Outcome.CANCELLED]
        desk.let_end(2)
        assert lanes.close(WAIT_S)
        assert sorted(answer.number for answer in lanes.results()) == [0, 1]
        assert lanes.num_open == 0


def test_waiting_ends_in_time() -> None:
    with lanes_of(Desk().work) as lanes:
        start_s = time.monotonic()
        assert not lanes.wait(0.05)
        assert 0.05 <= time.monotonic() - start_s < WAIT_S
        assert not lanes.wait(0)


def test_orders_and_answers_travel() -> None:
    for thing in (command(1), command(1).not_done(Outcome.LATE), persist(2).not_done(Outcome.UNAVAILABLE, "why")):
        assert pickle.loads(pickle.dumps(thing)) == thing
    assert UNIT.tag == 0x0706050403020100


def test_commands_are_values_that_nothing_may_change() -> None:
    assert command(1) == command(1) != command(2)
    hints = get_type_hints(StorageCommand)
    assert all(get_origin(hints[field.name]) is Final for field in fields(StorageCommand))
