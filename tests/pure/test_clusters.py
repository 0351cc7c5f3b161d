"""The files for `ray up` and KubeRay are what these programs take, and agree with each other and with the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raycache.config import Config, parse_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {"local": "cluster.yaml", "aws": "launch/clusters/aws.yaml", "gcp": "launch/clusters/gcp.yaml"}


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / FILES[name]).read_text(encoding="utf-8"))
    return found


def start_commands(cluster: dict[str, Any]) -> tuple[str, str]:
    return cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]


@pytest.mark.parametrize("name", FILES)
def test_ray_up_accepts_it(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    cluster = prepare_config(load(name))
    validate_config(cluster)
    assert cluster["provider"]["type"] == name
    for node_type in cluster["available_node_types"].values():
        # The newer autoscaler asserts it, at start on the head, where nobody looks.
        assert node_type.get("min_workers", 0) <= node_type["max_workers"]


@pytest.mark.parametrize("name", FILES)
def test_the_token_is_wanted_and_there_and_the_dashboard_on_loopback(name: str) -> None:
    cluster = load(name)
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for command in start_commands(cluster):
        assert command.startswith("export RAY_AUTH_MODE=token")
    head, _ = start_commands(cluster)
    assert "--dashboard-host=127.0.0.1" in head and "--autoscaling-config=~/ray_bootstrap_config.yaml" in head


@pytest.mark.parametrize("name", FILES)
def test_the_options_of_ray_start_exist(name: str) -> None:
    from ray.scripts.scripts import start

    known = {option for parameter in start.params for option in parameter.opts}
    for command in start_commands(load(name)):
        assert " ray start " in command
        assert set(re.findall(r"(--[a-z-]+)", command)) <= known


@pytest.mark.parametrize("name", FILES)
def test_the_gpu_extra_is_installed_from_the_wheel_that_was_sent(name: str) -> None:
    cluster = load(name)
    assert cluster["file_mounts"]["~/raycache-dist"] == "dist"
    commands = " ".join(cluster["setup_commands"])
    assert "raycache-dist/raycache-*.whl" in commands and "[gpu," in commands


def test_the_head_of_machines_of_ones_own_starts_as_many_workers_as_there_are() -> None:
    # With its newer autoscaler Ray 2.60 counts the head among them, and the last machine never joins.
    head, _ = start_commands(load("local"))
    assert "RAY_enable_autoscaler_v2=0" in head


# --- KubeRay ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kube() -> dict[str, Any]:
    text = (ROOT / "launch/clusters/kuberay.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods(kube: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = kube["RayService"]["spec"]["rayClusterConfig"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_settings_of_kubernetes_are_settings(kube: dict[str, Any]) -> None:
    config = Config.from_mapping({**yaml.safe_load(kube["ConfigMap"]["data"]["raycache.yaml"]), "ingress": "serve"})
    groups = kube["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    gpus = sum(
        group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
        for group in groups
        for container in group["template"]["spec"]["containers"]
    )
    assert config.world_size == gpus


def test_what_serve_loads_is_there_and_every_file_is_mounted(kube: dict[str, Any]) -> None:
    [application] = yaml.safe_load(kube["RayService"]["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    assert f"def {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    settings = yaml.safe_load(kube["ConfigMap"]["data"]["raycache.yaml"])
    paths = [application["args"]["config"], settings["model"], settings["api_keys"]]
    for pod in pods(kube):
        mounts = [mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]]
        assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes


def test_shared_memory_holds_the_host_tier_and_ray(kube: dict[str, Any]) -> None:
    settings = yaml.safe_load(kube["ConfigMap"]["data"]["raycache.yaml"])
    [group] = kube["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    spec = group["template"]["spec"]
    [shm] = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    room = parse_bytes("shm", f"{shm['emptyDir']['sizeLimit']}B")
    needed = parse_bytes("host_memory", settings["host_memory"]) + int(group["rayStartParams"]["object-store-memory"])
    limit = parse_bytes("memory", f"{spec['containers'][0]['resources']['limits']['memory']}B")
    assert needed < room < limit


def test_pods_can_do_no_more_than_they_need(kube: dict[str, Any]) -> None:
    for pod in pods(kube):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "livenessProbe" in container and "memory" in container["resources"]["limits"]
    assert kube["RayService"]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert kube["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]


def test_versions_of_the_image_are_those_of_the_package(kube: dict[str, Any]) -> None:
    import ray

    import raycache

    assert kube["RayService"]["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    for pod in pods(kube):
        assert pod["containers"][0]["image"].endswith(f":{raycache.__version__}")
