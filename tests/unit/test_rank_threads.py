"""CPU threads of the ranks of a gang, with Ray and without."""

from __future__ import annotations

import pytest
import ray

from actors.gang import _specs
from raycache.config import Config
from raycache.deployment.memory_plan import usable_cpus
from raycache.gang.processes import meet_here


@pytest.mark.parametrize(
    ("variable", "chosen", "threads"),
    [("", "auto", max(1, usable_cpus() // 2)), ("7", "auto", 0), ("7", 3, 3), ("", 3, 3)],
)
def test_the_environment_wins_over_a_share_of_the_cores_and_the_setting_over_both(
    monkeypatch: pytest.MonkeyPatch, variable: str, chosen: int | str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = Config.from_mapping({"model": "m", "tp": 2, "cpu_threads": chosen})
    _, invitations = meet_here(config, device_type="cpu")
    for path in {invitation.board for invitation in invitations}:
        path.unlink()
    assert [each.spec.num_threads for each in invitations] == [threads] * 2, "0 leaves it to torch, which reads it"


@pytest.mark.parametrize(("chosen", "threads"), [("auto", 8), (3, 3)])
def test_ranks_on_ray_have_the_threads_of_the_setting_or_a_share_of_their_node(
    monkeypatch: pytest.MonkeyPatch, chosen: int | str, threads: int
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Resources": {"CPU": 16.0}}])
    config = Config.from_mapping({"model": "m", "tp": 2, "cpu_threads": chosen})
    wheres = [{"node": "a", "host": "127.0.0.1"}] * 2
    assert [spec.num_threads for spec in _specs(wheres, config, device="cpu")] == [threads] * 2
