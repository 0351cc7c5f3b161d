"""Host and storage tiers on CUDA: pinned slabs, copies on streams, views that wait for their layer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from raycache import LLM, SamplingParams

pytestmark = pytest.mark.gpu

DEMOS = Path(__file__).parents[2] / "demos" / "hybrids"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(5, 90, 200).tolist() for seed in range(5)]
SETTINGS = {"page_size": 16, "max_model_len": 384, "max_running": 2, "restore_points": 2, "device": "cuda"}


def serve(model: str, **settings: object) -> LLM:
    size = int(settings.get("tp", 1)) * int(settings.get("cp", 1))  # type: ignore[call-overload]
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    return LLM(str(DEMOS / model), **SETTINGS, **settings)


@pytest.mark.parametrize("model", ["kda_mla", "mamba2_gqa"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"tp": 2},
        {"cp": 2},
        {"tp": 2, "cp": 2},
        {"write_policy": "write_back"},
        {"write_policy": "write_through_selective"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()) or "plain",
)
def test_prompts_that_left_the_device_are_answered_alike_from_the_host(model: str, settings: dict[str, object]) -> None:
    plain = {name: value for name, value in settings.items() if name != "write_policy"}
    with serve(model, num_pages=400, **plain) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    with serve(model, num_pages=40, host_memory="60MiB", **settings) as llm:
        for _ in range(3):  # selective saves at the second use, which has to come before the prompt is evicted
            found = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS for _ in range(2)]
            assert [completion.token_ids for completion in found[::2]] == expected
        assert [completion.cached_by_tier for completion in found[::2]] == [{"host": 192}] * 5
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected
        llm.check()


@pytest.mark.parametrize("model", ["kda_mla", "mamba2_gqa"])
def test_what_one_split_has_stored_another_one_finds(model: str, tmp_path: Path) -> None:
    storage = {"host_memory": "60MiB", "storage": f"file://{tmp_path}/cache?size=64MiB", "prefetch": "wait_complete"}
    with serve(model, num_pages=400, tp=2, **storage) as llm:
        expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    with serve(model, num_pages=400, cp=2, **storage) as llm:
        found = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [completion.token_ids for completion in found] == expected
    assert [completion.cached_by_tier for completion in found] == [{"storage": 192}] * 5
