"""A rank of a model in a directory does not import the client of the Hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.located import located
from raycache.config import Config
from raycache.errors import CheckpointError

_ASK = """
import sys
import actors.rank
from actors.located import located
from raycache.config import Config
config = Config(model="/models/here", draft="/models/draft")
assert located(config) == config
assert "huggingface_hub" not in sys.modules
"""


def test_directories_need_no_client() -> None:
    subprocess.run([sys.executable, "-c", _ASK], check=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("setting", ["model", "draft"])
def test_models_of_the_hub_are_looked_up(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = {"model": "/models/here", setting: f"some/model@{'a' * 40}"}
    with pytest.raises(CheckpointError, match="some/model has not been fetched to this machine"):
        located(Config(**settings))
