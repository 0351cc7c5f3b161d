"""`raycache launch ORG/NAME`: the model comes from a Hub, whose part a server here plays."""

from __future__ import annotations

import hashlib
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from huggingface_hub import constants

from actors.cluster import Cluster
from actors.fetch import fetch_on
from raycache.checkpoint.hub_models import pinned
from raycache.config import Config
from raycache.errors import ConfigError
from tests.actors.launched import endpoint_of, is_gone, start, traces
from tests.hub_server import Fault, HubServer

_NAME = "acme/tiny"


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add(_NAME, model)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub


@pytest.mark.long
def test_a_model_of_the_hub_is_served_by_its_name(server: HubServer, model: Path, scratch: Path) -> None:
    flags = ("--cp", "2", "--num-pages", "32", "--no-dashboard")
    said = []
    for name in (_NAME, str(model)):
        process = start(Path(name), scratch, *flags)
        try:
            endpoint = endpoint_of(process)
            served = httpx.get(f"{endpoint}/models").json()["data"][0]["id"]
            assert httpx.get(f"{endpoint}/models/{served}").status_code == 200
            body = {"model": served, "prompt": "hello", "max_tokens": 6, "temperature": 0}
            said.append((served, httpx.post(f"{endpoint}/completions", json=body, timeout=60).json()["choices"]))
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            assert process.wait(100) == 0
            assert is_gone(children, within_s=30) and traces(scratch, children) == set()
        finally:
            process.kill()
    assert [served for served, _ in said] == [_NAME, "tiny"]
    assert said[0][1] == said[1][1]
    fetched = [request for request, part in server.seen if "GET /cdn" in request and not part]
    assert len(fetched) == 2, "weights and tokenizer, once for all ranks"


def test_an_interrupt_while_weights_are_fetched_leaves_no_part_of_a_file(
    server: HubServer, scratch: Path, tmp_path: Path
) -> None:
    weights = hashlib.sha256(server.repos[_NAME].files["model.safetensors"]).hexdigest()
    # Whole requests alone: those for headers ask for the first bytes, and are answered at once.
    server.faults = [Fault(f"GET /cdn/{weights}", times=1), Fault(f"GET /cdn/{weights}", bytes_per_s=100_000)]
    process = start(Path(_NAME), scratch, "--no-dashboard")
    try:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith("downloading"):
                break
        assert line, "it ended before"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
        assert is_gone(children, within_s=30) and traces(scratch, children) == set()
    finally:
        process.kill()
    kept = {path.name for path in (tmp_path / "home/hub").rglob("*") if path.is_file()}
    assert "tokenizer.json" in kept and not [name for name in kept if name.endswith((".safetensors", ".incomplete"))]


@pytest.fixture
def in_process(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """As if the environment of the server fixture had been set when huggingface_hub was imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return server


@pytest.mark.long
def test_a_download_may_take_longer_than_a_start_and_may_not_stand_still(
    cluster: Cluster, in_process: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    node = ray.get_runtime_context().get_node_id()
    config = pinned(Config(model=_NAME, start_timeout_s=2.0))
    told: list[tuple[str, float]] = []
    size = max(map(len, in_process.repos[_NAME].files.values()))
    in_process.faults = [Fault("GET /cdn", bytes_per_s=size / 4)]
    begin = time.monotonic()
    fetch_on([node, node], config, on_progress=lambda *now: told.append(now))
    assert time.monotonic() - begin > 2.0 and (tmp_path / "hub").exists()
    assert told[-1] == (f"downloading {size / 1e9:.1f} GB", 1.0) and len({share for _, share in told}) > 2

    shutil.rmtree(tmp_path / "hub")
    weights = hashlib.sha256(in_process.repos[_NAME].files["model.safetensors"]).hexdigest()
    in_process.faults = [Fault(f"GET /cdn/{weights}", stall_s=60)]
    with pytest.raises(ConfigError, match="has made no progress for 2 s \\(0 of .* bytes\\); check the network"):
        fetch_on([node], config, on_progress=lambda phase, share: None)
