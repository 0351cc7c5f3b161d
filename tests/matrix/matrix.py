"""Runs cells: one gang per split, which loads one family after the other."""

from __future__ import annotations

import itertools
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from raycache.errors import CheckpointError, ConfigError
from raycache.models.base import check_split, read_config
from raycache.parallel.sharding import Split
from tests.matrix.blind import damage_loads
from tests.matrix.contents import Contents
from tests.matrix.controls import Control, damage_all
from tests.matrix.faults import FAULT_SCENARIOS
from tests.matrix.gang import Gang, RankFailedError
from tests.matrix.scenarios import SCENARIOS, Scenario, Setting
from tests.matrix.sequences import Corpus, make_corpus
from tests.matrix.table import Cell
from tests.matrix.tiers import TIER_SCENARIOS
from tests.matrix.trial import load

SPLITS = [Split(tp, pp, cp) for tp, pp, cp in itertools.product((1, 2, 4), repeat=3) if tp * pp * cp <= 8]
"""All of {1, 2, 4} with at most 8 ranks."""

COLUMNS: Mapping[str, Scenario] = MappingProxyType({**SCENARIOS, **TIER_SCENARIOS, **FAULT_SCENARIOS})
"""By name; those of the device first."""


class Workbench:
    """Makes every corpus once, and keeps the gang of the split that was asked for last. Clears up on exit.

    Args:
        device_type: "cpu" or "cuda".
        storages: where what every split has stored is kept for the next time; None for this time only.
    """

    def __init__(self, device_type: str = "cpu", *, storages: Path | None = None) -> None:
        self._device_type = device_type
        self._directory = tempfile.TemporaryDirectory()
        self._storages = storages or Path(self._directory.name) / "storages"
        self._corpora: dict[str, tuple[Corpus, Contents]] = {}
        self._gang: Gang | None = None

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_gang()
        self._directory.cleanup()

    def prepare(self, family: str, split: Split) -> Setting:
        """Load a family into all ranks of a gang.

        Raises:
            ConfigError: it cannot be split so.
            CheckpointError: the family is not registered.
            RankFailedError: a rank could not load it.
        """
        if family not in self._corpora:
            made = make_corpus(Path(self._directory.name) / family, family)
            self._corpora[family] = made, Contents.of(made)
        corpus, contents = self._corpora[family]
        check_split(read_config(corpus.model_dir), split)
        if self._gang is None or self._gang.is_broken or self._gang.split != split:
            self._close_gang()
            self._gang = Gang(split, device_type=self._device_type)
        return Setting(self._gang, corpus, load(self._gang, corpus), contents, self._storages)

    def stored(self, family: str) -> list[Path]:
        """What splits have stored of a family, see tiers.other_splits."""
        return sorted((self._storages / family).iterdir())

    def _close_gang(self) -> None:
        if self._gang is not None:
            self._gang.close()
        self._gang = None


def run_row(bench: Workbench, family: str, split: Split, scenarios: Sequence[str]) -> dict[str, Cell]:
    """All cells of one family under one split."""
    cells: dict[str, Cell] = {}
    try:
        setting = bench.prepare(family, split)
        for scenario in scenarios:
            if setting.gang.is_broken:
                setting = bench.prepare(family, split)
            cells[scenario] = run_cell(setting, scenario)
    except ConfigError as refusal:
        return dict.fromkeys(scenarios, Cell(refusal=str(refusal)))
    except (CheckpointError, RankFailedError) as cause:
        rest = Cell(problems=(str(cause),))
        cells |= {scenario: rest for scenario in scenarios if scenario not in cells}
    return cells


def run_cell(setting: Setting, scenario: str) -> Cell:
    """One cell. If a rank fails, the gang is broken."""
    corpus, error, problems = setting.corpus, 0.0, []
    try:
        for trial in COLUMNS[scenario](setting):
            error = max(error, trial.error)
            problems += trial.problems
            if trial.wrong_tokens:
                problems.append(f"{trial.wrong_tokens} tokens differ from the greedy ones")
    except RankFailedError as cause:
        problems.append(str(cause))
    except AssertionError:  # of the scheduler or the cache: the ranks are well
        problems.append(traceback.format_exc())
        setting.gang.drain()
    return Cell(error=error, atol=corpus.atol, problems=tuple(problems))


def run_controls(
    bench: Workbench, family: str, split: Split, *, layers: Sequence[int] = ()
) -> tuple[list[Control], str]:
    """What was noticed of all damage, and why there is none, with "FAIL" if that is no refusal."""
    try:
        at = bench.prepare(family, split)
        return [*damage_all(at, layers=layers), *damage_loads(at)], ""
    except ConfigError as refusal:
        return [], f"refused: {refusal}"
    except (CheckpointError, RankFailedError, AssertionError) as cause:
        return [], f"**FAIL** {cause}"
