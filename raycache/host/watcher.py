"""Removes a host tier's directory once nobody uses it; a process of its own (directory.py).

    python -I -S watcher.py DIRECTORY SECONDS

Runs on the bare interpreter with nothing of ours imported, since it stays as long as the service lives.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import time

_PERIOD_S = 0.5


def watch(directory: str, *, orphaned_s: float) -> None:
    """Return when the directory is gone.

    Args:
        directory: with the files "owner" and "ranks", locked by whoever uses it.
        orphaned_s: how long both must have been free.
    """
    free_since = time.monotonic()
    while os.path.isdir(directory):
        with contextlib.ExitStack() as locks:
            if not all(_lock(os.path.join(directory, name), locks) for name in ("owner", "ranks")):
                free_since = time.monotonic()
            elif time.monotonic() - free_since > orphaned_s:
                _remove(directory)
        time.sleep(_PERIOD_S)


def _lock(path: str, locks: contextlib.ExitStack) -> bool:
    try:
        number = os.open(path, os.O_RDONLY)
        locks.callback(os.close, number)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass  # nobody can hold it
    return True


def _remove(directory: str) -> None:
    """All at once by its name, so that who comes now begins with a new one; giving back the memory can take seconds."""
    gone = f"{directory}.gone"
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], orphaned_s=float(sys.argv[2]))
