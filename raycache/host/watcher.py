"""Removes a host tier's directory once it is unused; runs as a separate process (directory.py).

    python -I -S watcher.py DIRECTORY SECONDS

Runs on the bare interpreter without other imports of this package, since it lives as long as the service.
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
        directory: has the files "owner" and "ranks", locked while it is in use.
        orphaned_s: seconds for which both locks must have been free.
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
        pass  # no process can hold its lock
    return True


def _remove(directory: str) -> None:
    """Rename first, so that a new owner starts with a new directory: freeing the memory can take seconds."""
    gone = f"{directory}.gone"
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, gone)
    shutil.rmtree(gone, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], orphaned_s=float(sys.argv[2]))
