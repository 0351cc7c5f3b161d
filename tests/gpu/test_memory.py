"""Memory of a GPU: what fits is used, what does not fit is refused before anything is served, and steps stay within."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycache import LLM, SamplingParams
from raycache.deployment.memory_use import MemoryUse, free_bytes, refusing_out_of_memory
from raycache.errors import ConfigError

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
GIB = 1 << 30
ROOM = 9 * GIB
"""That tests leave on the GPU, so that "all of it" is soon reached: above its margin, which is a share of the whole."""
PAGE_BYTES = 4 * 2 * 8 * 128 * 2 * 64  # layers, k and v, heads, numbers, bytes, tokens
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 50_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@contextmanager
def all_taken_but(room: int) -> Iterator[None]:
    """Somebody else takes the rest of the GPU."""
    gc.collect()  # a refusal holds on to what it was raised in
    hog = torch.empty(max(free_bytes(DEVICE) - room, 0), dtype=torch.uint8, device=DEVICE)
    try:
        yield
    finally:
        del hog
        free_bytes(DEVICE)


@pytest.fixture
def crowded() -> Iterator[None]:
    with all_taken_but(ROOM):
        yield


def serve(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), device="cuda", dummy_weights=True, **{"max_step_tokens": 2048, **settings})


def refusal(model: Path, **settings: Any) -> str:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        serve(model, **settings).close()
    assert time.monotonic() - begin < 60
    return str(refused.value)


def test_what_is_taken_and_kept_is_told_by_purpose() -> None:
    use = MemoryUse.of(DEVICE)
    before = use.left
    weights = torch.empty(GIB, dtype=torch.uint8, device=DEVICE)
    use.note("weights")
    assert use.taken["weights"] == pytest.approx(GIB, rel=0.05)
    use.keep("activations", 2 * GIB)
    assert use.left == pytest.approx(before - 3 * GIB, rel=0.01)
    assert sum(use.as_row().values()) == use.total
    assert "weights 1.0 GiB" in str(use) and "activations 2.0 GiB" in str(use)
    del weights
    use.note("weights")
    assert use.taken["weights"] < GIB / 10


def test_a_full_gpu_is_a_refusal_with_settings_to_lower() -> None:
    with (
        pytest.raises(ConfigError, match=r"no memory left on cuda:0 while testing \(.*Tried to allocate.*--kv-memory"),
        refusing_out_of_memory(DEVICE, doing="testing"),
    ):
        torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_the_largest_steps_find_room_beside_pages_that_take_all_the_rest(
    model: Path, crowded: None, attention: str
) -> None:
    generator = np.random.default_rng(0)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=20, logprobs=20)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=8, ignore_eos=True, logprobs=20)
    with serve(model, max_running=64, attention=attention, max_model_len=8192) as llm:
        taken = llm.info.num_pages * PAGE_BYTES
        assert ROOM / 4 < taken < ROOM, "pages take what is left"
        prompts = [generator.integers(3, 50_000, length).tolist() for length in (8000, 8000, *[100] * 62)]
        llm.generate(prompts[:1], scored)
        llm.generate(prompts, drawn)
        llm.generate([[*prompts[0], 5, 6, 7], *prompts[2:]], [scored, *[drawn] * 62])
        llm.check()


def test_wishes_that_do_not_fit_are_refused_with_what_is_there(model: Path, crowded: None) -> None:
    for wish in ({"kv_memory": "9GiB"}, {"num_pages": 20 * GIB // PAGE_BYTES}):
        (name,) = wish
        said = refusal(model, **wish)
        assert said.startswith(f"{name}=") and "are left" in said and "weights" in said and f"smaller {name}" in said


def test_a_step_that_does_not_fit_is_refused_before_it_is_served(model: Path, crowded: None) -> None:
    said = refusal(model, max_step_tokens=400_000)
    assert "trying the largest prefill step: 400000 tokens" in said and "--max-step-tokens" in said


def test_a_gpu_that_others_have_filled_is_told_as_such(model: Path) -> None:
    with all_taken_but(3 * GIB):
        said = refusal(model)
    assert "others" in said and "see `nvidia-smi`" in said


def test_weights_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 64, "intermediate_size": 262_144}))
    with all_taken_but(ROOM):
        assert "while loading weights" in refusal(tmp_path)
