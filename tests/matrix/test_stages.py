"""Uneven pipeline stages: logits, hits in every tier, and storage that is read across other borders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.matrix import Workbench, run_row

# (family, split, stages that it gets). Those of one family in a row: each reads what the ones before it have stored.
CHOSEN = [
    ("glm-bound", Split(pp=2), "4,2"),
    ("glm-bound", Split(pp=3), "1,3,2"),
    ("glm-bound", Split(tp=2, pp=2, stages=(1, 5)), "1,5"),
    ("qwen3_next", Split(pp=2, stages=(2, 2)), "2,2"),
    ("qwen3_next", Split(pp=2, stages=(3, 1)), "3,1"),
    ("gemma3", Split(pp=3), "2,1,1"),
    ("gemma3", Split(pp=3, stages=(1, 1, 2)), "1,1,2"),
]
EVERY_CHANGE = ("1,5", "3,1", "1,1,2")
SCENARIOS = ("exact", "host_hit", "storage_hit", "all_tiers", "other_splits")


@pytest.mark.parametrize(
    ("family", "split", "stages"),
    [pytest.param(*row, marks=() if row[2] in EVERY_CHANGE else pytest.mark.long) for row in CHOSEN],
)
def test_logits_and_reuse_are_right_under_any_borders(bench: Workbench, family: str, split: Split, stages: str) -> None:
    assert bench.prepare(family, split).config.pp_layers == stages
    check(bench, family, split, SCENARIOS)


@pytest.mark.long
def test_one_stage_reads_what_uneven_ones_have_stored(bench: Workbench) -> None:
    for family in ("glm-bound", "qwen3_next", "gemma3"):
        check(bench, family, Split(), ["other_splits"])
        written = {path.name for path in bench.stored(family)}
        assert len(written) == 1 + sum(name == family for name, _, _ in CHOSEN), written


def check(bench: Workbench, family: str, split: Split, scenarios: Sequence[str]) -> None:
    cells = run_row(bench, family, split, scenarios)
    wrong = {name: (str(cell), *cell.problems) for name, cell in cells.items() if cell.refusal or not cell.passes}
    assert not wrong, wrong
