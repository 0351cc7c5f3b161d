"""Imports of large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in the `with` block.

    The garbage collector is off meanwhile: it would go through all objects of torch again and again, for a fifth of the
    time of the import, and find nothing to free. Later collections leave them out, too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
