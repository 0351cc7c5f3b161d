"""Benchmarks run by hand: that they still fit the code they measure."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

NAMES = sorted(path.stem for path in Path("benchmarks").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
