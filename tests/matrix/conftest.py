"""Shared by the tests of a file."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from tests.matrix.matrix import Workbench


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with Workbench() as made:
        yield made
    assert [process.name for process in multiprocessing.active_children()] == []
