"""Ranks as the decider sees them: its own, or a gang behind the control group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from raycache.deployment.memory_use import refusing_out_of_memory
from raycache.errors import RankLostError
from raycache.gang.watch import RankProcesses, RankWatch
from raycache.parallel.board import AckBoard, Acks
from raycache.parallel.collectives import Group
from raycache.parallel.relay import BoardReceiver
from raycache.parallel.sharding import Split
from raycache.rank.answer import PendingAnswer
from raycache.rank.rank import Rank
from raycache.wire.control import broadcast_plan, receive_results
from raycache.wire.plan import RowResult, StepPlan, read_results

_BLAME_S = 1.0
"""How long to wait for the end of a process, or for the survivors of a lost gang to say that they lost a peer; who says
nothing is to blame."""
_MOVES_END_S = 30.0


class LocalExecutor:
    """One rank in the decider's own process.

    Args:
        rank: with the whole model.
        board: where it says how far its moves are; None without a host tier.
        plans_ahead: whether a plan is given to the device while it works on another.
    """

    def __init__(self, rank: Rank, board: AckBoard | None = None, *, plans_ahead: bool = False) -> None:
        self._rank = rank
        self._board = board
        self._started: deque[tuple[StepPlan, PendingAnswer]] = deque()
        self.depth = 2 if plans_ahead else 1

    def submit(self, plan: StepPlan) -> None:
        with refusing_out_of_memory(self._rank.ctx.device, doing=f"running step {plan.step}"):
            self._started.append((plan, self._rank.start(plan)))

    def collect(self, plan: StepPlan) -> list[RowResult]:
        started, answer = self._started.popleft()
        assert started is plan, "plans are collected in order"
        return read_results(plan, [answer.answer()])

    def acks(self) -> Acks:
        return Acks() if self._board is None else self._board.acks()

    def close(self) -> None:
        """Forget what was not collected, and see it and its moves to their end."""
        while self._started:
            self._started.popleft()[1].answer()
        if self._rank.mover is None:
            return
        saves, loads = self._rank.mover.last_numbers
        deadline = time.monotonic() + _MOVES_END_S
        while (acks := self.acks()).saves < saves or acks.loads < loads:
            if time.monotonic() > deadline:
                raise RankLostError(0, "", 0, f"moves to the host do not end within {_MOVES_END_S:.0f} s")
            time.sleep(0.001)


class GangExecutor:
    """All ranks of a gang, reached over the control group.

    Args:
        control: the decider's end of the control group.
        split: of the gang.
        board: where the ranks say how far they are.
        plans_ahead: whether plans are sent to a single stage while it works on another.
        receivers: of the boards of other nodes.
    Attributes:
        control: as given.
    """

    def __init__(
        self,
        control: Group,
        *,
        split: Split,
        board: AckBoard,
        plans_ahead: bool = False,
        receivers: Sequence[BoardReceiver] = (),
    ) -> None:
        self.control = control
        self._split = split
        self._board = board
        self._receivers = receivers
        self._watch: RankWatch | None = None
        self._step = 0
        self._sending: deque[Callable[[], None]] = deque()
        self.depth = 2 if plans_ahead and split.pp == 1 else split.pp

    def watch(self, ranks: RankProcesses) -> None:
        """Wake whoever waits for the ranks when one of their processes ends."""
        self._watch = RankWatch(ranks, board=self._board)

    def submit(self, plan: StepPlan) -> None:
        self._step = plan.step
        if plan.is_last:
            self._stop_watching()
        try:
            self._sending.append(broadcast_plan(plan, self.control))
        except RankLostError as cause:
            raise self._blame(plan.step, cause.cause) from cause

    def collect(self, plan: StepPlan) -> list[RowResult]:
        try:
            answers = receive_results(plan, self.control, split=self._split)
            self._sending.popleft()()
        except RankLostError as cause:
            raise self._blame(plan.step, cause.cause) from cause
        return read_results(plan, answers)

    def acks(self) -> Acks:
        if any(receiver.is_over for receiver in self._receivers):
            # Its ranks may be well, but what they save would never be known to be saved.
            raise self._blame(self._step, "the board of its node is not passed on any more")
        return self._board.acks()

    def close(self) -> None:
        try:
            for sent in self._sending:
                sent()
        finally:
            self.control.close()

    def abandon(self) -> None:
        """Listen to the ranks no more: they are about to be ended."""
        self._stop_watching()
        for receiver in self._receivers:
            receiver.close()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _blame(self, step: int, cause: str) -> RankLostError:
        """Name the rank that the others wait for: the one whose process has ended, or else what the board says."""
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
