"""A supervisor that is stopped while it replaces an engine; what it does with a cluster is in tests/actors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors import supervisor
from actors.answers import ActorLostError
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError


def test_a_stop_while_the_next_engine_is_made_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    killed: list[Any] = []

    class Handle:
        def __init__(self, config: Config, **options: Any) -> None:
            made.append(self)
            if len(made) == 2:
                supervised.stop()  # finds the engine before

        def ask_now(self, method: str, *, timeout_s: float = 0.0) -> Any:
            raise ConfigError("the host tier is gone")  # of an engine that starts after the end of the tiers

        def stop(self) -> None:
            killed.append(self)

        kill = stop

    arenas = SimpleNamespace(close=lambda timeout_s: None)
    monkeypatch.setattr(supervisor, "EngineHandle", Handle)
    monkeypatch.setattr(supervisor, "Arenas", SimpleNamespace(start=lambda *given, **named: arenas))
    monkeypatch.setattr(supervisor, "departing_nodes", lambda nodes: None)
    placement: Any = SimpleNamespace(nodes=("a",), remove=lambda: None)
    supervised = supervisor.Supervisor(Config(model="/m"), device="cpu", placement=placement, replica="0")
    with pytest.raises(EngineStoppedError):
        supervised.replace_engine(ActorLostError("it died"), on_progress=lambda phase, share: None)
    assert len(made) == 2 and killed[-1] is made[1]
