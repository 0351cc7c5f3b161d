"""A tokenizer and a scripted engine for the server."""

from __future__ import annotations

import pytest

from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)
