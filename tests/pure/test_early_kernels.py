"""Triton kernels that begin early wait for those in front of them, in all programs, and write nothing before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def early_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Kernels with IS_EARLY; Triton need not be installed."""
    for path in sorted((ROOT / "raycache").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "IS_EARLY" in [each.arg for each in node.args.args]:
                yield f"{path.stem}.{node.name}", node


def calls(node: ast.AST) -> list[str]:
    """Names of the functions that are called in it, in order of their lines."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [ast.unparse(call.func) for call in sorted(found, key=lambda call: call.lineno)]


KERNELS = dict(early_kernels())


def test_kernels_are_found_in_every_folder_that_has_some() -> None:
    modules = {name.split(".")[0] for name in KERNELS}
    assert modules >= {"kernels", "vector_kernels", "peer_kernels", "part_kernels", "page_kernels", "expert_kernels"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_lets_the_next_one_begin_and_waits_before_it_writes(name: str) -> None:
    body = KERNELS[name].body
    tests = [i for i, one in enumerate(body) if isinstance(one, ast.If) and ast.unparse(one.test) == "IS_EARLY"]
    waits = [call for i in tests for call in calls(body[i])]
    assert waits == ["gdc_launch_dependents", "gdc_wait"] and not any(body[i].orelse for i in tests)
    at = tests[-1]
    before = ast.Module(body[:at], [])
    assert not any(isinstance(each, ast.Return) for each in ast.walk(before))
    assert not [call for call in calls(before) if "store" in call or "atomic" in call or call == "send"]
    assert "gdc_wait" not in calls(ast.Module(body[at + 1 :], []))
