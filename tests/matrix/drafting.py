"""`python -m tests.matrix.drafting`: every family with every kind of draft; exit code 1 if a cell fails.

    ngram    what followed before        small    the model itself with noise in its weights
    mtp      a layer of the checkpoint   eagle, eagle3    heads

What a cell is, and when it passes, is said in draft_cells.py. Imports nothing before it has to: rank processes import
this file again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.matrix.draft_cells import Cell


def main() -> int:
    """Read the arguments, run, print."""
    from transformers.utils import logging

    from tests.matrix.draft_cells import KINDS, PREDICTING, run_cells
    from tests.oracle.families import FAMILIES, KNOWN

    parser = argparse.ArgumentParser(prog="python -m tests.matrix.drafting", description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=_names, default=list(FAMILIES), help="such as llama,gemma3; all")
    parser.add_argument("--kinds", type=_names, default=list(KINDS), help=f"of {', '.join(KINDS)}; all")
    parser.add_argument("--cp", type=_numbers, default=[1, 2, 4], help="numbers of cp ranks; 1,2,4")
    parser.add_argument("--json", type=Path, help="file for the cells as well")
    chosen = parser.parse_args()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for given, known in ((chosen.families, KNOWN), (chosen.kinds, KINDS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    cells: list[Cell] = []
    start_s = time.monotonic()
    for family in chosen.families:
        for kind in chosen.kinds:
            for cell in run_cells(family, kind, chosen.cp) if kind != "mtp" or family in PREDICTING else ():
                cells.append(cell)
                passed_s = time.monotonic() - start_s
                print(f"{passed_s:6.0f} s  {family} {kind} cp={cell.cp}  {cell}", file=sys.stderr, flush=True)
    print(_table(cells))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(cell) for cell in cells]))
    return 1 if any(cell.problems for cell in cells) else 0


def _table(cells: Sequence[Cell]) -> str:
    """Rows of pairs, columns of cp, and what is wrong."""
    cps = sorted({cell.cp for cell in cells})
    by_place = {(cell.family, cell.kind, cell.cp): cell for cell in cells}
    lines = [
        "Draft tokens that were right, of those that were made, in the first run of each cell.",
        "",
        f"| family | draft | {' | '.join(f'cp={cp}' for cp in cps)} |",
        f"|---|---|{'---|' * len(cps)}",
    ]
    for family, kind in dict.fromkeys((cell.family, cell.kind) for cell in cells):
        lines.append(f"| {family} | {kind} | {' | '.join(str(by_place[family, kind, cp]) for cp in cps)} |")
    failed = [cell for cell in cells if cell.problems]
    lines += ["", f"{len(cells)} cells: {len(cells) - len(failed)} pass, {len(failed)} fail."]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {cell.family} {cell.kind} cp={cell.cp}: {'; '.join(cell.problems)}" for cell in failed]
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
