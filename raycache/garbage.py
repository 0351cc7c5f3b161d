"""What the garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in the `with` block.

    The garbage collector is off meanwhile: it would go through all objects of torch again and again, for a fifth of the
    time of the import, and find nothing to free. Afterwards all objects of the process so far are left out of
    collections (`gc.freeze`), so this is for the start of a process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def leave_out_started() -> None:
    """Leave all objects of a process that has started out of collections from now on.

    Few of them will ever be garbage, and a collection of the oldest generation goes through all of them while every
    thread of the process waits.
    """
    gc.freeze()
