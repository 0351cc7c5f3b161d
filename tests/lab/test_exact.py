"""A gang over four hosts answers as transformers does: cold, and out of every tier of the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.conftest import Phase
from tests.lab.hosts import Lab, lab_of, missing
from tests.lab.service import PAGE, PROMPT, WHOLE, ask, greedy, launched, tiny_model
from tests.lab.started import StartedRay, environment

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]
_COUNT = 12
_READY_S = 600.0
_HOSTS = 4


@pytest.fixture(scope="module")
def lab(phase: Phase) -> Iterator[Lab]:
    with lab_of(_HOSTS, **environment(RAYCACHE_API_KEY="lab")) as lab:
        with phase("ray on four hosts"):
            StartedRay(lab, num_cpus=2, head_cpus=2).start()
        yield lab


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    return tiny_model(lab)


@pytest.mark.parametrize("split", ["--tp 2 --pp 2 --cp 2", "--tp 2 --cp 4"])
@pytest.mark.long
def test_every_tier_gives_the_tokens_of_transformers(lab: Lab, model: Path, phase: Phase, split: str) -> None:
    expected = greedy(model, PROMPT, _COUNT)
    endpoint = f"http://{lab.address(0)}:8000"
    with launched(_launch(lab, model, split), log=lab.folder / "launch.log") as service:
        with phase(f"launch {split}"):
            service.await_line("endpoint", within_s=_READY_S)
        rows = [line.split() for line in service.said.splitlines() if "pp=" in line]
        assert [row[4] for row in rows] == [lab.address(rank // 2) for rank in range(8)]
        found = []
        with phase("cold, device, host, storage"):
            for tiers in ((), (), ("device",), ("device", "host")):
                if tiers:
                    words = [word for tier in tiers for word in ("--tier", tier)]
                    lab.run(["raycache", "cache", "clear", *words, "--endpoint", endpoint])
                found.append(ask(lab, f"{endpoint}/v1", PROMPT, _COUNT))
        assert [tokens for tokens, _ in found] == [expected] * 4, service.said
        assert [cached for _, cached in found] == [{}, {"device": WHOLE}, {"host": WHOLE}, {"storage": WHOLE}]
        with phase("stop"):
            assert "stopped" in lab.on(0, "raycache stop", timeout_s=120)
            assert service.end() == 0
    deadline = time.monotonic() + 60
    for number in range(_HOSTS):
        while "raycache" in (left := lab.on(number, "ls /dev/shm")):
            assert time.monotonic() < deadline, f"host {number} has shared memory left: {left}"
            time.sleep(1)


def _launch(lab: Lab, model: Path, split: str) -> list[str]:
    folder = "".join(word for word in split if word.isalnum())  # what another split has stored would be found, too
    placement = ";".join(f"{2 * number}-{2 * number + 1}@{lab.address(number)}" for number in range(_HOSTS))
    flags = [
        f"--address auto {split} --placement '{placement}' --device cpu --page-size {PAGE} --num-pages 64",
        f"--host {lab.address(0)} --host-memory 16MiB --storage 'file:///tmp/{folder}?size=100MiB'",
        "--prefetch wait_complete --prefetch-timeout-s 30",
    ]
    return lab.ssh_command(0, f"exec raycache launch {model} {' '.join(flags)}", is_terminal=True)
