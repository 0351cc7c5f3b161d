"""Stages of models: what layers cost, borders that are given, and what the doctor says of both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from launch.doctor.check import Outcome
from launch.doctor.command import examine
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.deployment.stages import with_stages
from raycache.errors import ConfigError
from raycache.llm import LLM
from raycache.models.base import read_config
from raycache.models.drafts.loading import read_models
from raycache.models.layer_sizes import CONTEXT, layer_costs, layer_sizes
from raycache.types import SamplingParams
from tests.oracle import tiny_tokenizers
from tests.oracle.families import FAMILIES, make_family
from tests.oracle.tiny import make_tiny
from tests.published import glm_moe_dsa
from tests.selection import mostly_long

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_each_layer_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model_dir = make_family(tmp_path / family, family)
    config = read_config(model_dir)
    layers, outside = [0] * config.num_layers, 0
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            at, size = name.split(".layers."), file.get_tensor(name).numel()
            if any(re.search(pattern, name) for pattern in config.ignored_tensors):
                continue
            if len(at) == 2:
                layers[int(at[1].split(".")[0])] += size
            else:
                outside += size
    held = layer_sizes(config).held
    assert held.layers == tuple(layers)
    tied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    assert held.first == config.vocab_size * config.hidden_size and held.first + held.last - tied == outside


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoehybrid", "minimax"])
def test_a_token_reads_the_experts_that_it_chooses(family: str, tmp_path: Path) -> None:
    """With all 8 experts chosen it reads what is held, with one less one eighth of the experts less."""
    model_dir = make_family(tmp_path / family, family)
    path = model_dir / "config.json"
    values = json.loads(path.read_text())

    def read(top_k: int) -> int:
        path.write_text(json.dumps({**values, "num_experts_per_tok": top_k}))
        sizes = layer_sizes(read_config(model_dir))
        assert sizes.held.layers == held
        return sizes.read.layers[0]

    held = layer_sizes(read_config(model_dir)).held.layers
    steps = {read(top_k + 1) - read(top_k) for top_k in range(1, 8)}
    assert read(8) == held[0] and steps == {3 * 64 * 32}  # gate, up and down of an expert


def test_cached_rows_count_as_many_as_a_query_reads(tmp_path: Path) -> None:
    window, full = make_family(tmp_path / "gemma", "gemma3"), make_family(tmp_path / "qwen", "qwen3_next")
    costs, sizes = layer_costs(read_config(window)).layers, layer_sizes(read_config(window)).read.layers
    row = 2 * 2 * 16 * 2  # k and v, KV heads, numbers, bytes
    assert [cost - 2 * size for cost, size in zip(costs, sizes, strict=True)] == [24 * row] * 3 + [CONTEXT * row]
    costs, sizes = layer_costs(read_config(full)).layers, layer_sizes(read_config(full)).read.layers
    state = 8 * 16 * 24 * 4 + (2 * 4 * 16 + 8 * 24) * 3 * 2  # of 8 heads, and inputs of the convolutions
    row = 2 * 2 * 32 * 2
    assert [cost - 2 * size for cost, size in zip(costs, sizes, strict=True)] == [state] * 3 + [CONTEXT * row]


def test_a_draft_is_charged_to_the_last_stage(tmp_path: Path) -> None:
    target, small = make_tiny(tmp_path / "target"), make_tiny(tmp_path / "small")
    alone, drafted = layer_costs(read_config(target)), layer_costs(read_models(target, str(small)))
    own = layer_costs(read_config(small))
    assert drafted.layers == alone.layers and drafted.first == alone.first
    assert drafted.last == alone.last + own.first + sum(own.layers) + own.last


def test_stages_are_chosen_once_and_written_down(tmp_path: Path) -> None:
    bound = make_family(tmp_path / "bound", "glm-bound")
    config = Config(model=str(bound), pp=2)
    chosen = with_stages(config, check_model(config))
    assert (chosen.pp_layers, chosen.split.stages) == ("4,2", (4, 2))
    assert with_stages(chosen, check_model(chosen)) == chosen
    with pytest.raises(AssertionError, match="has no stages for 6 layers"):
        config.split.stage_layers(6, 0)
    equal = Config(model=str(make_tiny(tmp_path / "equal")), pp=2)
    assert with_stages(equal, check_model(equal)).pp_layers == "2,2"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 2, "pp_layers": "3,3"}, r"pp_layers=3,3 starts a stage at layer 3 .*; use auto, or 4,2$"),
        ({"pp": 2, "pp_layers": "4,1"}, r"pp_layers=4,1 adds up to 5 layers, but bound has 6; use auto, or 4,2$"),
        ({"pp": 3, "pp_layers": "3,2,2"}, r"pp_layers=3,2,2 adds up to 7 layers, but bound has 6; use auto, or 1,3,2$"),
        ({"pp_layers": "5"}, r"pp_layers=5 adds up to 5 layers, but bound has 6; use auto, or 6$"),
        ({"pp": 4}, r"pp=4 exceeds num_hidden_layers=6 minus 3 that must be on the stage of .*; use at most 3$"),
    ],
    ids=str,
)
def test_borders_that_cannot_work_are_refused_with_near_ones(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model_dir = make_family(tmp_path / "bound", "glm-bound")
    with pytest.raises(ConfigError, match=message):
        check_model(Config(model=str(model_dir), **settings))


@pytest.mark.parametrize("pp", [2, 4])
def test_published_glm_is_cut_where_an_indexer_begins(tmp_path: Path, pp: int) -> None:
    layers = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    kinds = {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3}
    sparse = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "layer_types": ["deepseek_sparse_attention"] * 78}
    (tmp_path / "config.json").write_text(json.dumps({**glm_moe_dsa.CONFIG, **layers, **kinds, **sparse}))
    model = read_config(tmp_path)
    stages = with_stages(Config(model=str(tmp_path), pp=pp), model).stages
    assert len(stages) == pp and sum(stages) == 78
    assert all(kinds["indexer_types"][sum(stages[:stage])] == "full" for stage in range(pp))


@pytest.mark.parametrize(
    "settings", mostly_long([{"pp": 2}, {"pp": 3}, {"pp": 2, "pp_layers": "1,5"}], but=[{"pp": 3}]), ids=str
)
def test_a_model_in_uneven_stages_answers_as_the_whole_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    model_dir = tiny_tokenizers.byte_level(make_family(tmp_path / "bound", "glm-bound"))
    prompt = [list(range(3, 60))]
    with LLM(str(model_dir), device="cpu", page_size=8, num_pages=32) as whole:
        (expected,) = whole.generate(prompt, GREEDY)
    tiers = {"host_memory": "8MiB", "storage": f"file://{tmp_path}/store?size=8MiB", "prefetch": "wait_complete"}
    with LLM(str(model_dir), device="cpu", page_size=8, num_pages=32, **settings, **tiers) as split:
        cold, hit = (split.generate(prompt, GREEDY)[0] for _ in range(2))
    assert cold.token_ids == hit.token_ids == expected.token_ids
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 56)


def test_the_doctor_shows_the_layers_and_weights_of_each_stage(tmp_path: Path) -> None:
    model_dir = tiny_tokenizers.byte_level(make_family(tmp_path / "bound", "glm-bound"))

    def examined(**settings: Any) -> dict[str, str]:
        found = list(examine({"model": str(model_dir), "device": "cpu", "port": "auto", **settings}))
        assert not [one for one in found if one.outcome is Outcome.FAILED]
        return {one.check: one.text for one in found}

    assert examined()["pipeline split"] == "pp=1: all 6 layers on every rank"
    held = layer_sizes(read_config(model_dir)).held.of_stages((4, 2))
    sizes = ", ".join(f"{2 * size / 1024:.1f} KiB" for size in held)
    shown = examined(pp=2, dtype="bfloat16")
    assert shown["pipeline split"] == f"pp=2: stages of 4,2 layers, {sizes} of weights in bfloat16"
    fullest = float(shown["weights per rank"].split()[1])
    assert fullest == pytest.approx(2 * max(held) / 1024, rel=0.05)
    assert examined(pp=2, pp_layers="1,5")["pipeline split"].startswith("pp=2: stages of 1,5 layers")
