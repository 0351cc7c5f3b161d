"""What goes wrong around a service: each mistake gets one message, each accident leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray.util import placement_group_table

from actors.cluster import Cluster
from actors.placement import reserve
from launch.cli.main import main
from raycache.config import Config
from raycache.errors import ConfigError
from tests.actors.launched import endpoint_of, is_gone, start, traces


def is_true_within(seconds: float, claim: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.2)
    return claim()


# --- refused before Ray starts


def half_downloaded(model: Path) -> None:
    os.truncate(model / "model.safetensors", 1000)


def unknown_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))


def broken_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% if")


@pytest.mark.parametrize(
    ("damage", "flags", "said"),
    [
        (half_downloaded, [], "download is incomplete"),
        (unknown_kind, [], "known are bailing_hybrid, bailing_moe_v2_5"),
        (broken_template, [], "chat template"),
        (lambda model: (model / "tokenizer.json").unlink(), [], "has no tokenizer"),
        (shutil.rmtree, [], "is neither a directory nor a name on the Hub"),
        (lambda model: None, ["--tp", "3"], "use one of [1, 2, 4, 8]"),
        (lambda model: None, ["--tp", "64"], "use one of [1, 2, 4, 8]"),
        (lambda model: None, ["--cp", "3"], "cp=3 does not divide page_size=64"),
        (lambda model: None, ["--max-queue", "-1"], "max_queue must be a whole number above 0"),
        (lambda model: None, ["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
    ],
)
def test_a_mistake_is_refused_while_ray_starts(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
    flags: list[str],
    said: str,
) -> None:
    # It is for a process that starts its own Ray; here it would keep the nodes of later tests from their cluster.
    monkeypatch.setattr("launch.cli.main.keep_ray_on_loopback", lambda: None)
    # Ray's own start takes seconds, too, and would leave processes to this one.
    monkeypatch.setattr("launch.cli.cluster.connect", lambda *_, **__: time.sleep(300))
    copy = shutil.copytree(model, tmp_path / "copy")
    damage(copy)
    assert main(["launch", str(copy), "--port", "auto", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("raycache: error:") == 1
    assert "starting Ray" not in error and "Traceback" not in error


# --- refused by what the cluster is and has


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "cuda"}, "needs 1 GPUs, the cluster has 0; use --device cpu"),
        ({"device": "cpu", "cp": 64, "tp": 8}, "is too much for"),
    ],
)
def test_a_cluster_that_is_too_small_is_told_at_once(cluster: Cluster, settings: dict[str, object], said: str) -> None:
    config = Config.from_mapping(settings)
    with pytest.raises(ConfigError, match=said):
        reserve(config, device=config.device, on_wait=lambda missing: None)


@pytest.mark.long
def test_a_cluster_of_another_version_is_refused(cluster: Cluster, model: Path, scratch: Path) -> None:
    from ray._common.usage import usage_constants
    from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
    from ray.experimental import internal_kv

    key = {"key": usage_constants.CLUSTER_METADATA_KEY, "namespace": KV_NAMESPACE_CLUSTER}
    true = internal_kv._internal_kv_get(**key)
    internal_kv._internal_kv_put(value=true.replace(ray.__version__.encode(), b"1.2.3"), overwrite=True, **key)
    try:
        process = start(model, scratch, "--address", cluster.address)
        output, _ = process.communicate(timeout=60)
    finally:
        internal_kv._internal_kv_put(value=true, overwrite=True, **key)
    assert process.returncode == 2
    assert "1.2.3" in output and f"this Ray {ray.__version__}" in output and "Traceback" not in output


# --- accidents


@pytest.mark.long
def test_a_service_leaves_a_cluster_that_it_found_as_it_was(cluster: Cluster, model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--address", cluster.address, "--num-pages", "32")
    endpoint_of(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # an impatient second one changes nothing
    assert process.wait(100) == 0
    assert is_true_within(60, lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.long
def test_a_service_whose_engine_is_killed_goes_on_and_leaves_nothing(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--num-pages", "32", "--host-memory", "32MiB", "--no-dashboard")
    try:
        endpoint = endpoint_of(process)
        launched = psutil.Process(process.pid)
        before = launched.children(recursive=True)
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{endpoint}/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            next(child for child in before if "EngineActor" in child.name()).kill()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and not any("error" in line for line in rest)
        everybody = [launched, *before, *launched.children(recursive=True)]
        assert traces(scratch, everybody), "the host tier's directory"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert "the engine actor died" in output and "starting another one for 1 open requests" in output
        assert is_gone(everybody[1:], within_s=30)
        assert traces(scratch, everybody) == set()
    finally:
        process.kill()


@pytest.mark.long
def test_a_killed_service_leaves_no_rank_and_no_files(model: Path, scratch: Path) -> None:
    process = start(model, scratch, "--num-pages", "32", "--host-memory", "32MiB", "--no-dashboard")
    try:
        endpoint_of(process)
        launched = psutil.Process(process.pid)
        children = launched.children(recursive=True)
        working = [child for child in children if "Agent" not in child.name()]
        assert traces(scratch, children) and traces(scratch, [launched])
    finally:
        process.kill()
    process.wait()
    # Ray's two agents of a node notice its end late, all others at once.
    assert is_gone(working, within_s=60)
    assert is_true_within(100, lambda: not traces(scratch, [launched, *children]))
