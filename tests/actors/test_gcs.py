"""The head's GCS is killed under a service, and comes back with what it keeps in a Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.actors.launched import endpoint_of, start
from tests.oracle.golden import greedy
from tests.unit.storage_media import free_port, redis_binary

_PROMPT = [3 + 7 * i % 250 for i in range(90)]


@pytest.fixture
def head(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a head whose GCS keeps its state in a Redis, and the environment of its processes."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # On a busy machine streams can take longer than the minute after which Ray's processes give a GCS up.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    redis_port, port = free_port(), free_port()
    redis = [redis_binary(), "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(redis, stdout=subprocess.DEVNULL)
    env = {**os.environ, "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=4"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory=100000000", f"--temp-dir={scratch}/ray"]
    try:
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        yield f"127.0.0.1:{port}", env
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(f"{scratch}/ray" in word or f":{port}" in word for word in process.info["cmdline"] or ()):
                process.kill()
        server.kill()
        server.wait(20)


def gcs_server(address: str) -> psutil.Process:
    port = address.partition(":")[2]
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "gcs_server" and f"--gcs_server_port={port}" in process.info["cmdline"]:
            return process
    raise AssertionError("no GCS runs")


def ranks_below(folder: Path) -> list[psutil.Process]:
    """Ranks whose raylet keeps its files there; other services on this machine have theirs."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        if "ray::RankActor" in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                if f"{folder}/ray" in " ".join(psutil.Process(process.info["ppid"]).cmdline()):
                    found.append(process)
    return found


@pytest.mark.long
def test_streams_go_on_while_the_gcs_is_away_and_all_goes_on_once_it_is_back(
    head: tuple[str, dict[str, str]], model: Path, scratch: Path
) -> None:
    address, env = head
    service = start(model, scratch, "--address", address, "--insecure-cluster", "--num-pages", "64")
    try:
        client = openai.OpenAI(base_url=endpoint_of(service), api_key="none", max_retries=0, timeout=400)

        def ask(count: int) -> list[int]:
            more = {"return_token_ids": True, "ignore_eos": True}
            answer = client.completions.create(
                model="tiny", prompt=_PROMPT, max_tokens=count, temperature=0, extra_body=more
            )
            found: list[int] = answer.choices[0].model_dump()["token_ids"]
            return found

        expected = greedy(model, _PROMPT, 600)
        assert ask(600) == expected
        answers: list[list[int]] = []
        streams = [threading.Thread(target=lambda: answers.append(ask(600))) for _ in range(2)]
        for stream in streams:
            stream.start()
        time.sleep(0.5)
        gcs = gcs_server(address)
        command = gcs.cmdline()
        gcs.kill()
        gcs.wait(20)
        for stream in streams:
            stream.join(400)
        assert answers == [expected] * 2, "streams do not pass through the GCS"
        assert ask(20) == expected[:20], "nor do new requests"

        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (rank,) = ranks_below(scratch)
        rank.kill()  # another one needs the GCS
        assert ask(600) == expected
    finally:
        service.send_signal(signal.SIGINT)
        service.wait(60)
