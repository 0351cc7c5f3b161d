"""`raycache launch` as a person runs it: a process that is started, asked, interrupted, and gone."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.actors.launched import endpoint_of, is_gone, start, traces


def test_interrupt_leaves_no_process_no_shared_memory_and_no_ray_files(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--cp", "2", "--num-pages", "32", "--no-dashboard")
    try:
        endpoint = endpoint_of(process)
        answer = httpx.post(
            f"{endpoint}/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3}, timeout=30
        )
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 3, "ranks, engine and Ray run below it"
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
        assert is_gone(children, within_s=30)
        assert traces(scratch, children) == set()
    finally:
        process.kill()


def test_sigterm_to_all_processes_at_once_is_as_clean_as_to_one(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--num-pages", "32", "--host-memory", "64MiB", "--no-dashboard")
    try:
        endpoint_of(process)
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:  # first, as if they were the first to get it
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        process.terminate()
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "stopping", "no error or warning"
        assert is_gone(children, within_s=30)
        assert traces(scratch, children) == set()
    finally:
        process.kill()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_warning_of_an_actor_is_shown_once(model: Path, scratch: Path, log_format: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # without listening, so that connections are refused
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        flags = ("--num-pages", "32", "--host-memory", "64MiB", "--no-dashboard", "--log-format", log_format)
        process = start(model, scratch, *flags, "--storage", url)
        try:
            assert process.stdout is not None
            lines = list(iter(process.stdout.readline, "Press Ctrl-C to stop.\n"))
            while not any(url in line and "cannot be reached" in line for line in lines):
                lines.append(process.stdout.readline())
                assert lines[-1], lines
            process.terminate()
            output, _ = process.communicate(timeout=100)
        finally:
            process.kill()
    lines += output.splitlines(keepends=True)
    (told,) = [line for line in lines if "cannot be reached" in line]
    if log_format == "json":
        found = json.loads(told)
        assert (found["level"], found["replica"]) == ("warning", "0")
        told = found["message"]
    assert told.startswith(f"storage {url} cannot be reached")
    assert any(line.startswith(f"logs       {scratch}") for line in lines)


def test_each_phase_of_a_start_is_shown_once(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--num-pages", "32", "--host-memory", "64MiB", "--no-dashboard")
    seen = []
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and not line.startswith("endpoint"):
            seen.append(line.strip())
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
    finally:
        process.kill()
    assert seen.count("starting ranks") == 1, seen
    assert seen.count("starting the engine") <= 1 and seen.count("making the host tier") <= 1


@pytest.mark.long
@pytest.mark.parametrize("phase", ["starting Ray", "starting ranks"])
def test_interrupt_while_starting_leaves_nothing(model: Path, scratch: Path, phase: str) -> None:
    process = start(model, scratch, "--cp", "2", "--no-dashboard")
    try:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith(phase):
                break
        time.sleep(1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
        assert is_gone(children, within_s=30)
        assert traces(scratch, children) == set()
    finally:
        process.kill()


@pytest.mark.long
def test_a_mistake_that_is_found_while_ray_starts_leaves_nothing(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--chat-template", "nowhere.jinja", "--no-dashboard")
    below: set[psutil.Process] = set()
    try:
        while process.poll() is None:
            below.update(psutil.Process(process.pid).children(recursive=True))
            time.sleep(0.1)
        output, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 2
    assert "nowhere.jinja" in output and "Traceback" not in output
    assert below, "Ray was starting"
    assert is_gone(list(below), within_s=30)
    assert traces(scratch, list(below)) == set()


def test_a_port_in_use_is_refused_before_anything_starts(model: Path, scratch: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(model, scratch, "--port", port)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "in use" in output and port in output
