#!/usr/bin/env python3
"""Damages the code in many places, one at a time, and says how many of them the tests notice.

    python scripts/mutants.py --places 100 --seed 1 --jobs 2 raycache/cache raycache/decider raycache/memory

Each job works on a copy of the tree. For each place it runs tests/pure, then the files of tests/unit that import the
damaged module, and stops at the first failure. A place counts as noticed when a test fails or does not end in time.
Files that fail without any damage are named and left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

COMPARE = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
}
COMPARE |= {ast.In: "not in", ast.NotIn: "in"}
BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//"}


def damages(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Nodes of a module that can be damaged, and what then stands there."""
    tree = ast.parse(source)
    skipped = {
        id(node) for outer in ast.walk(tree) if isinstance(outer, ast.Assert | ast.Raise) for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        part = lambda inner: ast.get_source_segment(source, inner)  # noqa: E731
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                yield node, f"({part(left)} {COMPARE[type(op)]} {part(right)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                yield node, f"({part(left)} {BINARY[type(op)]} {part(right)})"
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield node, "(" + word.join(f"({part(value)})" for value in values) + ")"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, f"({part(operand)})"
            case ast.If(test=test):
                yield test, f"(not ({part(test)}))"
            case ast.Expr(value=ast.Call()):
                yield node, "pass"
            case ast.AugAssign():
                yield node, "pass"


def damaged(source: str, node: ast.AST, text: str) -> str:
    """The source with a node replaced."""
    lines = source.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: node.lineno - 1]) + node.col_offset  # type: ignore[attr-defined]
    end = sum(len(line.encode()) for line in lines[: node.end_lineno - 1]) + node.end_col_offset  # type: ignore[attr-defined]
    data = source.encode()
    return (data[:start] + text.encode() + data[end:]).decode()


def importers(root: Path, module: str) -> list[str]:
    """Unit tests that import a module."""
    files = sorted((root / "tests" / "unit").glob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if module in file.read_text(encoding="utf-8")]


@dataclass(frozen=True)
class Place:
    """A node of a file, and what stands there when it is damaged."""

    file: Path
    source: str
    node: ast.AST
    text: str

    @property
    def module(self) -> str:
        """Dotted name."""
        return ".".join(self.file.with_suffix("").parts)


class Copies:
    """Copies of the tree, one per job, that tests run in.

    Args:
        folder: where they are made.
        count: number of copies.
        limit_s: for the tests of one place.
    """

    def __init__(self, folder: Path, *, count: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._free: SimpleQueue[Path] = SimpleQueue()
        skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__")
        for number in range(count):
            self._free.put(Path(shutil.copytree(".", folder / str(number), ignore=skipped)))

    def fails(self, tests: Sequence[str], *, place: Place | None = None) -> bool:
        """Whether one of these tests fails, or does not end in time, with a place damaged."""
        if not tests:
            return False
        root = self._free.get()
        file = root / place.file if place else None
        try:
            if place and file:
                file.write_text(damaged(place.source, place.node, place.text), encoding="utf-8")
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
            env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            return True
        finally:
            if place and file:
                file.write_text(place.source, encoding="utf-8")
            self._free.put(root)
        return done.returncode != 0


def chosen_places(folders: Sequence[str], *, count: int, seed: int) -> list[Place]:
    """Places drawn from all that can be damaged below these folders."""
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    sources = {file: file.read_text(encoding="utf-8") for file in files}
    places = [Place(file, source, *damage) for file, source in sources.items() for damage in damages(source)]
    return random.Random(seed).sample(places, min(count, len(places)))


def main() -> int:
    """Parse the command line and damage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="where to damage")
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for the tests of one place")
    options = parser.parse_args()

    chosen = chosen_places(options.folders, count=options.places, seed=options.seed)
    pure = [str(file) for file in sorted(Path("tests/pure").glob("test_*.py"))]
    unit = {module: importers(Path(), module) for module in {place.module for place in chosen}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        copies = Copies(Path(folder), count=options.jobs, limit_s=options.limit)
        files = sorted({*pure, *(file for some in unit.values() for file in some)})
        broken = {
            file
            for file, is_broken in zip(files, threads.map(lambda file: copies.fails([file]), files), strict=True)
            if is_broken
        }
        print(f"fail without damage, left out: {', '.join(sorted(broken)) or 'none'}", flush=True)

        def judge(place: Place) -> bool:
            begin = time.monotonic()
            suites = [[file for file in some if file not in broken] for some in (pure, unit[place.module])]
            is_noticed = any(copies.fails(tests, place=place) for tests in suites)
            where = f"{place.file}:{place.node.lineno}"  # type: ignore[attr-defined]
            verdict = "noticed" if is_noticed else "MISSED "
            print(f"{verdict} {time.monotonic() - begin:5.0f} s {where} {place.text[:90]!r}", flush=True)
            return is_noticed

        noticed = sum(threads.map(judge, chosen))
    print(f"{noticed} of {len(chosen)} places noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
