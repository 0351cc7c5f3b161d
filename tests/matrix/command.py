"""`python -m tests.matrix`: prints the table; exit code 1 if a cell fails."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils import logging

from raycache.parallel.sharding import Split
from tests.matrix.matrix import COLUMNS, SPLITS, Workbench, run_controls, run_row
from tests.matrix.table import Cell, Table, label
from tests.oracle.families import FAMILIES, KNOWN


def main() -> int:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description="Every family under every split.")
    parser.add_argument("--families", type=_names, default=list(FAMILIES), help="such as llama,gemma3; all")
    parser.add_argument("--splits", type=_splits, default=SPLITS, help="tp.pp.cp, such as 1.1.1,2.1.2; all")
    parser.add_argument("--scenarios", type=_names, default=list(COLUMNS), help=f"of {', '.join(COLUMNS)}; all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="rank i computes on device i")
    parser.add_argument("--controls", action="store_true", help="damage the cache instead: it must be noticed")
    parser.add_argument("--storages", type=Path, help="directory that keeps what splits have stored, for other_splits")
    parser.add_argument("--out", type=Path, help="file for the table as well")
    chosen = parser.parse_args()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for given, known in ((chosen.families, KNOWN), (chosen.scenarios, COLUMNS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if chosen.controls:
        text, is_good = _controls(chosen.families, chosen.splits, device_type=chosen.device)
    else:
        with Workbench(chosen.device, storages=chosen.storages) as bench:
            text, is_good = _matrix(bench, chosen.families, chosen.splits, chosen.scenarios)
    print(text)
    if chosen.out:
        chosen.out.write_text(text)
    return 0 if is_good else 1


def _matrix(
    bench: Workbench, families: Sequence[str], splits: Sequence[Split], scenarios: Sequence[str]
) -> tuple[str, bool]:
    """The table, and whether all of it passes. Split by split, since a gang serves one; printed family by family."""
    rows: dict[tuple[str, Split], dict[str, Cell]] = {}
    for split, family in _told(splits, families):
        rows[family, split] = cells = run_row(bench, family, split, scenarios)
        print(" ".join(str(cell) for cell in cells.values()), file=sys.stderr, flush=True)
    table = Table(scenarios)
    for family, split in itertools.product(families, splits):
        table.add(family, split, rows[family, split])
    return str(table), not table.failures


def _controls(families: Sequence[str], splits: Sequence[Split], *, device_type: str) -> tuple[str, bool]:
    """All damage, and whether all of it was noticed."""
    lines = [
        "Damage to one part of one layer's cache, and the error that it makes as a multiple of the tolerance: of the "
        "logits of the next 8 tokens, or, if they do not show it, of the cache's content. Splits are tp.pp.cp.",
        "",
        "| family | split | damage | logits | cache |",
        "|---|---|---|---|---|",
    ]
    num_damages = num_missed = num_failed = 0
    with Workbench(device_type) as bench:
        for split, family in _told(splits, families):
            found, note = run_controls(bench, family, split)
            lines += [f"| {family} | {label(split)} | {control} |" for control in found]
            lines += [f"| {family} | {label(split)} | {note} | | |"] if note else []
            missed = [control.name for control in found if not control.is_noticed]
            num_damages, num_missed = num_damages + len(found), num_missed + len(missed)
            num_failed += "FAIL" in note
            told = note or f"{len(found)} damages, not noticed: {', '.join(missed) or 'none'}"
            print(told, file=sys.stderr, flush=True)
    lines += ["", f"{num_damages} damages, {num_missed} not noticed; {num_failed} families failed without."]
    return "\n".join(lines) + "\n", not (num_missed or num_failed)


def _told(splits: Sequence[Split], families: Sequence[str]) -> Iterator[tuple[Split, str]]:
    """All pairs; says on stderr how far it is."""
    started_s = time.monotonic()
    for split, family in itertools.product(splits, families):
        passed_s = time.monotonic() - started_s
        print(f"{passed_s:6.0f} s  {family} {label(split)}  ", end="", file=sys.stderr, flush=True)
        yield split, family


def _names(text: str) -> list[str]:
    return text.split(",")


def _splits(text: str) -> list[Split]:
    return [Split(*(int(size) for size in part.split("."))) for part in text.split(",")]
