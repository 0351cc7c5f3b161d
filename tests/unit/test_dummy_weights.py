"""Models without a checkpoint: weights that are drawn, of the shapes that config.json says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.model_shape import SHAPES, ModelShape
from raycache.checkpoint.dummy_weights import DummyWeights
from raycache.errors import CheckpointError, RequestError
from raycache.layers.router import SigmoidRouter
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle.families import FAMILIES, write_config
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
PUBLISHED = {  # numbers in the weights, in billions, from the model cards
    "gpt-oss-20b": 20.9,
    "nemotron-3-nano": 31.6,
    "qwen3-8b": 8.2,
}


@pytest.fixture
def source() -> DummyWeights:
    return DummyWeights(torch.device("cpu"), torch.float32)


def load(model_dir: Path, **settings: Any) -> LLM:
    return LLM(str(model_dir), **{"device": "cpu", "page_size": 8, "num_pages": 64, "dummy_weights": True, **settings})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_alone_is_a_model_whose_answers_depend_on_the_prompt(name: str, tmp_path: Path) -> None:
    vocab_size = FAMILIES[name].settings["vocab_size"]
    prompts = [[(seed * position) % vocab_size for position in range(40)] for seed in (5, 7, 11)]
    with load(write_config(tmp_path / name, name)) as llm:
        found = llm.generate(prompts, SCORED)
        llm.check()
    firsts = [completion.logprobs[0] for completion in found]
    assert all(math.isfinite(one.logprob) for completion in found for one in completion.logprobs)
    assert len({one.top for one in firsts}) == len(prompts)
    assert all(one.top[0][1] > one.top[1][1] for one in firsts), "logits differ"


def test_slices_are_those_of_the_whole_tensor(source: DummyWeights) -> None:
    whole = source.read("layers.0.up_proj.weight", shape=(12, 8))
    for axis, size in enumerate(whole.shape):
        parts = [
            source.read("layers.0.up_proj.weight", shape=(12, 8), axis=axis, start=start, stop=stop)
            for start, stop in ((0, 3), (3, 3), (3, size - 1), (size - 1, None))
        ]
        assert [part.shape[axis] for part in parts] == [3, 0, size - 4, 1]
        assert torch.equal(torch.cat(parts, dim=axis), whole)


def test_every_tensor_has_numbers_of_its_own_that_come_again(source: DummyWeights) -> None:
    first, second = (source.read(f"layers.{layer}.up_proj.weight", shape=(64, 256)) for layer in (0, 1))
    again = DummyWeights(torch.device("cpu"), torch.float32).read("layers.0.up_proj.weight", shape=(64, 256))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_norms_are_one_and_biases_small(source: DummyWeights) -> None:
    assert torch.equal(source.read("layers.0.q_norm.weight", shape=(16,)), torch.ones(16))
    assert torch.equal(source.read("norm_f.weight", shape=(16,), axis=0, start=4, stop=8), torch.ones(4))
    for name in ("layers.0.k_norm.bias", "layers.0.q_proj.bias", "layers.0.A_log", "layers.0.sinks"):
        assert 0 < source.read(name, shape=(16,)).abs().max() < 1


def test_tokens_choose_among_all_experts_alike(source: DummyWeights) -> None:
    correction = source.read("mlp.gate.e_score_correction_bias", shape=(256,))
    choice = {"top_k": 8, "num_groups": 8, "top_groups": 4, "renormalise": True, "scale": 1.0}
    router = SigmoidRouter(source.read("mlp.gate.weight", shape=(256, 512)), correction, **choice)
    tokens = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    by_chance = 256 * (1 - (1 - 8 / 256) ** 64)
    assert router(tokens)[1].unique().numel() == pytest.approx(by_chance, rel=0.05)


def test_texts_are_bytes_and_chats_are_refused_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    with load(write_config(tmp_path / "qwen3", "qwen3")) as llm:
        text = "Grüße, 世界"
        ids = llm.tokenizer.encode(text, add_special_tokens=True)
        assert len(ids) == len(text.encode())
        assert llm.tokenizer.decode(ids) == text
        assert llm.tokenizer.decode([300]) == ""
        assert llm.generate([text], SCORED)[0].prompt_token_ids == tuple(ids)
        with pytest.raises(RequestError, match="chat template"):
            llm.chat([[{"role": "user", "content": "hello"}]])


def test_without_the_setting_a_config_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        load(write_config(tmp_path / "qwen3", "qwen3"), dummy_weights=False)


def test_what_drawn_weights_leave_behind_does_not_pass_for_that_of_the_checkpoint_beside(tmp_path: Path) -> None:
    model_dir = byte_level(make_tiny(tmp_path / "llama"))
    with load(model_dir) as drawn, load(model_dir, dummy_weights=False) as real:
        assert drawn.engine.root("") != real.engine.root("")
        assert drawn.generate([[3, 4, 5]], SCORED)[0].logprobs != real.generate([[3, 4, 5]], SCORED)[0].logprobs


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.json")))
def test_shapes_of_the_benchmarks_are_those_that_were_published(name: str, tmp_path: Path) -> None:
    shape = ModelShape.make(name, tmp_path, layers=0, is_tiny=False, dtype=torch.bfloat16, weights="bfloat16")
    numbers = shape.weight_bytes / 2 + shape.model.vocab_size * shape.model.hidden_size  # the embedding
    if name in PUBLISHED:
        assert numbers / 1e9 == pytest.approx(PUBLISHED[name], abs=0.06)
    assert numbers * 2 < 80e9, "leaves a GPU of 139 GiB room for the cache"


def test_work_of_a_prompt_is_what_torch_counts(tmp_path: Path) -> None:
    shape = ModelShape.make("qwen3-8b", tmp_path, layers=3, is_tiny=True, dtype=torch.float32)
    config = AutoConfig.for_model(**json.loads((shape.model_dir / "config.json").read_text()))
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    tokens, layers, heads, dim = 96, 3, config.num_attention_heads, config.head_dim
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        oracle(torch.arange(tokens)[None])
    # It computes scores of future tokens, and after every token the last MLP and logits; neither is asked for.
    future = 4 * layers * heads * dim * tokens * (tokens - 1) / 2
    surplus = 2 * (tokens - 1) * config.hidden_size * (config.vocab_size + 3 * config.intermediate_size)
    assert shape.prefill_flops(tokens) == pytest.approx(counter.get_total_flops() - future - surplus, rel=0.01)


def test_a_batch_reads_more_experts_than_a_single_token_and_never_more_than_there_are(tmp_path: Path) -> None:
    shape = ModelShape.make("gpt-oss-20b", tmp_path, layers=0, is_tiny=False, dtype=torch.bfloat16)
    single, batch, many = (shape.step_weight_bytes(size) for size in (1, 16, 4096))
    assert single < batch < many <= shape.weight_bytes
    stored = 17 / 32 * shape.routed * 4 / 32  # four bits and a scale per 32; biases are plain
    assert single == pytest.approx(2 * (shape.plain + shape.head) + stored, rel=1e-3)
    assert many == pytest.approx(shape.weight_bytes)


def test_cache_that_a_step_reads_ends_at_windows_and_selections(tmp_path: Path) -> None:
    gpt, qwen, sparse = (
        ModelShape.make(name, tmp_path, layers=0, is_tiny=False, dtype=torch.bfloat16)
        for name in ("gpt-oss-20b", "qwen3-8b", "deepseek-v3.2-slice")
    )
    row = 2 * 8 * 128 * 2  # keys and values of 8 heads
    assert qwen.step_cache_bytes(1000) == 36 * row * 1000 == qwen.move_bytes(1000)
    assert gpt.step_cache_bytes(1000) == 12 * row // 2 * (1000 + 128)
    assert sparse.step_cache_bytes(8192) == 4 * 2 * (576 * 2048 + 128 * 8192)
    assert sparse.move_bytes(8192) == 4 * 2 * (576 + 128) * 8192


def test_a_directory_keeps_its_tokenizer_beside_drawn_weights(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "qwen3", "qwen3")
    made = byte_level(tmp_path / "made")
    shutil.copy(made / "tokenizer.json", folder / "tokenizer.json")
    with load(folder) as llm:
        assert llm.tokenizer.vocab_size != 256
