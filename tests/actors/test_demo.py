"""The demo as `make demo` runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.demo.model import make_demo_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    return make_demo_model(tmp_path_factory.mktemp("demo") / "smollm2")


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "launch.demo", str(directory)]

    def hear_interrupts() -> None:  # which a shell's background job ignores, and what it starts as well
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_interrupts
    )


def output_until(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stdout is not None
    output = ""
    while mark not in output:
        line = process.stdout.readline()
        assert line, f"the demo ended early:\n{output}"
        output += line
    return output


@pytest.mark.real_model
@pytest.mark.long
def test_the_second_question_is_answered_from_the_cache_and_nothing_is_left(directory: Path) -> None:
    process = start(directory)
    try:
        output_until(process, "endpoint")
        children = psutil.Process(process.pid).children(recursive=True)
        output, _ = process.communicate(timeout=200)
    finally:
        process.terminate()
    assert process.returncode == 0, output
    first, second = re.findall(r"after (\S+) s; (\d+) prompt tokens, (\d+) of them from the cache", output)
    assert int(first[2]) == 0
    assert int(first[1]) > int(second[2]) > 1000 and int(second[2]) % 64 == 0
    assert float(second[0]) < float(first[0])
    assert "Ines Varga" in output and "peat" in output
    assert len(children) > 3 and not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.long
def test_a_hybrid_answers_what_its_demo_says_from_a_restore_point() -> None:
    process = start(Path("demos/hybrids/mamba2_gqa"))
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        process.terminate()
    assert process.returncode == 0, output
    cached = [int(count) for count in re.findall(r"(\d+) of them from the cache", output)]
    assert cached == [0, 240]
    assert "SELLS ICE" in output


@pytest.mark.real_model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.long
def test_an_interrupted_demo_stops_its_server(directory: Path, number: int) -> None:
    process = start(directory)
    try:
        output_until(process, "starting Ray")
        time.sleep(1.0)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output, _ = process.communicate(timeout=100)
    finally:
        process.terminate()
    assert process.returncode == 130, output
    assert children and not psutil.wait_procs(children, timeout=60)[1]
