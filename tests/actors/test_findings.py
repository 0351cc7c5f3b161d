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
from raycache.rank.member import RankSpec
from tests.oracle.families import make_family

_RESERVED = {"activations": 7, "graphs": 3}, {"activations": 5, "graphs": 3}


class Ranks:
    """Two ranks that start, on these nodes."""

    def __init__(self, *nodes: str, longest: int | None = 2304) -> None:
        self.nodes, self.longest = nodes, longest
        self.loaded: list[Any] = []
        self.built: tuple[Any, ...] = ()

    def where(self) -> list[dict[str, Any]]:
        alone = {"waited_s": 0.0, "gpu": None, "gpus": SimpleNamespace(ids=())}
        return [{"node": node, **alone} for node in self.nodes]

    def boards(self, *of: object) -> dict[str, Path]:
        return {}

    def ask(self, method: str, arguments: Any = (), **same: Any) -> list[Any]:
        if method == "load":
            self.loaded = [reserved for (reserved,) in arguments]
        if method == "build":
            self.built = [longest for _, _, longest in arguments], same["warms_up"]
        built, loaded = ({"pages": 1.0}, self.longest), [(40, kept) for kept in _RESERVED]
        return {"join": [("gloo",)] * 2, "load": loaded, "build": [built] * 2}[method]

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
    first, second = Ranks("a", "b"), Ranks("b", "a")
    findings = start(first, Findings()).findings
    assert first.loaded == [None, None]
    assert first.built == ([None, None], True)
    assert findings == Findings(frozenset("ab"), _RESERVED, (2304, 2304))
    assert start(second, findings).findings == findings
    assert second.loaded == list(_RESERVED)
    assert second.built == ([2304, 2304], False)


def test_on_another_node_everything_is_found_out_again(start: Any) -> None:
    elsewhere = Ranks("a", "c")
    findings = start(elsewhere, Findings(frozenset("ab"), _RESERVED, (2304, 2304))).findings
    assert elsewhere.loaded == [None, None]
    assert elsewhere.built == ([None, None], True)
    assert findings.warm_nodes == frozenset("abc")


def test_ranks_that_cannot_record_are_told_nothing(start: Any) -> None:
    findings = start(Ranks("a", "b", longest=None), Findings()).findings
    again = Ranks("a", "b", longest=None)
    start(again, findings)
    assert again.built == ([None, None], False)
