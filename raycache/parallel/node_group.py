"""The control group of a gang on one node: a Unix socket between the decider and each rank.

    rank 0 --- decider --- rank 1          a broadcast goes from the decider to each rank,
                  |                        a send from a rank to the decider, or back
               rank 2

gloo passes a broadcast on from rank to rank, asks before it sends, and has a thread of its own in every process between
the socket and whoever waits: several times as many switches between processes. It remains for gangs of several nodes.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from raycache.errors import RankLostError
from raycache.parallel.collectives import Group, Started

_KEY = "socket"
_LOOK_S = 0.2
"""Interval at which a decider that waits for ranks looks whether the meeting point is still there."""


class _Transfer:
    """Bytes of a contiguous tensor on the CPU that are still to be sent or received."""

    __slots__ = ("left",)

    def __init__(self, tensor: Tensor) -> None:
        self.left = tensor.numpy().data.cast("B") if tensor.numel() else memoryview(b"")


class _Line:
    """A connection to a member. What is sent, and what is received, keeps its order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.sending: deque[_Transfer] = deque()
        self.receiving: deque[_Transfer] = deque()

    def move(self) -> None:
        """Send and receive what can be without waiting.

        Raises:
            OSError: the member is gone.
        """
        try:
            while self.sending:
                first = self.sending[0]
                while first.left:
                    first.left = first.left[self.connection.send(first.left) :]
                self.sending.popleft()
        except BlockingIOError:
            pass
        try:
            while self.receiving:
                first = self.receiving[0]
                while first.left:
                    count = self.connection.recv_into(first.left)
                    if not count:
                        raise ConnectionResetError("it has closed its connection")
                    first.left = first.left[count:]
                self.receiving.popleft()
        except BlockingIOError:
            pass


class NodeGroup(Group):
    """Broadcasts from member 0, and sends between it and each other member; other collectives raise AssertionError. Not
    for several threads at once.

    Args:
        connections: member -> connection; of other members than 0, to member 0 only.
        timeout_s: of each call.
    """

    transport = "Unix sockets"

    def __init__(self, connections: Mapping[int, socket.socket], *, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank=rank, size=size)
        self._lines = {member: _Line(connection) for member, connection in connections.items()}
        self._timeout_s = timeout_s

    def broadcast(self, tensor: Tensor, *, root: int) -> Tensor:
        self.ibroadcast(tensor, root=root)()
        return tensor

    def ibroadcast(self, tensor: Tensor, *, root: int) -> Started:
        assert root == 0, "only member 0 is connected with all others"
        if self.rank:
            return self._start(self._lines[0], tensor, receives=True)
        parts = [self._start(line, tensor, receives=False) for line in self._lines.values()]

        def wait() -> None:
            for part in parts:
                part()

        return Started(wait, lambda: all([part.is_done() for part in parts]))

    def all_reduce(self, tensor: Tensor) -> NoReturn:
        raise AssertionError("members other than 0 are not connected with each other")

    all_gather = all_to_all = all_reduce

    def send(self, tensor: Tensor, *, to: int) -> None:
        self.isend(tensor, to=to)()

    def isend(self, tensor: Tensor, *, to: int) -> Callable[[], None]:
        return self._start(self._lines[to], tensor, receives=False)

    def recv(self, tensor: Tensor, *, source: int) -> Tensor:
        self.irecv(tensor, source=source)()
        return tensor

    def irecv(self, tensor: Tensor, *, source: int) -> Callable[[], None]:
        return self._start(self._lines[source], tensor, receives=True)

    def close(self) -> None:
        for line in self._lines.values():
            line.connection.close()

    def _start(self, line: _Line, tensor: Tensor, *, receives: bool) -> Started:
        transfer = _Transfer(tensor)
        (line.receiving if receives else line.sending).append(transfer)
        if not receives:
            self._move(line)

        def is_done() -> bool:
            if transfer.left:
                self._move(line)
            return not transfer.left

        return Started(lambda: self._wait(line, transfer), is_done)

    def _move(self, line: _Line) -> None:
        try:
            line.move()
        except OSError as cause:
            raise self._lost(cause) from cause

    def _wait(self, line: _Line, transfer: _Transfer) -> None:
        """Wait until a transfer has ended, and go on with those of other members that are sent to meanwhile: this one
        may wait for them."""
        if transfer.left:
            self._move(line)
        deadline = time.monotonic() + self._timeout_s
        while transfer.left:
            ready = self._ready(line, timeout_s=deadline - time.monotonic())
            if not ready:
                raise self._lost(TimeoutError(f"not done within {self._timeout_s:.0f} s"))
            for each in ready:
                self._move(each)

    def _ready(self, line: _Line, *, timeout_s: float) -> list[_Line]:
        """Wait for a line, others that are sent to, and members that leave while something of them is expected."""
        poll, by_number = select.poll(), {}
        for each in self._lines.values():
            if each.sending or each.receiving:
                reads = select.POLLIN if each is line and each.receiving else 0
                by_number[each.connection.fileno()] = each
                poll.register(each.connection, reads | (select.POLLOUT if each.sending else 0))
        return [by_number[number] for number, _ in poll.poll(max(0.0, 1e3 * timeout_s))]

    def _lost(self, cause: OSError) -> RankLostError:
        return RankLostError(-1, f"member {self.rank} of {self.size}", -1, f"a peer is gone or late: {cause}")


def join_on_node(store: Any, index: int, size: int, *, timeout_s: float) -> NodeGroup:
    """Join a group of this node; returns when all members have joined.

    Args:
        store: of torch.distributed, where member 0 leaves its address.
        index, size: of this member, and of the group.
    Raises:
        OSError, RuntimeError: others did not join in time, or the store is gone.
    """
    if index == 0:
        connections = _gather(store, size, timeout_s=timeout_s)
    else:
        connections = {0: _visit(store.get(_KEY).decode(), index, timeout_s=timeout_s)}
    return NodeGroup(connections, rank=index, size=size, timeout_s=timeout_s)


def _gather(store: Any, size: int, *, timeout_s: float) -> dict[int, socket.socket]:
    deadline, connections = time.monotonic() + timeout_s, list[socket.socket]()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # An abstract name (unix(7)): no file is left of it.
            name = f"raycache-control-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(size)
            listener.settimeout(_LOOK_S)
            store.set(_KEY, name)
            while len(connections) < size - 1:
                try:
                    connections.append(listener.accept()[0])
                    _require_own(connections[-1])
                except TimeoutError:
                    store.check([_KEY])
                    if time.monotonic() > deadline:
                        raise
        found = {}
        for connection in connections:
            connection.settimeout(max(_LOOK_S, deadline - time.monotonic()))
            index = connection.recv(4)
            if len(index) < 4:
                raise ConnectionResetError("a rank has left before all have joined")
            found[int.from_bytes(index, "little")] = connection
        for connection in connections:
            connection.sendall(b"\0")
    except BaseException:  # an interrupt, too: those who have joined would wait
        for connection in connections:
            connection.close()
        raise
    return dict(sorted(found.items()))


def _visit(name: str, index: int, *, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{name}")
        _require_own(connection)
        connection.sendall(index.to_bytes(4, "little"))
        if not connection.recv(1):
            raise ConnectionResetError("the decider has left before all ranks have joined")
    except BaseException:
        connection.close()
        raise
    return connection


def _require_own(connection: socket.socket) -> None:
    """Raise PermissionError unless a process of this user is at the other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"a process of user {user} is at the other end of the control group's socket")
