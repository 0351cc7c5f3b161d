"""The directory of a host tier in shared memory: its files, their locks, and its removal when unused.

    /dev/shm/raycache-PID-TOKEN/
        arena    the rows (memory/arena.py)
        spec     what the owner needs to continue after a crash (service.py)
        owner    locked by the one process that owns the arena
        ranks    locked by every process that maps the arena to move rows

Locks are file locks, which the kernel releases when a process ends in any way, so a free lock means that all former
holders are dead. A separate process (watcher.py) removes the directory once both locks have been free for a while.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from raycache.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
ARENA = "arena"
SPEC = "spec"
"""Names of files in a host tier's directory."""

_ORPHANED_S = 20.0
"""Delay before an unused directory is removed; a crashed owner restarts sooner, even on a busy machine."""


def new_name() -> str:
    """Name for a new directory."""
    return f"raycache-{os.getpid()}-{secrets.token_hex(4)}"


def make(directory: Path) -> None:
    """Make the directory, unless it exists, and have it removed when it is no longer used.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    except OSError as cause:
        raise ConfigError(
            f"cannot make {directory} for the host tier: {cause}; make {directory.parent} writable, or use "
            "host_memory=none"
        ) from cause
    for name in ("owner", "ranks"):
        (directory / name).touch(mode=0o600)
    _watch(directory)


def _watch(directory: Path) -> None:
    script = Path(__file__).with_name("watcher.py")
    watcher = [sys.executable, "-I", "-S", str(script), str(directory), str(_ORPHANED_S)]
    # Detached from this process, and in its own session, so that it does not end with our process group.
    command, quiet = ["sh", "-c", '"$@" &', "sh", *watcher], subprocess.DEVNULL
    subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)


def remove(directory: Path) -> None:
    """Remove the directory with all files; mappings stay valid. Its watcher then exits."""
    shutil.rmtree(directory, ignore_errors=True)


class DirectoryGoneError(ConfigError):
    """The directory of a host tier no longer exists."""


def own(directory: Path) -> Lease:
    """Become the owner of the directory; makes it if necessary.

    Raises:
        ConfigError: it cannot be made, or another process owns it.
    """
    make(directory)
    try:
        return Lease(directory, "owner")
    except DirectoryGoneError:
        make(directory)  # the watcher has just removed the directory
        return Lease(directory, "owner")


class Lease:
    """A lock on a directory's "owner" (one at a time) or "ranks" (any number), held until it is closed.

    Args:
        directory: the host tier's directory.
        name: "owner" or "ranks".
        timeout_s: how long to wait for the previous holder.
    Raises:
        DirectoryGoneError: the directory does not exist.
        ConfigError: another process still holds the lock.
    """

    def __init__(self, directory: Path, name: str, *, timeout_s: float = 10.0) -> None:
        how = fcntl.LOCK_EX if name == "owner" else fcntl.LOCK_SH
        try:
            self._file = (directory / name).open("rb")
        except FileNotFoundError as cause:
            raise DirectoryGoneError(f"the host tier's directory {directory} is gone") from cause
        if not _lock(self._file.fileno(), how, timeout_s=timeout_s):
            self._file.close()
            raise ConfigError(f"another process still uses {directory / name} after {timeout_s:.0f} s")
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._file.close()
            raise DirectoryGoneError(f"the host tier's directory {directory} was just removed")

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def are_ranks_gone(directory: Path, *, timeout_s: float) -> bool:
    """Wait until every process that could move rows in the arena is dead; returns whether they are.

    Args:
        directory: the host tier's directory; if it is gone, no process can.
        timeout_s: limit of the wait; after it the result is False.
    """
    try:
        with (directory / "ranks").open("rb") as file:
            return _lock(file.fileno(), fcntl.LOCK_EX, timeout_s=timeout_s)
    except FileNotFoundError:
        return True


def _lock(number: int, how: int, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(number, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
