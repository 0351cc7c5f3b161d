"""Mixtures of experts against transformers' layers on the same weights, and against one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridTopKRouter
from transformers.models.minimax.modeling_minimax import MiniMaxTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from raycache.checkpoint.config_file import ConfigFile
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.errors import CheckpointError
from raycache.layers import expert_weights
from raycache.layers.activation import gelu_tanh_gated, silu_gated
from raycache.layers.expert_config import (
    ExpertConfig,
    read_grouped_experts,
    read_softmax_experts,
    require_experts,
)
from raycache.layers.expert_weights import (
    load_grouped_moe,
    load_shared_expert,
    load_softmax_moe,
    load_stacked_experts,
    load_stacked_shared_expert,
)
from raycache.layers.experts import Experts, MixtureOfExperts
from raycache.layers.feed_forward import MIXTRAL
from raycache.layers.router import Router, SigmoidRouter, SoftmaxRouter
from raycache.layers.weights import ShardedWeights
from raycache.models.bailing_moe_v2_5 import CORRECTION, read_bailing_experts
from raycache.models.base import read_config
from raycache.models.gpt_oss import load_gpt_oss_moe
from raycache.models.nemotron_h import load_nemotron_moe
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.families import make_family
from tests.oracle.golden import InFloat64

CPU = torch.device("cpu")
SIZE, COUNT = 64, 8  # of all tiny families


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    """Weight per expert [T, E], whatever the order that a router gives them in."""
    return torch.zeros(len(ids), count, dtype=weights.dtype).scatter_(1, ids, weights)


# Routers ------------------------------------------------------------------------------------------------------------


def settings(model_type: str, **values: Any) -> Any:
    experts = {"num_experts_per_tok": 3, "hidden_size": SIZE}
    return AutoConfig.for_model(model_type, **{**experts, **values})


def draw(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for seed, tensor in enumerate((*module.parameters(), *module.buffers())):
            tensor.copy_(normal(*tensor.shape, seed=seed) / 8)
    return module.double()


@pytest.mark.parametrize(
    ("oracle", "make"),
    [
        (
            Qwen3MoeTopKRouter(settings("qwen3_moe", num_experts=32, norm_topk_prob=False)),
            lambda r: SoftmaxRouter(r.weight, top_k=3, renormalise=False),
        ),
        (
            Qwen3MoeTopKRouter(settings("qwen3_moe", num_experts=32, norm_topk_prob=True)),
            lambda r: SoftmaxRouter(r.weight, top_k=3, renormalise=True),
        ),
        (
            MiniMaxTopKRouter(settings("minimax", num_local_experts=32)),
            lambda r: SoftmaxRouter(r.weight, top_k=3, renormalise=True),
        ),
        (
            GraniteMoeHybridTopKRouter(settings("granitemoehybrid", num_local_experts=32)),
            lambda r: SoftmaxRouter(r.weight, top_k=3, renormalise=True),
        ),
        (
            GptOssTopKRouter(settings("gpt_oss", num_local_experts=32)),
            lambda r: SoftmaxRouter(r.weight, bias=r.bias, top_k=3, renormalise=True),
        ),
    ],
    ids=["qwen3_moe-as-is", "qwen3_moe", "minimax", "granitemoehybrid", "gpt_oss"],
)
def test_a_softmax_router_chooses_and_weighs_as_transformers(
    oracle: torch.nn.Module, make: Callable[[Any], Router]
) -> None:
    check_router(make(draw(oracle)), oracle)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 8), (8, 2), (4, 1), (16, 15)])
def test_a_sigmoid_router_chooses_and_weighs_as_transformers(groups: int, top_groups: int, renormalise: bool) -> None:
    values = {"n_routed_experts": 32, "n_group": groups, "topk_group": top_groups, "routed_scaling_factor": 2.5}
    oracle: Any = draw(DeepseekV3TopkRouter(settings("deepseek_v3", norm_topk_prob=renormalise, **values)))
    ours = SigmoidRouter(
        oracle.weight,
        oracle.e_score_correction_bias,
        top_k=3,
        num_groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=2.5,
    )
    check_router(ours, oracle)


@torch.no_grad()
def check_router(router: Router, oracle: torch.nn.Module) -> None:
    x = normal(200, SIZE, seed=9)
    weights, ids = router(x)
    with InFloat64():
        _, oracle_weights, oracle_ids = oracle(x)
    assert (weights.dtype, weights.shape, ids.shape) == (torch.float64, (200, 3), (200, 3))
    assert torch.equal(ids.sort().values, oracle_ids.sort().values)
    torch.testing.assert_close(spread(weights, ids, 32), spread(oracle_weights, oracle_ids, 32), rtol=1e-12, atol=1e-14)


@torch.no_grad()
def test_weights_are_float32_for_activations_of_half_the_width() -> None:
    x, weight = normal(5, SIZE).bfloat16(), normal(COUNT, SIZE)
    soft = SoftmaxRouter(weight.bfloat16(), top_k=2, renormalise=True)
    for router in (soft, sigmoid_router(weight.float()), sigmoid_router(weight.bfloat16())):
        weights, _ = router(x)
        assert weights.dtype == torch.float32


def sigmoid_router(weight: Tensor) -> SigmoidRouter:
    correction = torch.zeros(len(weight))
    return SigmoidRouter(weight, correction, top_k=2, num_groups=1, top_groups=1, renormalise=True, scale=1.0)


def test_weights_stay_finite_where_all_scores_vanish() -> None:
    weights, _ = sigmoid_router(torch.full((4, 1), -1e4))(torch.ones(3, 1))
    assert torch.equal(weights, torch.zeros(3, 2))


# Layers -------------------------------------------------------------------------------------------------------------

Load = Callable[[Path, ShardedWeights], MixtureOfExperts]


def load_qwen3_moe(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    experts = read_softmax_experts(ConfigFile.read(model_dir / "config.json"), renormalise=True)
    return load_softmax_moe(experts, weights.under("model.layers.1.mlp"), size=SIZE)


def load_qwen3_next(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    own = weights.under("model.layers.1.mlp")
    experts = read_softmax_experts(ConfigFile.read(model_dir / "config.json"), renormalise=True)
    gate = own.whole("shared_expert_gate.weight", 1, SIZE)
    shared = load_shared_expert(own.under("shared_expert"), size=SIZE, inner=32, gate=gate)
    return load_softmax_moe(experts, own, size=SIZE, shared=shared)


def load_minimax(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    experts = ExpertConfig(count=COUNT, top_k=2, inner=32)
    return load_softmax_moe(experts, weights.under("model.layers.1.block_sparse_moe"), size=SIZE, names=MIXTRAL)


def load_granite(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    own, experts = weights.under("model.layers.1.block_sparse_moe"), ExpertConfig(count=COUNT, top_k=3, inner=32)
    router = SoftmaxRouter(own.whole("router.layer.weight", COUNT, SIZE), top_k=3, renormalise=True)
    routed = load_stacked_experts(experts, own, up="input_linear.weight", down="output_linear.weight", size=SIZE)
    return MixtureOfExperts(router, routed, weights.ctx.tp)


def load_gpt_oss(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    config: Any = read_config(model_dir)
    return load_gpt_oss_moe(config, weights.under("model.layers.1.mlp"))


def load_bailing(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    experts = read_bailing_experts(ConfigFile.read(model_dir / "config.json"))
    return load_grouped_moe(experts, weights.under("model.layers.1.mlp"), size=SIZE, correction=CORRECTION)


def load_nemotron(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
    config: Any = read_config(model_dir)
    return load_nemotron_moe(config.experts, weights.under("backbone.layers.1.mixer"), size=SIZE, latent=0)


def grouped(at: str = "model.layers.1.mlp", **names: Any) -> Load:
    def load(model_dir: Path, weights: ShardedWeights) -> MixtureOfExperts:
        experts = read_grouped_experts(ConfigFile.read(model_dir / "config.json"))
        return load_grouped_moe(experts, weights.under(at), size=SIZE, **names)

    return load


LAYERS: Mapping[str, Load] = {
    "qwen3_moe": load_qwen3_moe,
    "qwen3_next": load_qwen3_next,
    "minimax": load_minimax,
    "granitemoehybrid": load_granite,
    "gpt_oss": load_gpt_oss,
    "deepseek_v3": grouped(),
    "glm_moe_dsa": grouped(),
    "bailing_hybrid": load_bailing,
    "kimi_linear": grouped("model.layers.1.block_sparse_moe", names=MIXTRAL),
    "nemotron_h": load_nemotron,
}


SHARED = ("qwen3_next", "deepseek_v3", "glm_moe_dsa", "bailing_hybrid", "kimi_linear", "nemotron_h")
"""Those with a shared expert; Granite's is loaded apart here."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    root, made = tmp_path_factory.mktemp("families"), {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            model_dir = make_family(root / name, name)
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            model.set_experts_implementation("eager")  # the grouped product of the CPU knows no float64
            made[name] = model_dir, model.double()
        return made[name]

    return make


