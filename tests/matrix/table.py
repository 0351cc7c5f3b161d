"""Cells of the matrix and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raycache.parallel.sharding import Split


@dataclass(frozen=True)
class Cell:
    """One family under one split in one scenario.

    Attributes:
        error: largest difference of a logit to float64.
        atol: what is allowed.
        problems: what else is wrong; none if it passes.
        refusal: why the split was refused, or "".
    """

    error: float = 0.0
    atol: float = 1.0
    problems: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def ratio(self) -> float:
        """Of the error to what is allowed."""
        return self.error / self.atol

    @property
    def passes(self) -> bool:
        """Whether it is right, or refused."""
        return bool(self.refusal) or (self.ratio <= 1 and not self.problems)

    def __str__(self) -> str:
        if self.refusal:
            return "refused"
        figure = f"{self.ratio:.2f} ({self.error:.0e})"
        return figure if self.passes else f"**FAIL** {figure}"


@dataclass
class Table:
    """Rows of cells.

    Attributes:
        columns: names of scenarios.
        rows: (family, split) -> column -> cell.
    """

    columns: Sequence[str]
    rows: dict[tuple[str, Split], dict[str, Cell]] = field(default_factory=dict)

    def add(self, family: str, split: Split, cells: Mapping[str, Cell]) -> None:
        """Add a row; every column must be in it."""
        assert set(cells) == set(self.columns), f"cells are missing: {set(self.columns) - set(cells)}"
        self.rows[family, split] = dict(cells)

    @property
    def failures(self) -> list[str]:
        """One line per cell that does not pass."""
        return [
            f"{family} {label(split)} {column}: {'; '.join(cell.problems) or 'logits differ'}"
            for (family, split), cells in self.rows.items()
            for column, cell in cells.items()
            if not cell.passes
        ]

    @property
    def refusals(self) -> list[str]:
        """One line per split that is refused."""
        found = {
            (family, split): cell.refusal
            for (family, split), cells in self.rows.items()
            for cell in cells.values()
            if cell.refusal
        }
        return [f"{family} {label(split)}: {reason}" for (family, split), reason in found.items()]

    def __str__(self) -> str:
        lines = [
            "Worst error of any logit as a multiple of the family's tolerance (absolute in brackets); tolerance: 20 "
            "times what float32 costs transformers. Splits are tp.pp.cp.",
            "",
            f"| family | split | {' | '.join(self.columns)} |",
            f"|---|---|{'---|' * len(self.columns)}",
        ]
        for (family, split), cells in self.rows.items():
            lines.append(f"| {family} | {label(split)} | {' | '.join(str(cells[c]) for c in self.columns)} |")
        allowed = {
            family: cell.atol for (family, _), cells in self.rows.items() for cell in cells.values() if cell.error
        }
        lines += ["", f"Tolerances: {', '.join(f'{family} {atol:.0e}' for family, atol in allowed.items())}."]
        every = [cell for cells in self.rows.values() for cell in cells.values()]
        refused = sum(bool(cell.refusal) for cell in every)
        failed = sum(not cell.passes for cell in every)
        lines += ["", f"{len(every)} cells: {len(every) - refused - failed} pass, {refused} refused, {failed} fail."]
        for title, notes in (("Refused", self.refusals), ("Failed", self.failures)):
            if notes:
                lines += ["", f"{title}:", "", *(f"- {note}" for note in notes)]
        return "\n".join(lines) + "\n"


def label(split: Split) -> str:
    """tp.pp.cp, such as "2.1.4", and the layers of stages that were given, such as "1.2.1 (3,1)"."""
    stages = f" ({','.join(map(str, split.stages))})" if split.stages else ""
    return f"{split.tp}.{split.pp}.{split.cp}{stages}"
