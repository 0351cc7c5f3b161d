"""What is tried with every change, and what `make test-all` alone tries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], *, but: Iterable[Any]) -> list[Any]:
    """Parameters of a test that are marked as long, but for those that are tried with every change."""
    often, found = list(but), list(values)
    assert all(value in found for value in often), f"{often} are not all among {found}"
    return [pytest.param(value, marks=() if value in often else pytest.mark.long) for value in found]
