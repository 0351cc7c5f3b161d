"""Runs tests/gpu, every module in a process of its own, and writes what came of them as Markdown.

A process of its own because an error of a kernel stays with the process: all that is tried on the GPU after it fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

TESTS = Path("tests/gpu")
PACKAGES = ("flashinfer-python", "fla-core", "triton", "ray")
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Outcome:
    """What came of a module.

    Attributes:
        module: its file.
        passed, failed, skipped: number of tests.
        seconds: that it took, its start included.
        problems: a line for each test that failed, and for what else went wrong.
        reasons: why tests were skipped.
    """

    module: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    problems: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def main() -> int:
    """Run, write, and say where.

    Returns:
        Exit code: 1 when a test failed, a module did not run to its end, or no test has passed.
    """
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__, allow_abbrev=False)
    result = Path(f"benchmarks/results/{datetime.now(UTC):%Y-%m-%d}-gpu-tests.md")
    parser.add_argument("--output", type=Path, default=result, metavar="FILE", help=f"default: {result}")
    options, rest = parser.parse_known_args()
    named = [word for word in rest if word.split("::")[0].endswith(".py")]
    others = [word for word in rest if word not in named]
    modules = named or sorted(map(str, TESTS.glob("test_*.py")))
    outcomes = [run_module(module, others) for module in modules]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(outcomes, command=" ".join(["scripts/gpu", *sys.argv[1:]])), encoding="utf-8")
    print(f"\n{_sum(outcomes)}; see {options.output}")
    is_bad = any(one.failed or one.problems for one in outcomes) or not any(one.passed for one in outcomes)
    return int(is_bad)


def run_module(module: str, arguments: Sequence[str]) -> Outcome:
    """Run one file of tests."""
    print(f"== {module}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "result.xml"
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", module, "-q", f"--junit-xml={xml}", *arguments]
        done = subprocess.run(command, check=False)
        seconds = time.monotonic() - begin
        if not xml.is_file():
            return Outcome(module, 0, 0, 0, seconds, (f"ended with code {done.returncode} before its end",))
        return read_result(module, xml.read_text(encoding="utf-8"), code=done.returncode, seconds=seconds)


def read_result(module: str, xml: str, *, code: int, seconds: float) -> Outcome:
    """Count what pytest's JUnit file says.

    Args:
        module: its file.
        xml: content of the JUnit file.
        code: pytest's exit code.
        seconds: that it took.
    """
    passed = failed = skipped = 0
    problems: list[str] = []
    reasons: set[str] = set()
    for case in ElementTree.fromstring(xml).iter("testcase"):
        bad = [found for kind in ("failure", "error") if (found := case.find(kind)) is not None]
        if bad:
            failed += 1
            problems.append(f"`{case.get('name')}`: {_reason(bad[0])[:200]}")
        elif (skip := case.find("skipped")) is not None:
            skipped += 1
            reasons.add(skip.get("message", ""))
        else:
            passed += 1
    if code not in (0, 1, NO_TESTS):
        problems.append(f"pytest ended with code {code}")
    return Outcome(module, passed, failed, skipped, seconds, tuple(problems), tuple(sorted(reasons)))


def _reason(bad: ElementTree.Element) -> str:
    """The first line of what was raised; of a module that cannot be imported pytest's message does not say it."""
    raised = [line.removeprefix("E ").strip() for line in (bad.text or "").splitlines() if line.startswith("E  ")]
    return raised[0] if raised else bad.get("message", "").split("\n", 1)[0]


def report(outcomes: Sequence[Outcome], *, command: str) -> str:
    """All of it as Markdown."""
    lines = ["# GPU tests", "", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, `{command}`", "", *_machine(), ""]
    lines += ["| module | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    lines += [
        f"| {Path(one.module).name} | {one.passed} | {one.failed} | {one.skipped} | {one.seconds:.0f} |"
        for one in outcomes
    ]
    lines += ["", f"**{_sum(outcomes)}**"]
    problems = [f"- {Path(one.module).name}: {problem}" for one in outcomes for problem in one.problems]
    reasons = [f"- {Path(one.module).name}: {reason}" for one in outcomes for reason in one.reasons]
    for title, entries in (("Failed", problems), ("Why tests were skipped", reasons)):
        if entries:
            lines += ["", f"## {title}", "", *entries]
    return "\n".join(lines) + "\n"


def _sum(outcomes: Sequence[Outcome]) -> str:
    passed, failed, skipped = (
        sum(counts) for counts in zip(*((one.passed, one.failed, one.skipped) for one in outcomes), strict=True)
    )
    unfinished = sum(not one.failed and bool(one.problems) for one in outcomes)
    text = f"{passed} passed, {failed} failed, {skipped} skipped"
    return f"{text}, {unfinished} modules not run to their end" if unfinished else text


def _machine() -> list[str]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    hardware = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "-"
    lines = [
        f"- GPUs: {hardware}; driver {_output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}",
        f"- CPU: {platform.machine()}, Python {platform.python_version()}",
        f"- torch {torch.__version__}, CUDA {torch.version.cuda or '-'}, NCCL {nccl}",
    ]
    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return [*lines, f"- {packages}", f"- commit {_output('git', 'rev-parse', '--short', 'HEAD')}{_changed()}"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _changed() -> str:
    return ", with changes" if _output("git", "status", "--porcelain", "--untracked-files=no") not in ("", "-") else ""


def _output(*command: str) -> str:
    """First line of what a program prints; "-" if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return "-"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else "-"


if __name__ == "__main__":
    sys.exit(main())
