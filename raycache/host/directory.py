"""Where a host tier's files lie, who uses them, and that they do not stay in shared memory when nobody does.

    /dev/shm/raycache-PID-TOKEN/
        arena    the rows (memory/arena.py)
        spec     what the owner needs to go on after a crash (service.py)
        owner    locked by the one process that owns the arena
        ranks    locked by every process that has it mapped to move rows

Locks are the kernel's: they end with their process however that ends, so a lock that can be had says that all who held
it are dead. A process of its own (watcher.py) removes the directory once both locks have been free for a while.
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
"""An owner that died is back sooner, also on a busy machine, where its imports take most of that time."""


def new_name() -> str:
    """Of a directory that does not exist yet."""
    return f"raycache-{os.getpid()}-{secrets.token_hex(4)}"


def make(directory: Path) -> None:
    """Make the directory, and have it removed when nobody uses it; one that is there stays as it is.

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
    # In the background of a shell it is nobody's child, and in a session of its own it does not end with our group.
    command, quiet = ["sh", "-c", '"$@" &', "sh", *watcher], subprocess.DEVNULL
    subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True, check=True)


def remove(directory: Path) -> None:
    """Remove it with all files; mappings stay valid. The watcher ends by itself."""
    shutil.rmtree(directory, ignore_errors=True)


class DirectoryGoneError(ConfigError):
    """The directory of a host tier is not there any more."""


def own(directory: Path) -> Lease:
    """Become the owner of the directory, which is made if it is not there.

    Raises:
        ConfigError: it cannot be made, or another process owns it.
    """
    make(directory)
    try:
        return Lease(directory, "owner")
    except DirectoryGoneError:
        make(directory)  # the watcher has just removed it
        return Lease(directory, "owner")


class Lease:
    """A lock on a directory's "owner" (one at a time) or "ranks" (any number), held until it is closed.

    Args:
        directory: of the host tier.
        name: "owner" or "ranks".
        timeout_s: how long the one before may take to end.
    Raises:
        DirectoryGoneError: it is not there.
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
        """Give it back."""
        self._file.close()


def are_ranks_gone(directory: Path, *, timeout_s: float) -> bool:
    """Wait until every process that could move rows in the arena is dead.

    Args:
        directory: of the host tier; when it is gone, there is nothing to move rows in.
        timeout_s: after which the answer is no.
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
