"""Steps planned ahead, with ranks in processes of their own: each takes a plan while the answer to the one before is on
its way, and what one rank samples the others go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long
from tests.unit.test_overlap import SAMPLINGS, VOCAB, alike, completions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, num_hidden_layers=2))


SPLITS: list[dict[str, Any]] = [{"tp": 2}, {"cp": 2}, {"cp": 2, "decode_split": "on"}]


@pytest.mark.parametrize("split", mostly_long(SPLITS, but=SPLITS[1:]), ids=str)
def test_tokens_are_those_of_one_rank_one_by_one(model: Path, split: dict[str, Any]) -> None:
    samplings = [SAMPLINGS[name] for name in ("greedy", "seeded", "stop token", "stop text", "two tokens")]
    off = completions(model, samplings, overlap="off")
    on = completions(model, samplings, overlap="on", rank_timeout_s=30, **split)
    assert all(alike(one, other) for one, other in zip(off, on, strict=True))
