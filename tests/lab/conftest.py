"""What the tests of a lab have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Phase = Callable[[str], AbstractContextManager[None]]


@pytest.fixture(scope="session")
def phase(request: pytest.FixtureRequest) -> Iterator[Phase]:
    """Measures parts of long tests, and prints them at the end."""
    took: list[tuple[str, float]] = []

    @contextmanager
    def measured(name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        took.append((name, time.monotonic() - begin))

    yield measured
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and took:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took)
        reporter.write_line(f"\nlab: {parts}; together {sum(seconds for _, seconds in took):.0f} s")
