"""A part of the matrix that is small enough for every change; `python -m tests.matrix` runs all of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.matrix import COLUMNS, Workbench, run_controls, run_row
from tests.matrix.table import label
from tests.oracle.families import FAMILIES

# Every family meets every scenario, tp=2, pp=2, cp=2 and cp=4. A split reads what those before it have stored.
CHOSEN = {
    Split(): [
        "cold",
        "edges",
        "evicted",
        "batched",
        "mixed",
        "other_splits",
        "restart",
        "mixed_tiers",
        "write_policies",
        "slower_than_computing",
        "slow_storage",
        "foreign",
        "host_full",
        "disk_full",
        "evicted_loading",
        "storage_flip",
        "truncated",
    ],
    Split(tp=2, pp=2, cp=2): [
        "exact",
        "branch",
        "chunked",
        "host_hit",
        "other_splits",
    ],
    Split(cp=4): [
        "partial",
        "turns",
        "interrupted",
        "stored",
        "storage_hit",
        "all_tiers",
        "other_splits",
        "load_cut",
        "object_missing",
        "host_flip",
    ],
}
BACK = ("llama", "deepseek_v32", "gemma3", "nemotron_h")
"""Families whose first split also reads what the later ones have stored."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Workbench]:
    with Workbench() as made:
        yield made
    assert [process.name for process in multiprocessing.active_children()] == []


@pytest.mark.parametrize(
    ("split", "family"),
    [pytest.param(split, family, id=f"{family}-{label(split)}") for split in CHOSEN for family in FAMILIES],
)
def test_logits_and_reuse_are_right(bench: Workbench, split: Split, family: str) -> None:
    cells = run_row(bench, family, split, CHOSEN[split])
    wrong = {name: (str(cell), *cell.problems) for name, cell in cells.items() if cell.refusal or not cell.passes}
    assert not wrong


@pytest.mark.parametrize("family", BACK)
def test_one_rank_reads_what_many_have_stored(bench: Workbench, family: str) -> None:
    cells = run_row(bench, family, Split(), ["other_splits"])
    assert not cells["other_splits"].problems
    assert len(bench.stored(family)) == len(CHOSEN)


def test_every_column_is_met() -> None:
    assert {name for names in CHOSEN.values() for name in names} == set(COLUMNS)


@pytest.mark.parametrize(
    ("family", "split", "layers"),
    [
        pytest.param("llama", Split(cp=4), (1,), id="keys and values"),
        pytest.param("deepseek_v32", Split(), (3,), id="latents and index keys"),
        pytest.param("gemma3", Split(cp=2), (1,), id="window"),
        pytest.param("kimi_linear", Split(tp=2), (1, 3), id="states of KDA"),
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