def parts(load: Load, model_dir: Path, *, tp: int, dtype: torch.dtype) -> Iterator[MixtureOfExperts]:
    """The layers of all tp ranks; the sum over ranks is left out, so that each gives its part."""
    for rank in range(tp):
        ctx = ParallelContext(Split(tp=tp), rank, CPU, tp=Group(rank=rank, size=tp))
        yield load(model_dir, ShardedWeights(Checkpoint(model_dir), ctx, dtype))


@contextmanager
def oracle_layer(model: PreTrainedModel, name: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """The feed-forward part of layer 1; gpt-oss gives its scores as well, the shared part of Granite is elsewhere."""
    layer = model.model.layers[1]
    part = {"granitemoehybrid": "block_sparse_moe", "nemotron_h": "mixer"}.get(name, "mlp")

    def run(x: Tensor) -> Tensor:
        out = getattr(layer, part)(x[None])
        return (out[0] if name == "gpt_oss" else out)[0]

    with torch.no_grad(), InFloat64():
        yield run


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("name", "is_last"), [*((name, False) for name in LAYERS), *((name, True) for name in SHARED)])
def test_the_parts_of_all_ranks_add_up_to_the_layer_of_transformers(
    family: Any, name: str, tp: int, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared expert is apart, or stored as the last of the routed ones, as it is on GPUs."""
    monkeypatch.setattr(expert_weights, "has_kernels", lambda *_: is_last)
    model_dir, model = family(name)
    x = normal(60, SIZE)
    with oracle_layer(model, name) as run:
        oracle = run(x)
    with torch.inference_mode():
        for part in parts(LAYERS[name], model_dir, tp=tp, dtype=torch.float64):
            assert (part._shared is None) == (is_last or name not in SHARED)
        ours = sum(part(x, NO_PASS) for part in parts(LAYERS[name], model_dir, tp=tp, dtype=torch.float64))
        single = sum(part(x.float(), NO_PASS) for part in parts(LAYERS[name], model_dir, tp=tp, dtype=torch.float32))
    torch.testing.assert_close(ours, oracle, rtol=0, atol=1e-12)
    torch.testing.assert_close(single, oracle.float(), rtol=0, atol=1e-5)


NO_PASS: Any = None  # a feed-forward part looks at its input only


@pytest.mark.parametrize("tp", [1, 4])
def test_the_shared_part_of_granite_equals_transformers(family: Any, tp: int) -> None:
    model_dir, model = family("granitemoehybrid")
    x, at = normal(60, SIZE), "model.layers.1.shared_mlp"
    ours = torch.zeros_like(x)
    for rank in range(tp):
        ctx = ParallelContext(Split(tp=tp), rank, CPU, tp=Group(rank=rank, size=tp))
        weights = ShardedWeights(Checkpoint(model_dir), ctx, torch.float64)
        up, down = "input_linear.weight", "output_linear.weight"
        ours += load_stacked_shared_expert(weights.under(at), up=up, down=down, size=SIZE, inner=64)(x)
    torch.testing.assert_close(ours, model.model.layers[1].shared_mlp(x).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens_are_no_work(family: Any, name: str) -> None:
    model_dir, _ = family(name)
    (layer,) = parts(LAYERS[name], model_dir, tp=1, dtype=torch.float32)
    assert layer(torch.empty(0, SIZE), NO_PASS).shape == (0, SIZE)


# Experts ------------------------------------------------------------------------------------------------------------


def one_at_a_time(experts: Mapping[str, Tensor], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The slow twin: one token, one expert after another."""
    out = torch.zeros_like(x)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            inner = experts["up"][expert] @ x[token] + experts["up_bias"][expert]
            gate, up = inner.chunk(2)
            product = experts["down"][expert] @ (F.silu(gate) * up) + experts["down_bias"][expert]
            out[token] += weights[token, place] * product
    return out


def random_experts(count: int) -> dict[str, Tensor]:
    sizes = {"up": (count, 12, 5), "up_bias": (count, 12), "down": (count, 5, 6), "down_bias": (count, 5)}
    return {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(sizes.items())}


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([[2, 0], [0, 2], [3, 1], [1, 2]]),
        torch.tensor([[3, 2], [2, 3], [3, 2], [2, 3]]),  # nobody chose the first ones
        torch.tensor([[0, 1]]),  # nor the last ones
        torch.empty(0, 2, dtype=torch.int64),
    ],
    ids=["all", "last", "first", "none"],
)
@pytest.mark.parametrize("held", [[range(4)], [range(2), range(2, 4)], [range(1), range(1, 4)]], ids=str)
def test_ranks_that_hold_some_experts_add_up_to_one_token_at_a_time(ids: Tensor, held: list[range]) -> None:
    tensors, x, weights = random_experts(4), normal(len(ids), 5, seed=7), normal(*ids.shape, seed=8)
    out = torch.zeros_like(x)
    for run in held:
        own = {name: tensor[run.start : run.stop] for name, tensor in tensors.items()}
        out += Experts(**own, activation=silu_gated, held=run)(x, weights, ids)
    torch.testing.assert_close(out, one_at_a_time(tensors, x, weights, ids), rtol=0, atol=1e-12)


