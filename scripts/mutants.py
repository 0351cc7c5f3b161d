#!/usr/bin/env python3
"""Damages the code in many places, one at a time, and says how many of them the tests notice.

    python scripts/mutants.py --places 100 --seed 1 raycache/cache raycache/decider raycache/memory

Works on a copy of the tree. For each place it runs tests/pure, then the files of tests/unit that import the damaged
module, and stops at the first failure. A place counts as noticed when a test fails or does not end in time.
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
from collections.abc import Iterator
from pathlib import Path

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


def is_noticed(root: Path, tests: list[str], *, limit_s: float) -> bool:
    """Whether one of these tests fails."""
    if not tests:
        return False
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Parse the command line and damage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="where to damage")
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for the tests of one place")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(
            ".", root, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__")
        )
        sources = {
            path: path.read_text(encoding="utf-8")
            for name in options.folders
            for path in sorted((root / name).rglob("*.py"))
        }
        sites = [(path, node, text) for path, source in sources.items() for node, text in damages(source)]
        chosen = random.Random(options.seed).sample(sites, min(options.places, len(sites)))
        if is_noticed(root, ["tests/pure"], limit_s=options.limit):
            print("mutants: tests/pure fails without any damage", file=sys.stderr)
            return 2
        missed = 0
        for number, (path, node, text) in enumerate(chosen, 1):
            begin = time.monotonic()
            name = path.relative_to(root)
            path.write_text(damaged(sources[path], node, text), encoding="utf-8")
            module = ".".join(name.with_suffix("").parts)
            suites = (["tests/pure"], importers(root, module))
            noticed = any(is_noticed(root, tests, limit_s=options.limit) for tests in suites)
            path.write_text(sources[path], encoding="utf-8")
            missed += not noticed
            verdict = "noticed" if noticed else "MISSED "
            print(
                f"{number:3} {verdict} {time.monotonic() - begin:5.0f} s {name}:{node.lineno} {text[:90]!r}", flush=True
            )
        print(f"{len(chosen) - missed} of {len(chosen)} places noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
