"""What the command of the GPU tests makes of pytest's results."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "scripts" / "gpu_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tests"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_passed_failed_and_skipped_tests_are_counted_and_crashes_are_told(
    gpu_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no such thing')\n"
        "def test_broken(broken): pass\n"
        "@pytest.mark.skip('needs 2 GPUs')\n"
        "def test_two(): pass\n"
    )
    (tmp_path / "test_crash.py").write_text("import os\ndef test_good(): pass\ndef test_crash(): os._exit(7)\n")
    (tmp_path / "test_wrong.py").write_text("import no_such_module\n")
    output = tmp_path / "results" / "found.md"
    monkeypatch.setattr(gpu_tests, "TESTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_tests", "--output", str(output), "-p", "no:cacheprovider"])
    assert gpu_tests.main() == 1
    text = output.read_text()
    assert "| test_some.py | 1 | 2 | 1 |" in text and "- test_some.py: needs 2 GPUs" in text
    assert "`test_bad`: AssertionError: one is not two" in text and "no such thing" in text
    assert "- test_crash.py: ended with code 7 before its end" in text and "no_such_module" in text
    assert "**1 passed, 3 failed, 1 skipped, 1 modules not run to their end**" in text
    assert "torch " in text and "commit " in text


@pytest.mark.long
def test_a_machine_without_a_gpu_has_passed_nothing(tmp_path: Path) -> None:
    output = tmp_path / "found.md"
    command = ["scripts/gpu", "--output", str(output), "tests/gpu/test_mover.py", "-k", "pinned"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "see" in done.stdout and "| test_mover.py |" in output.read_text()
    assert done.returncode == int("| test_mover.py | 0 |" in output.read_text())
