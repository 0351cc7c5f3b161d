"""Models of the Hub: what is fetched and kept, and what is said when that fails; against a server of its protocol."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from launch.doctor.check import Outcome
from launch.doctor.command import examine
from raycache.checkpoint.hub import Hub
from raycache.checkpoint.hub_id import HubId
from raycache.checkpoint.hub_models import fetch, located, outlined, pinned
from raycache.checkpoint.tensor_files import INDEX, weights_fingerprint
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.errors import CheckpointError, ConfigError
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.hub_server import Fault, HubServer
from tests.oracle import tiny_tokenizers
from tests.oracle.quantised import nvfp4, write_quantised
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
    with pytest.raises(CheckpointError, match=r"lists pytorch_model\.bin, which is not one of its safetensors files"):
        got(hub)


def test_the_doctor_reads_headers_and_no_weights(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, hub)
    monkeypatch.setattr("raycache.checkpoint.hub_outline._FIRST_BYTES", 64)  # less than a header
    weights = sum(len(content) for name, content in server.repos[_NAME].files.items() if name.startswith("model-"))
    found = {one.check: one for one in examine({"model": _NAME, "device": "cpu", "port": "auto", "tp": 3})}
    assert "GB" not in found["download"].text and f"to download to {hub.cache_dir}" in found["download"].text
    assert f"{weights / 2**10:.1f} KiB in safetensors files" in found["weights"].text
    assert "of acme/tiny" in found["tensor split"].text and found["tensor split"].outcome is Outcome.FAILED
    assert not list(hub.cache_dir.rglob("*.safetensors")) and not list(tmp_path.glob("raycache-*"))
    assert sum(server.sent[path] for path in server.sent if "/cdn/" in path) < weights / 10

    got(hub)
    found = {one.check: one for one in examine({"model": _NAME, "device": "cpu", "port": "auto"})}
    assert found["download"].text.endswith(f"in {hub.cache_dir}")
    assert all(one.outcome is not Outcome.FAILED for one in found.values())


def test_a_shard_of_another_model_is_refused_before_it_is_fetched(
    hub: Hub, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(server.repos[_NAME].files["config.json"])
    server.repos[_NAME].files["config.json"] = json.dumps({**config, "hidden_size": 128, "head_dim": 16}).encode()
    with outlined(pinned(Config(model=_NAME), hub=hub), hub=hub) as here, pytest.raises(CheckpointError, match="shape"):
        check_model(here)
    assert not list(hub.cache_dir.rglob("*.safetensors"))


def test_headers_of_quantised_weights_suffice_where_scales_are_not_there_yet(
    hub: Hub, server: HubServer, tmp_path: Path
) -> None:
    source = make_tiny(tmp_path / "source", num_hidden_layers=2)
    write_quantised(source, tmp_path / "nvfp4", tmp_path / "plain", nvfp4(by="compressed-tensors"))
    server.add("acme/nvfp4", tmp_path / "nvfp4")
    with outlined(pinned(Config(model="acme/nvfp4"), hub=hub), hub=hub) as here:
        check_model(here)
    config = pinned(Config(model="acme/nvfp4"), hub=hub)
    fetch(config, hub=hub, on_progress=lambda done, total: None)
    check_model(located(config, hub=hub))


def test_a_download_that_is_stopped_leaves_whole_files_only(hub: Hub, server: HubServer) -> None:
    server.faults = [Fault("GET /cdn", bytes_per_s=400_000)]
    seen = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if done > total / 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(hub.find(HubId(_NAME)), has_weights=True, on_progress=interrupt)
    assert len(seen) > 1 and leftovers(hub) == []
    server.faults = []
    assert weights_fingerprint(got(hub))


def test_two_who_want_a_model_at_a_time_fetch_it_once(hub: Hub, server: HubServer) -> None:
    server.faults = [Fault("GET /cdn", bytes_per_s=1_000_000)]
    with ThreadPoolExecutor(2) as pool:
        folders = [each.result() for each in [pool.submit(got, hub), pool.submit(got, hub)]]
    assert folders[0] == folders[1] and weights_fingerprint(folders[0])
    assert len(server.asked("GET /cdn")) == len(set(server.asked("GET /cdn"))) == 6


def test_who_waits_for_another_process_sees_its_bytes_arrive(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycache.checkpoint.hub._LOOK_S", 0.01)
    repository = hub.find(HubId(_NAME))
    hub.fetch(repository, has_weights=False, on_progress=lambda done, total: None)
    home = hub.cache_dir / "models--acme--tiny"
    part = home / "blobs/x.incomplete"
    here = sum(path.stat().st_size for path in (home / "blobs").iterdir())
    with (home / ".raycache.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen = []

        def on_progress(done: int, total: int) -> None:
            seen.append(done)
            if len(seen) < 3:
                part.write_bytes(b"x" * 1000 * len(seen))
            elif len(seen) == 3:
                fcntl.flock(lock, fcntl.LOCK_UN)

        hub.fetch(repository, has_weights=True, on_progress=on_progress)
    assert seen[:3] == [here, here + 1000, here + 2000]


def test_nobody_waits_for_others_when_its_own_files_are_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycache.checkpoint.hub._LOOK_S", 0.01)
    repository = hub.find(HubId(_NAME))
    folder = hub.fetch(repository, has_weights=False, on_progress=lambda done, total: None)
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").unlink()
    looks = []

    def locked(number: int) -> bool:
        looks.append(number)
        if len(looks) == 2:
            (folder / "config.json").write_bytes(config)  # and the other process goes on with the weights
        return False

    monkeypatch.setattr("raycache.checkpoint.hub._is_locked", locked)
    assert hub.fetch(repository, has_weights=False, on_progress=lambda done, total: None) == folder
    assert len(looks) == 2


def test_what_killed_processes_left_is_removed(hub: Hub) -> None:
    blobs = hub.cache_dir / "models--acme--tiny/blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "a.1.incomplete", blobs / "b.2.incomplete"
    for path, age_s in ((old, 2 * 3600), (new, 60)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s,) * 2)
    got(hub)
    assert leftovers(hub) == [new], "which somebody may still write to"
