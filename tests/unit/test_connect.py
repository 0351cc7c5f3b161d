"""Connecting to Ray: errors are those of this project, whatever Ray raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster import connect
from raycache.config import Config
from raycache.errors import ConfigError


def test_ray_that_takes_too_long_to_start_is_told_and_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def init(**options: Any) -> None:
        made.append(Path(options["_temp_dir"]))
        assert made[0].exists()
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", init)
    said = "a local Ray cluster did not start: The current node timed out .*if this machine is busy, try again"
    with pytest.raises(ConfigError, match=said):
        connect(Config(model="tiny"))
    assert not made[0].exists()
