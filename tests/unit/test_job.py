"""Launching on a remote cluster: the command and its secrets, and what is refused before anything is sent."""

from __future__ import annotations

import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from launch import environment
from launch.cli import job
from launch.cli.main import main
from launch.flags import settings
from raycache import __version__
from raycache.config import Config
from raycache.errors import ConfigError

_ADDRESS = "http://127.0.0.1:8265"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = (environment.CLIENT_VERSION, environment.API_KEY, environment.STORAGE)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "OMP_NUM_THREADS", *ours):
        monkeypatch.delenv(name, raising=False)


def test_the_head_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": "/models/a b", "address": _ADDRESS, "tp": 8, "prefix_cache": False, "dummy_weights": True}
    words = shlex.split(job._command(values))
    assert words[:2] == ["exec", "raycache"]
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("launch.cli.main._launch", lambda options: seen.append(settings(options)) or 0)
    assert main(words[2:]) == 0
    assert seen == [{**values, "address": "auto"}]


def test_threads_of_this_machines_environment_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("launch.cli.main._launch", lambda options: seen.append(settings(options)) or 0)
    assert main(["launch", "/m"]) == 0
    assert "--cpu-threads=3" in job._command(seen[0]).split()


def test_words_travel_as_words() -> None:
    values = {"model": "/m", "overlap": True, "port": "auto", "restore_interval": "none", "host_memory": "auto"}
    words = job._command(values).split()  # a YAML file gives a plain `overlap: on` as a truth value
    assert {"--overlap=on", "--port=auto", "--restore-interval=none", "--host-memory=auto"} <= set(words)


def test_secrets_travel_beside_the_command_line() -> None:
    values = {"model": "/m", "api_key": "open", "storage": "redis://:pass@h/0", "host_memory": "1GiB"}
    assert "open" not in job._command(values) and "pass" not in job._command(values)
    assert job._variables(Config.from_mapping(values)) == {
        "RAYCACHE_CLIENT_VERSION": __version__,
        "RAYCACHE_API_KEY": "open",
        "RAYCACHE_STORAGE": "redis://:pass@h/0",
    }


def test_a_job_refuses_another_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(environment.CLIENT_VERSION, "9.9")
    assert main(["launch", "/m"]) == 2
    assert f"RayCache {__version__}, the submitting machine 9.9" in capsys.readouterr().err


def test_a_relative_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("models/x", "./models/y", "../a/b"):
        with pytest.raises(ConfigError, match=f"{name} is relative"):
            job.run({"model": name, "address": _ADDRESS})


def test_settings_of_the_hub_travel_with_its_models_and_paths_of_this_machine_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("HF_TOKEN", "hf_x"), ("HF_ENDPOINT", "http://mirror"), ("HF_HOME", "/mine")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = job._variables(Config(model="acme/tiny", address=_ADDRESS))
    assert found == {"RAYCACHE_CLIENT_VERSION": __version__, "HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://mirror"}
    assert "hf_x" not in job._command({"model": "acme/tiny", "address": _ADDRESS})
    assert "HF_TOKEN" not in job._variables(Config(model="/models/m", address=_ADDRESS))


def test_a_variable_that_wins_over_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
    with pytest.raises(ConfigError, match="RAY_ADDRESS is set"):
        job.run({"model": "/m", "address": _ADDRESS})


def test_a_server_that_is_no_dashboard_is_named_as_such() -> None:
    with (
        _http(200, b"<html>") as address,
        pytest.raises(ConfigError, match="does not accept jobs like a Ray dashboard"),
    ):
        job.run({"model": "/m", "address": address})


def test_a_cluster_that_wants_a_token_says_how(tmp_path: Path) -> None:
    with _http(401, b"no token") as address, pytest.raises(ConfigError, match="requires a token; set RAY_AUTH_MODE"):
        job.run({"model": "/m", "address": address})


def test_a_dashboard_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.job._RESPONSE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match="did not respond within"):
            job.run({"model": "/m", "address": address})


@contextmanager
def _http(status: int, body: bytes) -> Iterator[str]:
    """A server with one answer to everything; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
