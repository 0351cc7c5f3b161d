"""Keeps what a process has when it has started out of garbage collection."""

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


def freeze_startup_objects() -> None:
    """Exclude everything allocated so far from garbage collection, except for what is garbage already.

    Little of it will ever be garbage, and a collection of the oldest generation goes through all of it while every
    thread of the process waits.
    """
    gc.collect()
    gc.freeze()
