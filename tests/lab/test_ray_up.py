"""The whole path over some hosts with a real sshd: ray up, launch in three ways, requests, ray down.

The hosts are namespaces on this machine (hosts.py), cluster.yaml is that of the repository with addresses filled in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.conftest import Phase
from tests.lab.hosts import Lab, lab_of, missing
from tests.lab.ray_cluster import ENVIRONMENT, RayCluster
from tests.lab.service import PAGE, PROMPT, WHOLE, ask, greedy, launched, tiny_model

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]
_COUNT = 12
_READY_S = 600.0
_FLAGS = f"--device cpu --page-size {PAGE} --num-pages 64"


@pytest.fixture(scope="module")
def lab(phase: Phase, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A head and two workers for the long tests; what is tried with every change needs one worker."""
    has_long = any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)
    with lab_of(3 if has_long else 2, **ENVIRONMENT) as lab:
        yield lab


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    return tiny_model(lab)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return greedy(model, PROMPT, _COUNT)


@pytest.fixture(scope="module")
def cluster(lab: Lab, phase: Phase) -> RayCluster:
    with phase("wheel"):
        cluster = RayCluster(lab)
    with phase("ray up"):
        cluster.up()
    with phase("all hosts joined"):
        cluster.await_nodes()
    return cluster


def test_hosts_have_the_package_and_refuse_who_has_no_token(lab: Lab, cluster: RayCluster) -> None:
    for number in range(len(lab.hosts)):
        said = lab.on(number, "command -v raycache; raycache version")
        assert "/raycache/bin/raycache" in said and "raycache 0." in said
    with pytest.raises(RuntimeError, match="token"):
        lab.on(1, f"RAY_AUTH_MODE=disabled ray status --address {lab.address(0)}:6379")


def test_ranks_on_two_hosts_answer_an_openai_client(
    lab: Lab, cluster: RayCluster, model: Path, expected: list[int], phase: Phase
) -> None:
    first = len(lab.hosts) - 2
    placement = f"0@{lab.address(first)};1@{lab.address(first + 1)}"
    command = f"exec raycache launch {model} --address auto --cp 2 --placement '{placement}' {_FLAGS}"
    with launched(lab.ssh_command(0, command, is_terminal=True), log=lab.folder / "launch.log") as service:
        with phase("launch on the head"):
            service.await_line("endpoint", within_s=_READY_S)
        with cluster.forwarded(8000), phase("two requests"):
            assert ask(lab, "http://127.0.0.1:8000/v1", PROMPT, _COUNT) == (expected, {})
            assert ask(lab, "http://127.0.0.1:8000/v1", PROMPT, _COUNT) == (expected, {"device": WHOLE})
        for row in service.said.splitlines():
            if row.startswith(("0 ", "1 ")):
                assert lab.address(first + int(row[0])) in row
        with phase("ray exec raycache status"):
            [row] = [line for line in cluster.execute("raycache status").splitlines() if line.startswith("http://")]
        assert row.split()[1:2] + row.split()[3:4] == ["tiny", "2"] and row.split()[-1] == "ok"
        with phase("raycache stop"):
            assert "stopped" in cluster.execute("raycache stop")
        assert service.end() == 0


@pytest.mark.long
def test_ray_job_submit_serves_a_model(
    lab: Lab, cluster: RayCluster, model: Path, expected: list[int], phase: Phase
) -> None:
    entry = f"raycache launch {model} --address auto --port 8001 {_FLAGS}".split()
    dashboard = ["--address", "http://127.0.0.1:8265"]
    with cluster.forwarded(8265):
        with phase("ray job submit"):
            job = ["--submission-id", "by-ray", "--", *entry]
            command = lab.control.command(["ray", "job", "submit", *dashboard, *job], RAY_AUTH_MODE="token")
            with launched(command, log=lab.folder / "submit.log") as submitted:
                submitted.await_line("endpoint", within_s=_READY_S)
        with cluster.forwarded(8001):
            assert ask(lab, "http://127.0.0.1:8001/v1", PROMPT, _COUNT)[0] == expected
        with phase("ray job stop"):
            said = lab.run(["ray", "job", "stop", *dashboard, "by-ray"], timeout_s=120, RAY_AUTH_MODE="token")
    assert "stopped" in said


@pytest.mark.long
def test_a_laptop_launches_on_the_cluster_and_stops_it(
    lab: Lab, cluster: RayCluster, model: Path, expected: list[int], phase: Phase
) -> None:
    address = ["--address", "http://127.0.0.1:8265"]
    launch = ["raycache", "launch", str(model), *address, "--cp", "2", "--port", "8002", *_FLAGS.split()]
    command = lab.control.command(launch, RAY_AUTH_MODE="token")
    with cluster.forwarded(8265), launched(command, log=lab.folder / "remote.log") as service:
        with phase("launch from a laptop"):
            tunnel = service.await_line("tunnel", within_s=_READY_S)
        assert tunnel.endswith(f"ssh -N -L 8002:127.0.0.1:8002 {lab.address(0)}")
        with cluster.forwarded(8002):
            assert ask(lab, "http://127.0.0.1:8002/v1", PROMPT, _COUNT)[0] == expected
        with phase("Ctrl-C on the laptop"):
            assert service.interrupt() == 0
        assert "is stopped" in service.said
    assert "raycache launch" not in lab.on(0, "ps -ef | grep '[r]aycache launch' || true")


