"""What becomes of a lost gang's control group."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from threading import Event

from torch import Tensor

from raycache.gang.executors import GangExecutor
from raycache.parallel.board import AckBoard
from raycache.parallel.collectives import Group, Started
from raycache.parallel.sharding import Split
from raycache.wire.plan import StepPlan


class HangingGroup(Group):
    """The decider's end of a group whose other members take nothing until `is_over`."""

    def __init__(self, is_over: Event, is_gone: Event) -> None:
        super().__init__(rank=0, size=2)
        self._is_over = is_over
        weakref.finalize(self, is_gone.set)

    def ibroadcast(self, tensor: Tensor, *, root: int) -> Started:
        is_over = self._is_over  # as gloo, what is under way does not hold the group
        return Started(lambda: _wait(is_over), is_over.is_set)


def _wait(is_over: Event) -> None:
    assert is_over.wait(60)


def executor(group: Group, folder: Path) -> GangExecutor:
    return GangExecutor(group, split=Split(), board=AckBoard.create(1, directory=folder), timeout_s=60.0)


def test_the_group_of_a_lost_gang_is_held_until_it_has_sent_what_it_sends(tmp_path: Path) -> None:
    is_over, is_gone = Event(), Event()
    gang = executor(HangingGroup(is_over, is_gone), tmp_path)
    gang.submit(StepPlan(1))
    gang.abandon()
    del gang
    gc.collect()
    assert not is_gone.is_set(), "its destructor would wait"
    is_over.set()
    assert is_gone.wait(60)


def test_a_gang_that_sends_nothing_is_let_go_at_once(tmp_path: Path) -> None:
    is_over, is_gone = Event(), Event()
    gang = executor(HangingGroup(is_over, is_gone), tmp_path)
    gang.abandon()
    del gang
    gc.collect()
    assert is_gone.is_set()
