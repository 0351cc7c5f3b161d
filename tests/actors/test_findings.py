"""What a gang finds out is told to the ranks of the one that replaces it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actors.gang as module
from actors.gang import Findings, Gang
from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.observe.phases import Phases
from raycache.parallel.devices import GpuModel
from raycache.rank.member import RankSpec
from tests.oracle.families import make_family

_RESERVED = {"activations": 7, "graphs": 3}, {"activations": 5, "graphs": 3}


class Ranks:
    """Two ranks that start, on these nodes."""

    def __init__(self, *nodes: str, longest: int | None = 2304, gpu: str = "H200", transport: str = "NCCL") -> None:
        self.nodes, self.longest, self.gpu, self.transport = nodes, longest, gpu, transport
        self.loaded: list[Any] = []
        self.built: tuple[Any, ...] = ()

    def where(self) -> list[dict[str, Any]]:
        alone = {"waited_s": 0.0, "gpu": GpuModel(self.gpu, (9, 0)), "gpus": SimpleNamespace(ids=())}
        return [{"node": node, **alone} for node in self.nodes]

    def boards(self, *of: object) -> dict[str, Path]:
        return {}

    def ask(self, method: str, arguments: Any = (), **same: Any) -> list[Any]:
        if method == "load":
            self.loaded = [reserved for (reserved,) in arguments]
        if method == "build":
            self.built = [longest for _, _, longest in arguments], same["warms_up"]
        built, loaded = ({"pages": 1.0}, self.longest), [(40, kept) for kept in _RESERVED]
        return {"join": [(self.transport,)] * 2, "load": loaded, "build": [built] * 2}[method]

    def run(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a gang of some ranks."""
    executor = SimpleNamespace(watch=lambda ranks: None, abandon=lambda: None)
    meeting = SimpleNamespace(
        board=SimpleNamespace(unshare=lambda: None),
        invitations=lambda specs, boards: ["first", "second"],
        join=lambda wait: (executor, wait()),
    )
    specs = [RankSpec(rank, "127.0.0.1", "cpu", ranks_on_node=2) for rank in range(2)]
    monkeypatch.setattr(module, "_meeting", lambda *of, **more: meeting)
    monkeypatch.setattr(module, "_specs", lambda *of, **more: specs)
    model = make_family(tmp_path / "llama", "llama")
    config = Config.from_mapping({"model": str(model), "num_pages": 40, "tp": 2})
    deployment = deploy(config, device_type="cpu")

    def start(ranks: Any, findings: Findings) -> Gang:
        return Gang(
            deployment,
            config,
            ranks=ranks,
            epoch=1,
            arenas={},
            wait_for_arenas=lambda: None,
            phases=Phases(),
            findings=findings,
        )

    return start


def test_the_next_gang_does_not_measure_again(start: Any) -> None:
    first, second = Ranks("a", "b"), Ranks("a", "b")
    findings = start(first, Findings()).findings
    assert first.loaded == [None, None]
    assert first.built == ([None, None], True)
    assert start(second, findings).findings == findings
    assert second.loaded == list(_RESERVED)
    assert second.built == ([2304, 2304], False)


@pytest.mark.parametrize(
    ("others", "warms_up"),
    [
        (Ranks("a", "c"), True),
        (Ranks("b", "a"), False),
        (Ranks("a", "b", gpu="H100"), False),
        (Ranks("a", "b", transport="peer memory"), False),
    ],
    ids=["another node", "other places", "other GPUs", "another transport"],
)
def test_with_anything_else_memory_and_steps_are_measured_again(start: Any, others: Ranks, warms_up: bool) -> None:
    findings = start(Ranks("a", "b"), Findings()).findings
    found = start(others, findings).findings
    assert others.loaded == [None, None]
    assert others.built == ([None, None], warms_up)
    assert found.warm_nodes == {"a", "b", *others.nodes}


def test_what_an_earlier_gang_measured_elsewhere_is_not_taken_over(start: Any) -> None:
    findings = start(Ranks("a", "c"), start(Ranks("a", "b"), Findings()).findings).findings
    back = Ranks("a", "b")
    start(back, findings)
    assert back.loaded == [None, None]
    assert back.built == ([None, None], False)


def test_ranks_that_cannot_record_are_told_nothing(start: Any) -> None:
    findings = start(Ranks("a", "b", longest=None), Findings()).findings
    again = Ranks("a", "b", longest=None)
    start(again, findings)
    assert again.built == ([None, None], False)
