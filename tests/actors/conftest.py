"""One Ray cluster for all tests of this folder, and a tiny model with a tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.cluster import Cluster, connect, disconnect
from raycache.config import Config
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    found = connect(Config(address="local", dashboard=False))
    yield found
    disconnect(found.temp_dir)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_tiny(folder, "qwen3", max_position_embeddings=2048)
    return tiny_tokenizers.byte_level(folder)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
