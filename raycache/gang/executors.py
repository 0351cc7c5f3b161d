"""Executors: one rank in the decider's process, or a gang reached over the control group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from raycache.deployment.memory_use import refusing_out_of_memory
from raycache.errors import RankLostError
from raycache.gang.watch import RankProcesses, RankWatch
from raycache.parallel.board import AckBoard, Acks, Lane
from raycache.parallel.collectives import Group
from raycache.parallel.node_group import NodeGroup
from raycache.parallel.relay import BoardReceiver
from raycache.parallel.sharding import Split
from raycache.rank.pending_result import Pending
from raycache.rank.rank import LaunchedLayers, Rank
from raycache.wire.control import broadcast_masks, broadcast_plan, receive_results
from raycache.wire.plan import Masks, StepPlan
from raycache.wire.results import RowResult, read_results

_POLL_S = 0.001
_BLAME_S = 1.0
"""How long to wait for a process to end, or for survivors of a lost gang to report a lost peer; a rank that reports
nothing is blamed."""
_MOVES_END_S = 30.0


class LocalExecutor:
    """One rank in the decider's own process.

    Args:
        rank: holds the whole model.
        board: progress of its page moves; None without a host tier.
        plans_ahead: whether to launch a plan while the device works on another.
    """

    def __init__(self, rank: Rank, board: AckBoard | None = None, *, plans_ahead: bool = False) -> None:
        self._rank = rank
        self._board = board
        self._started: deque[tuple[StepPlan, Pending]] = deque()
        self._launched = LaunchedLayers(StepPlan(0))  # of the last plan
        self.depth = 2 if plans_ahead else 1

    def submit(self, plan: StepPlan) -> None:
        with refusing_out_of_memory(self._rank.ctx.device, doing=f"running step {plan.step}"):
            self._launched = self._rank.launch(plan)
            if not plan.mask_len:
                self._started.append((plan, self._rank.finish(self._launched)))

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        with refusing_out_of_memory(self._rank.ctx.device, doing=f"sampling in step {plan.step}"):
            self._started.append((plan, self._rank.finish(self._launched, masks)))

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        started, pending = self._started.popleft()
        assert started is plan, "plans are collected in order"
        with refusing_out_of_memory(self._rank.ctx.device, doing=f"drafting in step {plan.step}"):
            return read_results(plan, [pending.wait()])

    def acks(self) -> Acks:
        return Acks() if self._board is None else self._board.acks()

    def close(self) -> None:
        """Discard results in flight, after waiting for them and for page moves."""
        while self._started:
            self._started.popleft()[1].wait()
        if self._rank.mover is None:
            return
        saves, loads = self._rank.mover.last_numbers
        deadline = time.monotonic() + _MOVES_END_S
        while (acks := self.acks()).saves < saves or acks.loads < loads:
            if time.monotonic() > deadline:
                raise RankLostError(0, "", 0, f"page moves to the host did not end within {_MOVES_END_S:.0f} s")
            time.sleep(0.001)


class GangExecutor:
    """All ranks of a gang, reached over the control group.

    Args:
        control: the decider's end of the control group.
        split: how the model is split over the gang's ranks.
        board: progress of the ranks.
        timeout_s: how long a rank may take for a plan.
        plans_ahead: whether to send a plan to a single stage while it works on another.
        receivers: receive the boards of other nodes.
    """

    def __init__(
        self,
        control: Group,
        *,
        split: Split,
        board: AckBoard,
        timeout_s: float,
        plans_ahead: bool = False,
        receivers: Sequence[BoardReceiver] = (),
    ) -> None:
        self.control = control
        self._split = split
        self._board = board
        self._timeout_s = timeout_s
        self._receivers = receivers
        self._watch: RankWatch | None = None
        self._step = 0
        self._sending: deque[list[Callable[[], None]]] = deque()  # per plan in flight
        self.depth = 2 if plans_ahead and split.pp == 1 else split.pp

    def watch(self, ranks: RankProcesses) -> None:
        """Fail waits for the ranks as soon as one of their processes ends."""
        self._watch = RankWatch(ranks, board=self._board)

    def submit(self, plan: StepPlan) -> None:
        self._step = plan.step
        if plan.is_last:
            self._stop_watching()
        try:
            self._sending.append([broadcast_plan(plan, self.control)])
        except RankLostError as cause:
            raise self._blame(plan.step, cause.cause) from cause

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        try:
            self._sending[-1].append(broadcast_masks(masks, self.control))
        except RankLostError as cause:
            raise self._blame(plan.step, cause.cause) from cause

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        try:
            answers = receive_results(plan, self.control, split=self._split)
            for sent in self._sending[0]:
                sent()
            if not plan.rows:
                self._wait_for_all(plan.step)
        except RankLostError as cause:
            raise self._blame(plan.step, cause.cause) from cause
        self._sending.popleft()
        return read_results(plan, answers)

    def _wait_for_all(self, step: int) -> None:
        """Wait until all ranks have run a heartbeat. Those that return no results, and compute nothing with others that
        do, show in no other way that they still take plans."""
        deadline = time.monotonic() + self._timeout_s
        while self._board.low(Lane.STEP) < step:
            if time.monotonic() > deadline or (self._watch is not None and self._watch.is_over):
                raise RankLostError(-1, "unknown", step, f"a rank ran no plan within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def acks(self) -> Acks:
        if any(receiver.is_over for receiver in self._receivers):
            # Its ranks may be healthy, but their page moves would never be acknowledged.
            raise self._blame(self._step, "the progress board of its node is no longer forwarded")
        return self._board.acks()

    def close(self) -> None:
        try:
            for parts in self._sending:
                for sent in parts:
                    sent()
        finally:
            self.control.close()

    def abandon(self) -> None:
        """Stop listening to the ranks, which are about to be killed."""
        self._stop_watching()
        for receiver in self._receivers:
            receiver.close()
        if isinstance(self.control, NodeGroup):
            self.control.close()
        elif self._sending:
            # Whoever drops the last reference to a process group waits for what it still sends: until the deadline, if
            # a rank hangs. So a thread of its own holds one until then.
            Thread(target=_end, args=(self.control, list(self._sending)), name="abandoned plans", daemon=True).start()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _blame(self, step: int, cause: str) -> RankLostError:
        """Find the rank that caused a loss: one whose process has ended, else the one that the board points to."""
        deadline = time.monotonic() + _BLAME_S
        ended = None if self._watch is None else self._watch.lost(timeout_s=_BLAME_S)
        if ended is not None:
            rank, how = ended
            return RankLostError(rank, str(self._split.coords(rank)), step, how)
        while len(suspects := self._board.suspects(step)) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        rank = suspects[0] if suspects else -1
        coords = str(self._split.coords(rank)) if suspects else "unknown"
        return RankLostError(rank, coords, step, cause)


def _end(control: Group, sending: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Wait for what is sent over a group, while holding it."""
    for parts in sending:
        for sent in parts:
            with suppress(RankLostError):
                sent()
