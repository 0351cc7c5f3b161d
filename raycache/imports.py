"""Imports of large libraries."""

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
