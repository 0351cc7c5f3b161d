"""Main loop of a rank: executes plans until the last one, or until the connection to the decider is lost."""

from __future__ import annotations

import logging
from collections import deque

from raycache.deployment.memory_use import refusing_out_of_memory
from raycache.errors import RankLostError
from raycache.parallel.board import Lane
from raycache.parallel.lost_peers import logging_errors_of_gpu, reporting_lost_peers
from raycache.rank.member import Member
from raycache.rank.pending_result import Pending
from raycache.rank.rank import Rank
from raycache.wire.control import receive_masks, receive_plan, result_ranks, send_result
from raycache.wire.plan import StepPlan

_log = logging.getLogger(__name__)


def run(rank: Rank, member: Member) -> None:
    """Execute plans until the last one, then leave the gang.

    Raises:
        RankLostError: the decider or another rank exited or timed out.
    """
    plans, number, has_lost = _Plans(rank, member), member.spec.rank, True
    try:
        with reporting_lost_peers(rank.ctx):
            plans.execute_all()
        has_lost = False
    except RankLostError as cause:
        member.post(Lane.LOST, max(plans.step, 1))
        raise RankLostError(number, str(rank.ctx.coords), plans.step, cause.cause) from cause
    except BaseException:  # an interrupt, too: the decider must hear of it at once
        member.post(Lane.FAILED, max(plans.step, 1))
        _log.exception("rank %d (%s) failed at step %d", number, rank.ctx.coords, plans.step)
        raise
    finally:
        member.ctx.close()  # ranks waiting for this one fail now instead of timing out
        with logging_errors_of_gpu(has_lost):
            rank.close()
        if member.sender is not None:
            member.sender.close(has_lost=has_lost)


class _Plans:
    """Executes plans in order and sends their results.

    Attributes:
        step: number of the last plan received.
    """

    def __init__(self, rank: Rank, member: Member) -> None:
        self._rank, self._member = rank, member
        self._sends_results = member.spec.rank in result_ranks(rank.ctx.split)
        self._unsent: deque[tuple[StepPlan, Pending]] = deque()
        self.step = 0

    def execute_all(self) -> None:
        """Execute plans until the last one."""
        ctx = self._rank.ctx
        while True:
            plan = receive_plan(ctx.control, meanwhile=self._send_ready)
            self.step = plan.step
            with refusing_out_of_memory(ctx.device, doing=f"running step {plan.step}"):
                layers = self._rank.launch(plan)
                masks = receive_masks(plan, ctx.control, meanwhile=self._send_ready)
                pending = self._rank.finish(layers, masks)
            self._unsent.append((plan, pending))
            self._send_ready()
            if plan.is_last:
                return

    def _send_ready(self) -> bool:
        """Send the results of finished steps, in order; returns whether any steps are unfinished."""
        while self._unsent and self._is_ready():
            plan, pending = self._unsent.popleft()
            if self._sends_results and not plan.is_last:
                send_result(plan, pending.wait(), self._rank.ctx.control)
            self._member.post(Lane.STEP, plan.step)
        return bool(self._unsent)

    def _is_ready(self) -> bool:
        """Whether the oldest unsent results are there; may launch the passes of a draft model."""
        plan, pending = self._unsent[0]
        with refusing_out_of_memory(self._rank.ctx.device, doing=f"drafting in step {plan.step}"):
            return pending.is_ready()
