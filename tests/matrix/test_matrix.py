"""Families without recurrent layers, that every column is met, and that the matrix notices damage."""

from __future__ import annotations

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.chosen import CHOSEN, RECURRENT, check_back, check_row, rows, scenarios
from tests.matrix.matrix import COLUMNS, Workbench, run_controls, run_row
from tests.oracle.families import FAMILIES
from tests.selection import mostly_long


@rows([family for family in FAMILIES if family not in RECURRENT])
def test_logits_and_reuse_are_right(bench: Workbench, split: Split, family: str) -> None:
    check_row(bench, family, split)


@pytest.mark.parametrize("family", mostly_long(["llama", "deepseek_v32", "gemma3"], but=["llama"]))
def test_one_rank_reads_what_many_have_stored(bench: Workbench, family: str) -> None:
    check_back(bench, family)


def test_every_column_is_met() -> None:
    assert {name for family in FAMILIES for split in CHOSEN for name in scenarios(family, split)} == set(COLUMNS)


@pytest.mark.parametrize(
    ("family", "split", "layers"),
    [
        pytest.param("llama", Split(cp=4), (1,), id="keys and values"),
        pytest.param("deepseek_v32", Split(), (3,), id="latents and index keys", marks=pytest.mark.long),
        pytest.param("gemma3", Split(cp=2), (1,), id="window"),
        pytest.param("kimi_linear", Split(tp=2), (1, 3), id="states of KDA", marks=pytest.mark.long),
        pytest.param("nemotron_h", Split(pp=2, cp=2), (0,), id="states of Mamba2"),
    ],
)
def test_damage_to_the_cache_is_noticed(bench: Workbench, family: str, split: Split, layers: tuple[int, ...]) -> None:
    found, problem = run_controls(bench, family, split, layers=layers)
    assert not problem and found
    assert [control.name for control in found if not control.is_noticed] == []


def test_a_split_that_cannot_work_is_a_cell_with_the_reason(bench: Workbench) -> None:
    cells = run_row(bench, "llama", Split(tp=3), ["cold"])
    assert "tp=3" in cells["cold"].refusal and "use one of" in cells["cold"].refusal
