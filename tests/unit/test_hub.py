"""Models of the Hub: what is fetched and kept, and what is said when that fails; against a server of its protocol."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from raycache.checkpoint.hub import Hub
from raycache.checkpoint.hub_id import HubId
from raycache.checkpoint.hub_models import fetch, located, pinned
from raycache.config import Config
from raycache.errors import CheckpointError, ConfigError
from raycache.llm import LLM
from raycache.models.checkpoint import INDEX, weights_fingerprint
from raycache.types import SamplingParams
from tests.hub_server import Fault, HubServer
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny

_NAME = "acme/tiny"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as vendors publish it: with much beside what is read."""
    folder = make_tiny(tmp_path_factory.mktemp("published") / "tiny", max_shard_size="200KB")
    tiny_tokenizers.byte_level(folder)
    for name in ("pytorch_model.bin", "model.gguf", "modeling_tiny.py", "README.md", "original/consolidated.00.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not to be fetched")
    for name in ("consolidated.safetensors", "original/model.safetensors"):
        shutil.copy(next(folder.glob("model-*.safetensors")), folder / name)
    return folder


@pytest.fixture
def server(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer() as hub:
        hub.add(_NAME, published)
        yield hub


@pytest.fixture
def hub(server: HubServer, tmp_path: Path) -> Hub:
    return Hub(endpoint=server.url, cache_dir=tmp_path / "hub", token=False, pause_s=0.01)


def got(hub: Hub, name: str = _NAME) -> Path:
    """The directory of a model that is fetched."""
    return hub.fetch(hub.find(HubId(name)), has_weights=True, on_progress=lambda done, total: None)


def set_environment(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """As if HF_ENDPOINT and HF_HUB_CACHE had been set when huggingface_hub was imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache_dir))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def leftovers(hub: Hub) -> list[Path]:
    return list(hub.cache_dir.rglob("*.incomplete"))


def test_only_files_that_are_read_are_fetched(hub: Hub, published: Path) -> None:
    shards = {path.name for path in published.glob("model-*.safetensors")}
    assert len(shards) > 2
    described = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX}
    folder = got(hub)
    assert files(folder) == shards | described
    assert all((folder / name).read_bytes() == (published / name).read_bytes() for name in shards | described)


def test_what_is_in_the_cache_is_not_fetched_again(hub: Hub, server: HubServer) -> None:
    got(hub)
    server.seen.clear()
    got(hub)
    assert server.asked("resolve|cdn") == []


def test_a_file_of_another_size_is_fetched_again(hub: Hub, published: Path) -> None:
    folder = got(hub)
    shard = next(folder.glob("model-*.safetensors"))
    shard.resolve().write_bytes(b"cut short")
    got(hub)
    assert shard.read_bytes() == (published / shard.name).read_bytes()


def test_the_cache_knows_the_same_weights_by_directory_and_by_name(hub: Hub, published: Path, tmp_path: Path) -> None:
    read = ("config.json", INDEX, *(path.name for path in published.glob("model-*.safetensors")))
    directory = tmp_path / "copied by hand"
    directory.mkdir()
    for name in read:
        shutil.copy(published / name, directory)
    assert weights_fingerprint(got(hub)) == weights_fingerprint(directory) == weights_fingerprint(published)


def test_a_name_is_pinned_to_a_commit_and_served_under_the_name(hub: Hub, server: HubServer) -> None:
    config = pinned(Config(model=_NAME), hub=hub)
    commit = server.repos[_NAME].commit
    assert config.model == f"{_NAME}@{commit}" and config.model_name == _NAME
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    here = located(config, hub=hub)
    assert here.model == str(hub.cache_dir / "models--acme--tiny/snapshots" / commit) and here.model_name == _NAME


def test_outputs_are_those_of_the_directory(
    hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, hub)
    said = []
    for name in (str(published), _NAME):
        with LLM(name, device="cpu", num_pages=8, draft=name, draft_tokens=2) as llm:
            said.append([one.token_ids for one in llm.generate(["hello"], SamplingParams(max_tokens=8, temperature=0))])
            assert llm.info.model == ("tiny" if name == str(published) else _NAME)
    assert said[0] == said[1] and len(said[0][0]) == 8
    assert "downloading" not in capsys.readouterr().err, "not a terminal"


def test_a_cut_connection_is_resumed(
    hub: Hub, server: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is resumed is a number of these
    shard = max(published.glob("model-*.safetensors"), key=lambda path: path.stat().st_size)
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    server.faults = [Fault(f"GET /cdn/{digest}", times=1, cut=70_000)]
    folder = got(hub)
    assert (folder / shard.name).read_bytes() == shard.read_bytes()
    assert [asked for request, asked in server.seen if digest in request] == ["", "bytes=70000-"]


def test_another_content_of_the_same_size_is_noticed(hub: Hub, server: HubServer) -> None:
    server.faults = [Fault("GET /cdn", times=1, change=True)]
    folder = got(hub)
    assert weights_fingerprint(folder)
    server.faults = [Fault("GET /cdn", change=True)]
    shutil.rmtree(hub.cache_dir)
    with pytest.raises(CheckpointError, match="tokenizer.json of acme/tiny .*another content than the Hub says"):
        got(hub)
    assert leftovers(hub) == [] and not (folder / "tokenizer.json").exists()


def test_a_directory_wins_over_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / _NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert pinned(Config(model=_NAME), hub=hub).model == _NAME


def test_a_revision_goes_with_a_name_only(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision=v1 goes with a model of the Hub, .* is not a model of the Hub"):
        pinned(Config(model=str(tmp_path), revision="v1"), hub=hub)
    with pytest.raises(ConfigError, match="revision=v1 .* has one in its name"):
        pinned(Config(model=f"{_NAME}@v2", revision="v1"), hub=hub)


def test_an_index_that_names_other_kinds_of_files_is_refused(hub: Hub, server: HubServer) -> None:
    index = {"weight_map": {"a": "pytorch_model.bin"}}
    server.repos[_NAME].files[INDEX] = json.dumps(index).encode()
    with pytest.raises(CheckpointError, match=r"names pytorch_model\.bin, which is no safetensors file"):
        got(hub)