@pytest.mark.long
def test_every_host_with_ranks_fetches_its_own_copy_of_a_model_of_the_hub(
    lab: Lab, cluster: RayCluster, model: Path, expected: list[int], phase: Phase
) -> None:
    shutil.copytree(model, lab.folder / "shared/hub/acme/tiny")
    serve = ["python", "-m", "tests.hub_server", str(lab.folder / "shared/hub"), "--host", "0.0.0.0", "--port", "8080"]
    variables = {"HF_ENDPOINT": f"http://{lab.address(0)}:8080", "HF_HUB_OFFLINE": "0"}
    kept = "ls ~/.cache/huggingface/hub/models--acme--tiny/snapshots/*"
    with launched(lab.hosts[0].command(serve), log=lab.folder / "hub.log") as hub:
        hub.await_line("http://", within_s=60)
        shell = " ".join(f"{name}={value}" for name, value in variables.items())
        doctor = f"{shell} raycache doctor acme/tiny --address auto --device cpu --port auto"
        said = lab.on(0, doctor, timeout_s=_READY_S)
        nodes = [line for line in said.splitlines() if line.startswith("node ")]
        assert len(nodes) == 3 and all("to download to" in line for line in nodes), said
        placement = f"0@{lab.address(1)};1@{lab.address(2)}"
        command = f"{shell} exec raycache launch acme/tiny --address auto --port 8003 --cp 2 --placement '{placement}'"
        ssh = lab.ssh_command(0, f"{command} {_FLAGS}", is_terminal=True)
        with launched(ssh, log=lab.folder / "from_hub.log") as service:
            with phase("launch of a model of the Hub"):
                service.await_line("endpoint", within_s=_READY_S)
            assert re.search(r"^model +acme/tiny ", service.said, re.MULTILINE)
            with cluster.forwarded(8003):
                assert ask(lab, "http://127.0.0.1:8003/v1", PROMPT, _COUNT)[0] == expected
            cluster.execute("raycache stop")
            assert service.end() == 0
        files = [set(lab.on(number, kept).split()) for number in range(3)]
        assert files[1] == files[2] == files[0] | {"model.safetensors"} != files[0], "the head has no ranks"

        address = ["--address", "http://127.0.0.1:8265"]
        launch = ["raycache", "launch", "acme/tiny", *address, "--port", "8004", *_FLAGS.split()]
        job = lab.control.command(launch, RAY_AUTH_MODE="token", **variables)
        with cluster.forwarded(8265), launched(job, log=lab.folder / "from_hub_remote.log") as service:
            with phase("launch of a model of the Hub from a laptop"):
                service.await_line("reached", within_s=_READY_S)
            with cluster.forwarded(8004):
                assert ask(lab, "http://127.0.0.1:8004/v1", PROMPT, _COUNT)[0] == expected
            assert service.interrupt() == 0


@pytest.mark.long
def test_a_laptop_hears_why_it_cannot_launch(lab: Lab, cluster: RayCluster, model: Path) -> None:
    def refusal(*words: str, **environment: str) -> str:
        with pytest.raises(RuntimeError) as caught:
            lab.run(["raycache", "launch", *words], timeout_s=120, **environment)
        return str(caught.value)

    dashboard = "http://127.0.0.1:8265"
    with cluster.forwarded(8265):
        assert "requires a token" in refusal(str(model), "--address", dashboard, RAY_AUTH_MODE="disabled")
        assert "'/no/such' is neither a directory" in refusal("/no/such", "--address", dashboard, RAY_AUTH_MODE="token")
        assert "is relative" in refusal("here", "--address", dashboard)
    assert "nothing listens at" in refusal(str(model), "--address", "http://127.0.0.1:9")


def test_ray_down_ends_ray_on_all_hosts(lab: Lab, cluster: RayCluster, phase: Phase) -> None:
    with phase("ray down"):
        cluster.down()
    deadline = time.monotonic() + 120
    for number in range(len(lab.hosts)):
        while left := lab.on(number, "ps -eo args | grep -E '[r]aylet|[g]cs_server|[r]aycache launch' || true"):
            assert time.monotonic() < deadline, f"host {number} still runs {left}"
            time.sleep(2)


def test_nothing_of_a_lab_stays() -> None:
    lab = Lab.start(1)
    interfaces = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "lab0" not in interfaces
    pids = [lab.control.pid, *(host.pid for host in lab.hosts)]
    lab.down()
    assert not lab.folder.exists() and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
