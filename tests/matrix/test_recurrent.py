"""Families with recurrent layers; a file of their own, since files share the cores and a family is in one process."""

from __future__ import annotations

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.chosen import RECURRENT, check_back, check_row, rows
from tests.matrix.matrix import Workbench


@rows(RECURRENT)
def test_logits_and_reuse_are_right(bench: Workbench, split: Split, family: str) -> None:
    check_row(bench, family, split)


@pytest.mark.long
def test_one_rank_reads_what_many_have_stored(bench: Workbench) -> None:
    check_back(bench, "nemotron_h")
