"""What a user is told, in one line, when a model of the Hub cannot be had; and that nothing is left of the attempt."""

from __future__ import annotations

import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from raycache.checkpoint.hub import Hub
from raycache.checkpoint.hub_id import HubId
from raycache.checkpoint.hub_models import fetch, pinned
from raycache.config import Config
from raycache.errors import CheckpointError
from tests.hub_server import Fault, HubServer, Repo
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny

_NAME = "acme/tiny"
_RIGHT, _WRONG = "hf_right", "hf_wrong"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.byte_level(make_tiny(tmp_path_factory.mktemp("published") / "tiny", max_shard_size="200KB"))


@pytest.fixture
def server(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer(tokens=(_RIGHT, _WRONG)) as hub:
        hub.add(_NAME, published)
        yield hub


def hub_of(server: HubServer, folder: Path, token: str | bool = False) -> Hub:
    return Hub(endpoint=server.url, cache_dir=folder / "hub", token=token, pause_s=0.01)


def refusal(hub: Hub, name: str = _NAME) -> str:
    """What is said of a model that cannot be had."""
    with pytest.raises(CheckpointError) as refused:
        fetch(pinned(Config(model=name), hub=hub), hub=hub, on_progress=lambda done, total: None)
    text = str(refused.value)
    assert ("\n" not in text and name.split("@")[0] in text) or "token" in text
    left = [path for path in hub.cache_dir.rglob("*.incomplete") if path.is_file()] if hub.cache_dir.exists() else []
    assert left == []
    return text


def test_an_unknown_model_is_said_to_be_neither_directory_nor_model(server: HubServer, tmp_path: Path) -> None:
    text = refusal(hub_of(server, tmp_path), "acme/typo")
    assert text == (
        f"model 'acme/typo' is neither a directory here nor a model on {server.url} that can be read without a token; "
        "check the name, and for a private model run `hf auth login` or set HF_TOKEN"
    )
    assert "that the token which is set may read" in refusal(hub_of(server, tmp_path, _RIGHT), "acme/typo")
    assert not (tmp_path / "hub").exists()


def test_a_private_model_asks_for_a_token(server: HubServer, tmp_path: Path) -> None:
    server.repos[_NAME].tokens = (_RIGHT,)
    assert "for a private model run `hf auth login` or set HF_TOKEN" in refusal(hub_of(server, tmp_path))
    assert "use a token that may" in refusal(hub_of(server, tmp_path, _WRONG))
    hub = hub_of(server, tmp_path, _RIGHT)
    fetch(pinned(Config(model=_NAME), hub=hub), hub=hub, on_progress=lambda done, total: None)


def test_a_gated_model_says_where_to_ask_for_access(server: HubServer, tmp_path: Path) -> None:
    server.repos[_NAME].tokens, server.repos[_NAME].is_gated = (_RIGHT,), True
    where = f"model 'acme/tiny' is gated: accept its conditions at {server.url}/acme/tiny"
    assert refusal(hub_of(server, tmp_path)) == f"{where}; then run `hf auth login` or set HF_TOKEN"
    assert refusal(hub_of(server, tmp_path, _WRONG)) == f"{where}; your token does not have access yet"
    hub = hub_of(server, tmp_path, _RIGHT)
    fetch(pinned(Config(model=_NAME), hub=hub), hub=hub, on_progress=lambda done, total: None)


def test_a_token_that_is_not_valid_is_named(server: HubServer, tmp_path: Path) -> None:
    assert f"{server.url} does not take the token that is set" in refusal(hub_of(server, tmp_path, "hf_expired"))


def test_an_unknown_revision_is_named(server: HubServer, tmp_path: Path) -> None:
    text = refusal(hub_of(server, tmp_path), f"{_NAME}@v9")
    assert text == f"model 'acme/tiny' has no revision 'v9'; use a branch, tag or commit of {server.url}/acme/tiny"


def test_offline_says_what_is_missing(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = hub_of(server, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "neither a directory nor in the cache, and HF_HUB_OFFLINE is set" in refusal(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    config = pinned(Config(model=_NAME), hub=hub)
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    shards = sorted(hub.cache_dir.rglob("model-*.safetensors"))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pinned(Config(model=_NAME), hub=hub) == config
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    shards[0].unlink()
    text = refusal(hub)
    assert f"lacks 1 files of acme/tiny, and HF_HUB_OFFLINE is set: {shards[0].name}" in text


def test_what_is_cached_is_served_while_the_hub_is_away(
    server: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = hub_of(server, tmp_path)
    config = pinned(Config(model=_NAME), hub=hub)
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    server.faults = [Fault("api/models", status=503)]
    assert pinned(Config(model=_NAME), hub=hub) == config
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    assert [f"{server.url} does not answer; using {config.model} of the cache"] == [
        record.getMessage() for record in caplog.records if record.name.startswith("raycache")
    ]


def test_an_endpoint_that_nobody_answers_is_named(server: HubServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    text = refusal(Hub(endpoint=url, cache_dir=tmp_path / "hub", token=False))
    assert f"{url} cannot be reached (ConnectError" in text and "HF_ENDPOINT" in text
    text = refusal(Hub(endpoint="mirror.example", cache_dir=tmp_path / "hub", token=False))
    assert "mirror.example cannot be reached" in text


def test_a_server_that_is_no_hub_is_named_as_such(server: HubServer, tmp_path: Path) -> None:
    server.faults = [Fault("api/models", status=200, body=b"<html>login</html>")]
    assert f"{server.url} did not answer like a Hugging Face Hub" in refusal(hub_of(server, tmp_path))
    server.faults = [Fault("api/models", status=200, body=b"{}")]
    assert f"{server.url} did not answer like a Hugging Face Hub" in refusal(hub_of(server, tmp_path))
    server.faults = [Fault("api/models", status=404)]
    assert f"{server.url} answers 404" in refusal(hub_of(server, tmp_path))


def test_a_busy_hub_is_asked_again(server: HubServer, tmp_path: Path) -> None:
    server.faults = [Fault("api/models", times=2, status=429)]
    hub = hub_of(server, tmp_path)
    fetch(pinned(Config(model=_NAME), hub=hub), hub=hub, on_progress=lambda done, total: None)
    server.faults = [Fault("api/models", status=503)]
    assert "answers 503 for model 'acme/other', which is not in the cache" in refusal(hub, "acme/other")


def test_a_download_that_fails_again_and_again_is_named(server: HubServer, tmp_path: Path) -> None:
    server.faults = [Fault("GET /cdn", times=2, status=503)]
    hub = hub_of(server, tmp_path)
    fetch(pinned(Config(model=_NAME), hub=hub), hub=hub, on_progress=lambda done, total: None)
    server.faults = [Fault("GET /cdn", status=503)]
    text = refusal(hub_of(server, tmp_path / "other"))
    assert "tokenizer.json of acme/tiny could not be downloaded (HfHubHTTPError" in text and "503" in text


def test_a_file_that_is_shorter_than_the_hub_says_is_noticed(server: HubServer, tmp_path: Path) -> None:
    repo = server.repos[_NAME]
    whole = next(name for name in repo.files if name.startswith("model-"))
    hub = hub_of(server, tmp_path)
    config = pinned(Config(model=_NAME), hub=hub)
    repository = hub.find(HubId.parse(config.model))
    repo.files[whole] = repo.files[whole][:-100]  # the listing is that of before
    with pytest.raises(CheckpointError, match=f"{whole} of acme/tiny could not be downloaded .*another size"):
        hub.fetch(repository, has_weights=True, on_progress=lambda done, total: None)
    assert not list(hub.cache_dir.rglob(whole)) and not list(hub.cache_dir.rglob("*.incomplete"))


def test_a_model_without_safetensors_says_what_it_has(server: HubServer, tmp_path: Path) -> None:
    server.repos["acme/old"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert refusal(hub_of(server, tmp_path), "acme/old") == (
        "acme/old has only pickled PyTorch weights (*.bin), which are not read; convert them to model.safetensors"
    )
    server.repos["acme/empty"] = Repo({"config.json": b"{}"})
    assert "acme/empty has no weights" in refusal(hub_of(server, tmp_path), "acme/empty")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB, which takes the first shards; without the right to mount one, files end at 100 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, before[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_too_small_is_refused_before_weights_are_fetched(server: HubServer, tmp_path: Path) -> None:
    shards = [name for name in server.repos[_NAME].files if name.startswith("model-")]
    server.repos[_NAME].sizes = dict.fromkeys(shards, 10**18)
    text = refusal(hub_of(server, tmp_path))
    assert f"acme/tiny needs {len(shards) * 10**9:.1f} GB more in {tmp_path / 'hub'}" in text and "HF_HOME" in text
    assert len(server.asked("GET /cdn")) == 1, "the tokenizer"


def test_a_disk_that_runs_full_is_named(server: HubServer, small_disk: Path) -> None:
    files = server.repos[_NAME].files
    server.repos[_NAME].sizes = dict.fromkeys(files, None)  # or it would be refused before
    hub = hub_of(server, small_disk)
    text = refusal(hub)
    assert f"of acme/tiny does not fit into {small_disk / 'hub'}; free some space, or set HF_HOME" in text
    kept = [path for path in hub.cache_dir.rglob("snapshots/*/*") if path.is_file()]
    assert kept and all(path.read_bytes() == files[path.name] for path in kept), "whole files are kept"


def test_xet_out_of_reach_says_how_to_do_without_it(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")  # else it tries for minutes
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_DURATION", "1s")
    server.repos[_NAME].xet = "http://127.0.0.1:1"
    assert "set HF_HUB_DISABLE_XET=1 to download" in refusal(hub_of(server, tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub = hub_of(server, tmp_path)
    fetch(pinned(Config(model=_NAME), hub=hub), hub=hub, on_progress=lambda done, total: None)
