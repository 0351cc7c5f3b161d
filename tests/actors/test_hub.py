"""`raycache launch ORG/NAME`: the model comes from a Hub, whose part a server here plays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.actors.launched import endpoint_of, is_gone, start, traces
from tests.hub_server import HubServer

_NAME = "acme/tiny"


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add(_NAME, model)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub


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
            assert process.wait(30) == 0
            assert is_gone(children, within_s=10) and traces(scratch, children) == set()
        finally:
            process.kill()
    assert [served for served, _ in said] == [_NAME, "tiny"]
    assert said[0][1] == said[1][1]
    fetched = [request for request, part in server.seen if "GET /cdn" in request and not part]
    assert len(fetched) == 2, "weights and tokenizer, once for all ranks"
