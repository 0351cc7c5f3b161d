"""A rank's seat: one process at a time computes as a rank of a placement, and a newer one ends the one before.

Ray frees the resources of an actor only when its process is dead, but a rank that stood by (actors/ranks.py) holds
none, and Ray takes seconds to end a process that does not respond. So each rank holds a name of the node's kernel,
which is free as soon as its process has closed its files: those of the GPU and of the host tier among them.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from contextlib import suppress

from raycache.errors import RankLostError

_TRY_S = 0.01
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class Seat:
    """Takes a seat, and holds it until the process ends.

    Args:
        name: the same for all processes that may hold it, one after the other.
        timeout_s: how long to wait for the holder, which is killed.
    Raises:
        RankLostError: the holder has not ended in time.
    Attributes:
        waited_s: how long that took.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        begin = time.monotonic()
        # An abstract name (unix(7)): no file is left of it.
        self._socket, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0raycache-seat-{name}"
        while not _is_bound(self._socket, address):
            if time.monotonic() - begin > timeout_s:
                self._socket.close()
                raise RankLostError(-1, name, 0, f"the process before it has not ended within {timeout_s:.0f} s")
            _kill_holder(address)
            time.sleep(_TRY_S)
        self._socket.listen()
        self.waited_s = time.monotonic() - begin

    def close(self) -> None:
        """Leave the seat."""
        self._socket.close()


def _is_bound(own: socket.socket, address: str) -> bool:
    try:
        own.bind(address)
    except OSError:  # in use
        return False
    return True


def _kill_holder(address: str) -> None:
    """Kill the process that listens at an address, if it is one of this user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except OSError:  # it has just gone, or does not listen yet
            return
        pid, uid, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    # 0: a process that this one cannot see.
    if pid > 0 and pid != os.getpid() and uid == os.getuid():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