def test_the_input_is_not_written_to() -> None:
    x, ids = normal(3, 5), torch.tensor([[0, 1], [1, 2], [2, 0]])
    before = x.clone()
    Experts(**random_experts(3), activation=silu_gated, held=range(3))(x, torch.ones(3, 2), ids)
    assert torch.equal(x, before)


def test_the_tanh_form_of_gelu_gates() -> None:
    gate_up = normal(4, 10)
    gate, up = gate_up.chunk(2, dim=1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    torch.testing.assert_close(gelu_tanh_gated(gate_up), expected, rtol=1e-12, atol=0)


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_k": 9}, "cannot choose 9 of 8 experts"),
        ({"num_groups": 3, "top_groups": 2}, "cannot choose 2 of 3 groups of 8 experts"),
        ({"num_groups": 4, "top_groups": 5}, "cannot choose 5 of 4 groups of 8 experts"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "cannot choose 3 of 2 experts"),
        ({"num_groups": 8, "top_groups": 2}, "8 groups of 1 expert"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(wrong: dict[str, int], message: str) -> None:
    experts = ExpertConfig(**{"count": 8, "top_k": 2, "inner": 4, **wrong})
    with pytest.raises(CheckpointError, match=message):
        require_experts(ConfigFile(Path("config.json"), {}), experts)


@pytest.mark.parametrize(
    ("key", "value"),
    [("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_router_activation_func", "softmax")],
)
def test_another_kind_of_router_is_refused_by_its_key(key: str, value: str) -> None:
    file = ConfigFile(Path("config.json"), {key: value})
    with pytest.raises(CheckpointError, match=f"{key}='{value}', which is not supported"):
        read_grouped_experts(file)
