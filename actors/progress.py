"""How far a start is."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]
"""Called with the phase of a start and the fraction done; an exception from it aborts the start."""
