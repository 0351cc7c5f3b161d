"""Wakes the decider when a rank's process dies, whatever it is waiting for.

A process that ends closes its connections, which wakes only the processes that wait for it. The decider may be waiting
for results of another rank, which itself waits for the dead one in a collective without a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from raycache.parallel.board import AckBoard, Lane

_GRACE_S = 0.1
"""Delay between the death of a process and killing the others: ranks that lose a peer report it on the board meanwhile,
so that they are not blamed."""


class RankProcesses(Protocol):
    """The processes of a gang."""

    def wait(self) -> Mapping[int, str]:
        """Wait until some have ended: rank -> cause; "" for one that ended because it lost a peer."""
        ...

    def end(self) -> None:
        """Kill all; anything that waits for one of them fails."""
        ...


class RankWatch:
    """Kills the whole gang when one of its processes ends, and remembers which one.

    Args:
        ranks: the running processes.
        board: the gang's progress board.
    """

    def __init__(self, ranks: RankProcesses, *, board: AckBoard) -> None:
        self._ranks, self._board = ranks, board
        self._lost: tuple[int, str] | None = None
        self._has_looked = threading.Event()
        self._is_stopped = False
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; the ranks may end now."""
        self._is_stopped = True
        self._has_looked.set()

    def lost(self, *, timeout_s: float) -> tuple[int, str] | None:
        """The rank whose process ended first, and the cause; None if there is none.

        Args:
            timeout_s: how long to wait for one: connections break before the process is gone.
        """
        self._has_looked.wait(timeout_s)
        return self._lost

    @property
    def is_over(self) -> bool:
        """Whether a process has ended, and the others are being killed."""
        return self._has_looked.is_set()

    def _run(self) -> None:
        self._ranks.wait()
        if self._is_stopped:
            return
        time.sleep(_GRACE_S)
        ended = self._ranks.wait()
        # A rank that reports a lost peer ended because of that.
        culprits = [rank for rank in sorted(ended) if ended[rank] and not self._board.lines[rank, Lane.LOST]]
        if culprits and not self._is_stopped:
            self._lost = culprits[0], ended[culprits[0]]
        self._has_looked.set()
        if not self._is_stopped:
            self._ranks.end()
