"""Threads that do the decider's orders to the storage, so that it never waits for one.

    post -> finding and fetching:  [ owner a: 1 4 ] [ owner b: 2 ] ...  -> lanes -> answers
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

from raycache.cache.storage_orders import OrderKind, Outcome, StorageAnswer, StorageOrder


class StorageLanes:
    """Does orders side by side and collects the answers: exactly one for each order.

    Args:
        work: does one order; called from several threads. Raises OSError if there is nobody who can.
        num_lanes: orders at once.
        name: of the threads.
    """

    def __init__(self, work: Callable[[StorageOrder], StorageAnswer], *, num_lanes: int, name: str) -> None:
        assert num_lanes >= 1, f"{num_lanes} lanes do no orders"
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._may_begin, self._has_answer = threading.Condition(self._lock), threading.Condition(self._lock)
        self._urgent, self._persists = _Turns(), _Turns()
        self._most_persists = max(1, num_lanes - 1)
        self._num_persists = self._num_open = 0
        self._next_deadline_s = math.inf
        self._answers: list[StorageAnswer] = []
        self._is_closed = False
        self._lanes = dict[int, threading.Thread]()
        for lane in range(num_lanes):
            self._start(lane)

    @property
    def num_open(self) -> int:
        """Orders whose answers were not taken yet."""
        return self._num_open

    def post(self, order: StorageOrder) -> None:
        """Have an order done."""
        with self._lock:
            self._num_open += 1
            if self._is_closed:
                self._give_up([order], Outcome.CANCELLED)
                return
            turns = self._persists if order.kind is OrderKind.PERSIST else self._urgent
            turns.add(order)
            self._next_deadline_s = min(self._next_deadline_s, order.deadline_s)
            self._may_begin.notify()

    def answers(self) -> list[StorageAnswer]:
        """Answers that have come since the last call; never blocks."""
        with self._lock:
            self._give_up_late()
            answers, self._answers = self._answers, []
            self._num_open -= len(answers)
        return answers

    def cancel(self, owner: str) -> None:
        """Answer those orders of an owner as cancelled that did not begin."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda order: order.owner == owner), Outcome.CANCELLED)

    def cancel_kind(self, kind: OrderKind) -> None:
        """The same for all orders of a kind."""
        with self._lock:
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda order: order.kind is kind), Outcome.CANCELLED)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is an answer; False if there was none in time."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._give_up_late()
                left_s = end_s - time.monotonic()
                if self._answers or left_s <= 0:
                    return bool(self._answers)
                self._has_answer.wait(min(left_s, max(0.0, self._next_deadline_s - time.monotonic())))

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait for what has begun.

        Returns:
            Whether all of that ended in time. What did not is of no use to anybody: its threads end with the process.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for turns in (self._urgent, self._persists):
                self._give_up(turns.remove(lambda order: True), Outcome.CANCELLED)
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
            while (order := self._begin()) is not None:
                self._do(order)
        finally:
            # An error that is ours ends the thread and shows; the next one goes on, so that nobody waits for ever.
            with self._lock:
                if not self._is_closed:
                    self._start(lane)

    def _begin(self) -> StorageOrder | None:
        """Wait for an order; None at the end."""
        with self._lock:
            while True:
                self._give_up_late()
                order = self._urgent.take()
                if order is None and self._num_persists < self._most_persists:
                    order = self._persists.take()
                if order is not None:
                    self._num_persists += order.kind is OrderKind.PERSIST
                    return order
                if self._is_closed:
                    return None
                self._may_begin.wait()

    def _do(self, order: StorageOrder) -> None:
        start_s = time.monotonic()
        answer = order.not_done(Outcome.UNAVAILABLE, "a defect: the lane ended, see its traceback")
        try:
            answer = replace(self._work(order), seconds=time.monotonic() - start_s)
        except OSError as error:
            answer = order.not_done(Outcome.UNAVAILABLE, str(error) or type(error).__name__)
        finally:
            with self._lock:
                if order.kind is OrderKind.PERSIST:
                    self._num_persists -= 1
                    self._may_begin.notify()
                self._answers.append(answer)
                self._has_answer.notify_all()

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_deadline_s:
            return
        late = [order for turns in (self._urgent, self._persists) for order in turns.remove(_is_late(now_s))]
        self._give_up(late, Outcome.LATE)
        self._next_deadline_s = min(self._urgent.next_deadline_s(), self._persists.next_deadline_s())

    def _give_up(self, orders: Iterable[StorageOrder], outcome: Outcome) -> None:
        self._answers += [order.not_done(outcome) for order in orders]
        self._has_answer.notify_all()


class _Turns:
    """Orders that wait, by owner; the owner whose turn it is comes first."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[StorageOrder]] = OrderedDict()

    def add(self, order: StorageOrder) -> None:
        """After those of its owner; an owner without any comes last."""
        self._by_owner.setdefault(order.owner, deque()).append(order)

    def take(self) -> StorageOrder | None:
        """The next order."""
        if not self._by_owner:
            return None
        owner, orders = self._by_owner.popitem(last=False)
        order = orders.popleft()
        if orders:
            self._by_owner[owner] = orders
        return order

    def remove(self, is_over: Callable[[StorageOrder], bool]) -> list[StorageOrder]:
        """Take out all that are over, whosever turn it is."""
        over = []
        for owner, orders in list(self._by_owner.items()):
            gone = [order for order in orders if is_over(order)]
            over += gone
            if len(gone) == len(orders):
                del self._by_owner[owner]
            elif gone:
                self._by_owner[owner] = deque(order for order in orders if not is_over(order))
        return over

    def next_deadline_s(self) -> float:
        """The first of all deadlines, infinite for none."""
        return min((order.deadline_s for orders in self._by_owner.values() for order in orders), default=math.inf)


def _is_late(now_s: float) -> Callable[[StorageOrder], bool]:
    return lambda order: order.deadline_s <= now_s
