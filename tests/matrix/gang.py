"""Rank processes of one split, from outside."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from raycache.config import Config
from raycache.gang.processes import RankProcess, meet_here
from raycache.parallel.board import Acks
from raycache.parallel.sharding import Split
from tests.matrix.ranks import Failure, Order, serve

TIMEOUT_S = 120.0


class RankFailedError(Exception):
    """A rank raised, ended or hung; the gang is of no use any more."""


class Gang:
    """Runs until it is closed.

    Args:
        split: sizes of the axes.
        device_type: "cpu" or "cuda", where rank i has device i.
    Attributes:
        is_broken: a rank failed; the others may wait for it.
    """

    def __init__(self, split: Split, *, device_type: str = "cpu") -> None:
        self.split = split
        self.is_broken = False
        self._num_open = 0
        config = Config(tp=split.tp, pp=split.pp, cp=split.cp, page_size=8, rank_timeout_s=TIMEOUT_S)
        # Without the decider's end: what these ranks are told comes over their pipes.
        self._meeting, invitations = meet_here(config, device_type=device_type)
        self._processes = [RankProcess(serve, invitation) for invitation in invitations]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.process.kill()
        for process in self._processes:
            process.process.join()
            process.connection.close()
        self._meeting.board.unlink()

    def tell(self, order: Order) -> None:
        """Give all ranks an order that is not answered."""
        for process in self._processes:
            process.send(order)

    def ask(self, order: Order) -> None:
        """Give all ranks an order that is answered."""
        self._num_open += 1
        self.tell(order)

    def answers(self) -> list[Any]:
        """What the ranks say to the oldest order that they did not answer yet, by rank.

        Raises:
            RankFailedError: says which rank and why.
        """
        self._num_open -= 1
        self.is_broken = True  # until all have answered
        found: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while missing := {p.connection: i for i, p in enumerate(self._processes) if i not in found}:
            ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"no answer from ranks {sorted(missing.values())} in {TIMEOUT_S:.0f} s")
            for connection in ready:
                rank = missing[cast(Connection, connection)]
                try:
                    found[rank] = self._processes[rank].connection.recv()
                except (EOFError, ConnectionError) as cause:
                    raise RankFailedError(f"rank {rank} ended") from cause
                if isinstance(found[rank], Failure):
                    raise RankFailedError(found[rank].text)
        self.is_broken = False
        self._meeting.board.unlink()  # whoever answers has mapped it; nothing stays behind if this process is killed
        return [found[rank] for rank in sorted(found)]

    def acks(self) -> Acks:
        """How far all ranks are with page moves."""
        return self._meeting.board.acks()

    def drain(self) -> None:
        """Take the answers that nobody waits for any more."""
        while self._num_open:
            self.answers()
