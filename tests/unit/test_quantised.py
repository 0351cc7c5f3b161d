"""Quantised checkpoints in published form = transformers on the same numbers, under splits that cut inside blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from raycache.cache.keys import Identity
from raycache.checkpoint.tensor_files import SINGLE, Checkpoint, weights_fingerprint
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.deployment.weights import model_identity
from raycache.llm import LLM
from raycache.models.base import check_weights, read_config
from raycache.parallel.sharding import Split
from raycache.types import SamplingParams
from tests.matrix.trial import FixedPace
from tests.oracle.families import make_family
from tests.oracle.gang import gang_logits
from tests.oracle.quantised import (
    Form,
    fp8_blocks,
    fp8_channels,
    fp8_tensor,
    int4_groups,
    mxfp4_experts,
    nvfp4,
    write_quantised,
)
from tests.oracle.tiny import SIZES
from tests.oracle.tiny_tokenizers import byte_level

IDS = np.random.default_rng(0).integers(3, 500, 40).tolist()
SPLITS = (Split(), Split(tp=2), Split(tp=4), Split(cp=2))

# Sizes of no block: 192 rows of a head of q_b and 96 rows of an expert per rank begin inside blocks of 128.
_HEADS_OF_192 = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
_EXPERTS_OF_96 = {"moe_intermediate_size": 192, "num_hidden_layers": 2, "num_experts": 4, "hidden_size": 160}
_NARROW = {"num_hidden_layers": 2}

CASES: Mapping[str, tuple[str, Mapping[str, Any], Callable[[], Form]]] = {
    "fp8 blocks, llama": ("llama", _NARROW, lambda: fp8_blocks((48, 40))),
    "fp8 blocks, scales in bfloat16": ("qwen3", _NARROW, lambda: fp8_blocks((20, 24), scale_dtype=torch.bfloat16)),
    "fp8 blocks, heads of 192 rows": ("deepseek_v3", _HEADS_OF_192, fp8_blocks),
    "fp8 blocks, 96 rows of an expert": ("qwen3_moe", _EXPERTS_OF_96, fp8_blocks),
    "fp8 per tensor": ("qwen3", _NARROW, fp8_tensor),
    "fp8 per tensor, [1]": ("llama", _NARROW, lambda: fp8_tensor(shape=(1,))),
    "fp8 per channel": ("llama", _NARROW, fp8_channels),
    "mxfp4": ("gpt_oss", {**_NARROW, "layer_types": ["sliding_attention", "full_attention"]}, mxfp4_experts),
    "int4 groups": ("qwen3_moe", {**_NARROW, "moe_intermediate_size": 64}, int4_groups),
    "nvfp4, modelopt": ("qwen3_moe", {**_NARROW, "moe_intermediate_size": 64}, nvfp4),
    "nvfp4, compressed-tensors": ("llama", _NARROW, lambda: nvfp4(by="compressed-tensors")),
}


def make_case(folder: Path, name: str) -> tuple[Path, Path]:
    """(checkpoint in published form, plain checkpoint of the same numbers)."""
    family, settings, form = CASES[name]
    source = make_family(folder / "source", family, **settings)
    write_quantised(source, folder / "quantised", folder / "plain", form())
    return folder / "quantised", folder / "plain"


def oracle(plain: Path) -> NDArray[np.float64]:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, **eager)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantised_model_under_every_split(tmp_path: Path, name: str) -> None:
    quantised, plain = make_case(tmp_path, name)
    check_weights(read_config(quantised), Checkpoint(quantised))
    expected = oracle(plain)
    assert np.abs(oracle(tmp_path / "source") - expected).max() > 1e-3  # the format does round
    for split in SPLITS:
        found = gang_logits(quantised, [IDS], [[(0, 0, len(IDS))]], split=split)[0]
        assert np.abs(found - expected).max() < 1e-4, split


def test_the_form_of_the_weights_is_part_of_what_a_cache_is_of(tmp_path: Path) -> None:
    quantised, plain = make_case(tmp_path, "nvfp4, modelopt")
    model = read_config(quantised)

    def weights(**settings: Any) -> str:
        return model_identity(Deployment(Config(model=str(quantised), **settings), model, "cpu")).weights

    fingerprint = weights_fingerprint(quantised)
    assert weights() == weights(weights="stored") == f"{fingerprint} weights dequantised to float32"
    assert weights(weights="bfloat16") == weights(dtype="bfloat16") == f"{fingerprint} weights dequantised to bfloat16"
    assert weights(dummy_weights=True) == f"drawn on cpu {fingerprint}"
    for wish in ("auto", "stored", "bfloat16"):
        identity = model_identity(Deployment(Config(model=str(plain), weights=wish), read_config(plain), "cpu"))
        assert identity == Identity(weights_fingerprint(plain), 64)


def test_what_is_stored_for_plain_weights_keeps_its_keys(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, "rms_norm_eps": 1e-6}))
    identity = model_identity(Deployment(Config(model=str(tmp_path)), read_config(tmp_path), "cpu"))
    assert (
        identity.seed().hex() == "47471a41f7914cd25e2974c6b04ad8a43e7e3a19a30be1734317e6a2347b3d8c"
    )  # of commit 52cc029


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("fp8 blocks, heads of 192 rows", "model.layers.0.self_attn.q_b_proj.weight_scale_inv"),
        ("mxfp4", "model.layers.1.mlp.experts.gate_up_proj_scales"),
        ("mxfp4", "model.layers.1.mlp.experts.down_proj_blocks"),
        ("int4 groups", "model.layers.1.mlp.experts.1.up_proj.weight_packed"),
    ],
)
def test_scales_of_the_next_block_and_swapped_nibbles_are_seen_in_the_logits(
    tmp_path: Path, name: str, damaged: str
) -> None:
    quantised, plain = make_case(tmp_path, name)
    tensors = load_file(quantised / SINGLE)
    codes = tensors[damaged].view(torch.uint8)
    if "scale" in damaged:
        tensors[damaged] = tensors[damaged].roll(1, -2)
    else:
        tensors[damaged] = (codes >> 4 | codes << 4).view(tensors[damaged].dtype)
    save_file(tensors, quantised / SINGLE)
    found = gang_logits(quantised, [IDS], [[(0, 0, len(IDS))]], split=Split(tp=2))[0]
    assert np.abs(found - oracle(plain)).max() > 1e-2


def test_what_one_form_has_stored_is_not_found_by_another(tmp_path: Path) -> None:
    quantised, _ = make_case(tmp_path, "int4 groups")
    byte_level(quantised)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def ask(wish: str) -> tuple[tuple[int, ...], dict[str, int]]:
        tiers = {"host_memory": "8MiB", "storage": f"file://{tmp_path}/tier?size=8MiB", "prefetch": "wait_complete"}
        with LLM(str(quantised), device="cpu", page_size=8, num_pages=40, weights=wish, **tiers) as llm:
            llm.engine._scheduler.cache.costs.compute = FixedPace()  # or computing is found to be faster now and then
            (found,) = llm.generate([IDS], greedy)
            return found.token_ids, dict(found.cached_by_tier)

    first, cached = ask("auto")
    assert not cached and ask("stored") == (first, {"storage": 32})
    _, cached = ask("bfloat16")
    assert not cached and ask("bfloat16")[1] == {"storage": 32}
