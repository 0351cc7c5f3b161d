"""A host tier that is not larger than the device adds no room under write_through, which a warning says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raycache.cache.costs import Costs
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle import tiny_tokenizers
from tests.oracle.tiny import make_tiny

WARNING = "it holds what the device holds"
PAGE, PAGES, LENGTH = 16, 64, 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    make_tiny(folder, "qwen3", max_position_embeddings=256)
    return tiny_tokenizers.byte_level(folder)


@pytest.mark.parametrize(
    ("policy", "host", "share", "warns"),
    [("write_through", "1MiB", 0, True), ("write_back", "1MiB", 1, False), ("write_through", "2MiB", 1, False)],
)
def test_prompts_that_exceed_the_device_come_again(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    host: str,
    share: float,
    warns: bool,
) -> None:
    # On a busy machine a load may take longer than such a small model computes, and would be left out.
    monkeypatch.setattr(Costs, "is_load_worth", lambda costs, num_tokens: True)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 250, LENGTH).tolist() for _ in range(PAGES * PAGE // LENGTH + 2)]
    settings = {"page_size": PAGE, "num_pages": PAGES, "max_running": 2, "write_policy": policy, "host_memory": host}
    with LLM(str(model), device="cpu", dtype="float32", max_model_len=256, **settings) as llm:
        for _ in range(3):
            outputs = [llm.generate([[*prompt, 7]], SamplingParams(max_tokens=1))[0] for prompt in prompts]
        assert sum(output.cached_tokens for output in outputs) == share * LENGTH * len(prompts)
    assert (WARNING in caplog.text) == warns
