"""Relays the boards of other nodes to the decider's board.

    node 1    ranks -> their board -> thread of the leader  --lines-->  thread of the decider -> its board
    decider's node                                  ranks -------------------------------------> its board

The leader is the lowest rank of a node. Its thread polls the board every millisecond, less often while nothing
changes, and sends all lines when one has changed, and periodically as a heartbeat. Changes during a send are merged
into the next message, so a slow link delays lines but never queues them. No rank and no step waits for any of this;
the lines of a lost node stay unchanged, and its gang is considered lost. Each leader has its own group with the
decider, because gloo aborts a whole group when one member times out.
"""

# Shapes in this file: R ranks, N lanes of the board.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch

from raycache.errors import RankLostError
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.collectives import Group
from raycache.parallel.context import DECIDER, GroupHandle, build_group

_log = logging.getLogger(__name__)
_LOOK_S = 0.001
_IDLE_LOOK_S = 0.01
_IDLE_LOOKS = 100
"""Polls without a change before the interval grows, since polling takes time from the thread that computes."""
_SIGNS_PER_TIMEOUT = 8
_LINGER_S = 0.5
"""How long a leader that has lost a peer keeps relaying, so that other ranks of its node can post as well."""
_DECIDER, _LEADER = 0, 1  # members of a group
_GOES_ON, _ENDS = 0, 1  # first number of a message


def leaders(nodes: Sequence[Hashable], *, here: Hashable) -> list[int]:
    """The lowest rank of every node except the decider's, `here`; `nodes` are those of each rank."""
    return sorted({node: rank for rank, node in reversed(list(enumerate(nodes))) if node != here}.values())


class BoardSender:
    """The leader's side: sends its node's board until it is closed or the decider is lost.

    Args:
        group: of decider and leader.
        timeout_s: of the group.
    """

    def __init__(self, board: AckBoard, group: Group, *, timeout_s: float) -> None:
        self._board, self._group = board, group
        self._sign_s = timeout_s / _SIGNS_PER_TIMEOUT
        self._is_closing = threading.Event()
        self._until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="board sender", daemon=True)
        self._thread.start()

    def close(self, *, has_lost: bool, timeout_s: float = 2.0) -> None:
        """Send the final state of the board and end.

        Args:
            has_lost: whether the gang is lost; other ranks of the node then get time to post as well.
            timeout_s: maximum wait for the thread, which may be blocked if the decider is lost.
        """
        self._until_s = time.monotonic() + (_LINGER_S if has_lost else 0.0)
        self._is_closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        seen, sent_at_s = b"", 0.0
        try:
            while not self._may_end():
                now, now_s = self._board.lines.tobytes(), time.monotonic()
                if now != seen or now_s - sent_at_s >= self._sign_s:
                    self._send(_GOES_ON)
                    seen, sent_at_s = now, now_s
                time.sleep(_LOOK_S)
            self._send(_ENDS)
        except RankLostError as error:
            _log.debug("the decider no longer receives lines: %s", error)
        finally:
            self._group.close()

    def _may_end(self) -> bool:
        if not self._is_closing.is_set():
            return False
        lines = self._board.lines
        running = (lines[:, Lane.JOINED] > 0) & (lines[:, Lane.FAILED] == 0) & (lines[:, Lane.LOST] == 0)
        return time.monotonic() >= self._until_s or not running.any()

    def _send(self, word: int) -> None:
        message = np.concatenate([[word], self._board.snapshot().reshape(-1)])
        self._group.send(torch.from_numpy(message), to=_DECIDER)


class BoardReceiver:
    """The decider's side for one node.

    Args:
        board: of the decider.
        group: of decider and leader.
        ranks: of the node.
    """

    def __init__(self, board: AckBoard, group: Group, *, ranks: Sequence[int]) -> None:
        self._board, self._group, self._ranks = board, group, list(ranks)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"board of rank {self._ranks[0]}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether no more lines will be received."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ignore further lines. The thread ends when the leader ends, or at the group's timeout."""
        self._is_closed = True

    def _run(self) -> None:
        lines = np.empty_like(self._board.lines)
        message = torch.empty(1 + lines.size, dtype=torch.int64)
        try:
            word = _GOES_ON
            while word == _GOES_ON and not self._is_closed:
                word = int(self._group.recv(message, source=_LEADER)[0])
                lines[:] = message[1:].numpy().reshape(lines.shape)
                if not self._is_closed:
                    self._board.take(lines, ranks=self._ranks)
        except RankLostError as error:
            _log.debug("no more lines of ranks %s: %s", self._ranks, error)
        finally:
            self._group.close()


def send_board(
    board: AckBoard, handles: Mapping[str, GroupHandle], *, rank: int, epoch: int, host: str
) -> BoardSender | None:
    """Relay a node's board if this rank is the node's leader.

    Args:
        handles: all groups of the gang.
        rank: world rank.
        host: address of this process that the decider can reach.
    Raises:
        RankLostError: the decider did not join in time, or belongs to another epoch.
    """
    for handle in handles.values():
        if handle.kind == "boards" and rank in handle.members:
            group = build_group(handle, member=rank, epoch=epoch, host=host, device=torch.device("cpu"))
            return BoardSender(board, group, timeout_s=handle.timeout_s)
    return None


def receive_boards(
    board: AckBoard, handles: Mapping[str, GroupHandle], *, nodes: Sequence[Hashable], epoch: int, host: str
) -> list[BoardReceiver]:
    """Receive the boards of all other nodes.

    Args:
        board: of the decider.
        handles: all groups of the gang.
        nodes: node of each rank.
        host: address of this process that the leaders can reach.
    Raises:
        RankLostError: a leader did not join in time.
    """
    found = []
    for handle in handles.values():
        if handle.kind == "boards":
            group = build_group(handle, member=DECIDER, epoch=epoch, host=host, device=torch.device("cpu"))
            node = nodes[handle.members[_LEADER]]
            ranks = [rank for rank, at in enumerate(nodes) if at == node]
            found.append(BoardReceiver(board, group, ranks=ranks))
    return found
