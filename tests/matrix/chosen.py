"""The part of the matrix that is small enough for every change; `python -m tests.matrix` runs all of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.matrix import Workbench, run_row
from tests.matrix.table import label

# Every family meets every scenario, tp=2, pp=2, cp=2 and cp=4. A split reads what those before it have stored.
# With every change a family meets one of the splits, llama all of them; the rest is for `make test-all`, and so are
# families of which others have every part.
CHOSEN = {
    Split(): [
        "cold",
        "edges",
        "evicted",
        "batched",
        "mixed",
        "other_splits",
        "restart",
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

MIXED = ("mixed_through", "mixed_selective", "mixed_back")
"""Random streams on one rank; each family meets one of them."""

COVERED = ("qwen3_moe", "granitemoehybrid", "qwen3_5", "glm_moe_dsa", "bailing_hybrid")
"""Families whose parts others have: attention of qwen3, Mamba2 of nemotron_h, experts and gated delta nets of
qwen3_next, the indexer of deepseek_v32 (and glm's in uneven stages), KDA and latents of kimi_linear."""

RECURRENT = (
    "bailing_hybrid",
    "bailing_moe_v2_5",
    "granitemoehybrid",
    "kimi_linear",
    "minimax",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
)


def rows(families: Sequence[str]) -> pytest.MarkDecorator:
    """Parameters of a test of each of these families under each split, in the order in which they have to run."""
    made = []
    for (turn, split), (number, family) in itertools.product(enumerate(CHOSEN), enumerate(families)):
        is_short = family == "llama" or (number % len(CHOSEN) == turn and family not in COVERED)
        marks = () if is_short else pytest.mark.long
        made.append(pytest.param(split, family, id=f"{family}-{label(split)}", marks=marks))
    return pytest.mark.parametrize(("split", "family"), made)


def scenarios(family: str, split: Split) -> list[str]:
    """What a family meets under a split."""
    mixed = [MIXED[sum(family.encode()) % len(MIXED)]] if split == Split() else []
    return [*CHOSEN[split], *mixed]


def check_row(bench: Workbench, family: str, split: Split) -> None:
    """Assert that every cell is right."""
    cells = run_row(bench, family, split, scenarios(family, split))
    wrong = {name: (str(cell), *cell.problems) for name, cell in cells.items() if cell.refusal or not cell.passes}
    assert not wrong, wrong  # pytest shows what it compares in files of tests only


def check_back(bench: Workbench, family: str) -> None:
    """Assert that one rank reads what all splits have stored before."""
    cells = run_row(bench, family, Split(), ["other_splits"])
    assert not cells["other_splits"].problems, cells["other_splits"].problems
    stored = bench.stored(family)
    assert len(stored) == len(CHOSEN), stored
