"""The death of a rank's process wakes the decider, whatever it waits for.

A process that ends closes its connections, which wakes only those who wait for this very process. The decider may wait
for the answer of another rank, which in turn waits for a plan whose broadcast broke off at the dead one: without a
watch both would wait until their deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from raycache.parallel.board import AckBoard, Lane

_GRACE_S = 0.1
"""Between the end of a process and the end of the others: ranks that lose a peer say so on the board, so that they are
not taken for the one that is to blame."""


class RankProcesses(Protocol):
    """The processes of a gang."""

    def wait(self) -> Mapping[int, str]:
        """Wait until some have ended: rank -> how, "" for one that ended because it lost another."""
        ...

    def end(self) -> None:
        """End all at once; whoever waits for one of them fails."""
        ...


class RankWatch:
    """Ends a whole gang when one of its processes has ended, and says which one that was.

    Args:
        ranks: that run.
        board: of the gang.
    """

    def __init__(self, ranks: RankProcesses, *, board: AckBoard) -> None:
        self._ranks, self._board = ranks, board
        self._lost: tuple[int, str] | None = None
        self._has_looked = threading.Event()
        self._is_stopped = False
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    def stop(self) -> None:
        """The ranks may end now."""
        self._is_stopped = True
        self._has_looked.set()

    def lost(self, *, timeout_s: float) -> tuple[int, str] | None:
        """The rank whose process has ended by itself, and how; None if there is none.

        Args:
            timeout_s: how long to wait for it: a connection breaks before its process is gone.
        """
        self._has_looked.wait(timeout_s)
        return self._lost

    def _run(self) -> None:
        self._ranks.wait()
        if self._is_stopped:
            return
        time.sleep(_GRACE_S)
        ended = self._ranks.wait()
        # Who has lost a peer ended because of it.
        culprits = [rank for rank in sorted(ended) if ended[rank] and not self._board.lines[rank, Lane.LOST]]
        if culprits and not self._is_stopped:
            self._lost = culprits[0], ended[culprits[0]]
        self._has_looked.set()
        if not self._is_stopped:
            self._ranks.end()
