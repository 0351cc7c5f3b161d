"""A rank's seat: one process at a time computes as a rank of a placement, and a newer one ends the one before.

Ray frees the resources of an actor only when its process is dead, but a rank that stood by (actors/ranks.py) holds
none, and Ray takes seconds to end a process that does not respond. So each rank holds a name of the node's kernel,
which is free as soon as its process has closed its files: those of the GPU and of the host tier among them.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from raycache.errors import ConfigError, RankLostError

_TRY_S = 0.01
_UNSEEN_S = 15.0
"""How long to wait for a holder that cannot be killed from here; Ray takes some seconds to end it."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class Seat:
    """Takes a seat, and holds it until the process ends.

    Args:
        name: the same for all processes that may hold it, one after the other.
        timeout_s: how long to wait for the holder, which is killed.
    Raises:
        ConfigError: a process of another user holds it.
        RankLostError: the holder has not ended in time.
    Attributes:
        waited_s: how long that took.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        begin = time.monotonic()
        # An abstract name (unix(7)): no file is left of it.
        self._socket, address = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"\0raycache-seat-{name}"
        try:
            while not _is_bound(self._socket, address):
                holder = _holder(address)
                limit_s = timeout_s
                if holder is not None:
                    holder.check_user(name)
                    limit_s = timeout_s if holder.pid else min(timeout_s, _UNSEEN_S)
                if time.monotonic() - begin > limit_s:
                    who = "the process before it" if holder is None else f"the process before it, {holder},"
                    raise RankLostError(-1, name, 0, f"{who} has not ended within {limit_s:.0f} s")
                if holder is not None:
                    holder.kill()
                time.sleep(_TRY_S)
        except BaseException:  # an interrupt, too
            self._socket.close()
            raise
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


class _Holder(NamedTuple):
    """A process that holds a seat.

    Attributes:
        pid: 0 if it is in another PID namespace, such as a container's.
        uid: of its user.
    """

    pid: int
    uid: int

    def check_user(self, seat: str) -> None:
        """Raise ConfigError unless the process belongs to this user: nothing here can or should end it."""
        if self.uid != os.geteuid():
            raise ConfigError(
                f"the lock {seat} of a rank is held by {self}, which user {_user(os.geteuid())} may not kill; kill it, "
                "or restart the service"
            )

    def kill(self) -> None:
        """Kill the process, unless it is this one or cannot be reached."""
        if self.pid not in (0, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "a process of another PID namespace"
        return f"{process} of user {_user(self.uid)}"


def _holder(address: str) -> _Holder | None:
    """The process that listens at an address; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except OSError:  # it has just gone, or does not listen yet
            return None
        pid, uid, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return _Holder(pid, uid)


def _user(uid: int) -> str:
    """Name of a user, or the number if it has none here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
