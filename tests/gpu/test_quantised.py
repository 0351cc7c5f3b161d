"""Products with weights that stay quantised, against float32 products with the numbers that they stand for.

MXFP4 products differ by the rounding of a result to bfloat16. FP8 products also round activations to FP8, as the format
has it; a reference that rounds them alike, by plain torch, shows that nothing else is lost.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache import LLM, SamplingParams
from raycache.checkpoint.stored_slice import StoredSlice
from raycache.layers.activation import Activation, clamped_swiglu, relu2, silu_gated, silu_scaled
from raycache.layers.experts import Experts
from raycache.layers.kept_weights import each_expert, fp8_matrices, fp8_matrix, mx_matrices
from raycache.layers.quantised_experts import QuantisedExperts
from tests.oracle import tiny_tokenizers
from tests.oracle.families import make_family
from tests.oracle.quantised import fp8_blocks, mxfp4_experts, write_quantised
from tests.oracle.stored import draw_fp8, draw_mxfp4
from tests.oracle.weights import dequantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

EXACT = 6e-3
"""Of the norm: sums in another order, one rounding to bfloat16 per product."""
FORMAT = 5e-2
"""Of the norm: what rounding activations to FP8 does, twice in a layer of experts."""
TOKENS = (1, 2, 3, 5, 8, 12, 13, 64, 127, 128, 129, 300)
CUDA = torch.device("cuda")


def error(found: Tensor, right: Tensor) -> float:
    return float(torch.linalg.norm(found.float() - right.float()) / torch.linalg.norm(right.float()))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(torch.bfloat16)


def rounded(x: Tensor, offset: int = 0) -> Tensor:
    """Activations as FP8 with a scale per 128 of a row has them, whose groups begin `offset` features earlier."""
    padded = torch.nn.functional.pad(x.float(), (offset, -(x.shape[1] + offset) % 128)).unflatten(1, (-1, 128))
    scales = padded.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return ((padded / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)[:, offset : offset + x.shape[1]]


def on_gpu(slices: list[StoredSlice]) -> list[StoredSlice]:
    return [one.to(CUDA) for one in slices]


def exact(*numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(numbers)).float().cuda()


@pytest.mark.parametrize(
    ("rows", "columns", "block", "offset"),
    [
        ((1536, 576), 1280, (128, 128), (0, 0)),
        ((192, 192), 1024, (128, 128), (64, 0)),
        ((512,), 704, (128, 128), (0, 96)),
        ((128,), 1024, (128, 128), (0, 0)),
        ((64,), 128, (128, 128), (0, 0)),
        ((256,), 640, (1, 640), (0, 0)),
        ((384,), 640, (384, 640), (0, 0)),
    ],
)
@torch.inference_mode()
def test_fp8_products(rows: tuple[int, ...], columns: int, block: tuple[int, int], offset: tuple[int, int]) -> None:
    drawn = [draw_fp8(size, columns, seed=i, block=block, offset=offset) for i, size in enumerate(rows)]
    matrix = fp8_matrix(on_gpu([one for one, _ in drawn]))
    weights = exact(*(numbers for _, numbers in drawn))
    assert error(dequantised(matrix), weights) < 1e-6
    bias = draw(len(weights), seed=99)
    for num_tokens in TOKENS:
        x = draw(num_tokens, columns, seed=num_tokens)
        found = matrix.multiply(x, bias)
        assert found.shape == (num_tokens, len(weights))
        assert error(found, rounded(x, offset[1]) @ weights.mT + bias.float()) < EXACT, num_tokens
        assert error(found, x.float() @ weights.mT + bias.float()) < FORMAT, num_tokens


@torch.inference_mode()
def test_a_scale_that_is_off_by_one_block_is_noticed() -> None:
    one, numbers = draw_fp8(512, 1024, seed=1)
    x, weights = draw(64, 1024, seed=2), exact(numbers)
    for dim in (0, 1):
        wrong = fp8_matrix(on_gpu([replace(one, scales=one.scales.roll(1, dim))]))
        assert error(wrong.multiply(x), x.float() @ weights.mT) > 5 * FORMAT


def fp8_experts(count: int, size: int, inner: int, offset: int) -> tuple[QuantisedExperts, Experts]:
    up = [[draw_fp8(inner, size, seed=2 * e + part) for part in range(2)] for e in range(count)]
    down = [[draw_fp8(size, inner, seed=1000 + e, offset=(0, offset))] for e in range(count)]
    kept = (fp8_matrices(iter([on_gpu([one for one, _ in own]) for own in group]), count) for group in (up, down))
    right = (torch.stack([exact(*(numbers for _, numbers in own)) for own in group]) for group in (up, down))
    return (
        QuantisedExperts(*kept, count=count, activation=silu_gated),
        Experts(*right, activation=silu_gated, held=range(count)),
    )


def mx_experts(
    count: int, size: int, inner: int, start: int, *, activation: Activation | None = None, has_bias: bool = True
) -> tuple[QuantisedExperts, Experts]:
    activation = activation or clamped_swiglu(alpha=1.702, limit=7.0)
    features = inner if activation is relu2 else 2 * inner
    up, down = draw_mxfp4(count, features, size, seed=1), draw_mxfp4(count, size, inner, seed=2, start=start)
    gate_first = [*range(0, features, 2), *range(1, features, 2)]
    biases = {"up_bias": draw(count, features, seed=3), "down_bias": draw(count, size, seed=4)} if has_bias else {}
    quantised = QuantisedExperts(
        mx_matrices(map(on_gpu, each_expert([up[0]])), count, rows=gate_first),
        mx_matrices(map(on_gpu, each_expert([down[0]])), count),
        count=count,
        activation=activation,
        **biases,
    )
    right = exact(up[1])[:, gate_first], exact(down[1])
    plain = {name: bias.float() for name, bias in biases.items()}
    return quantised, Experts(*right, activation=activation, held=range(count), **plain)


def choose(num_tokens: int, count: int, chosen: int) -> tuple[Tensor, Tensor]:
    scores = torch.rand(num_tokens, count, generator=torch.Generator("cuda").manual_seed(num_tokens), device="cuda")
    scores[:, 3] = -1  # nobody's choice
    weights, ids = scores.topk(chosen)
    return weights, ids


@pytest.mark.parametrize("activation", [silu_scaled(factor=0.7), relu2], ids=["without a kernel", "without a gate"])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_other_activations_of_mxfp4_experts(activation: Activation, has_bias: bool) -> None:
    fast, slow = mx_experts(16, 320, 216, 72, activation=activation, has_bias=has_bias)
    for num_tokens in (1, 3, 100):
        x, (weights, ids) = draw(num_tokens, 320, seed=5), choose(num_tokens, 16, 4)
        assert error(fast(x, weights, ids), slow(x.float(), weights, ids)) < EXACT, num_tokens


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 64, 300, 1500])
@pytest.mark.parametrize(
    ("kind", "count", "sizes", "bound"),
    [
        ("fp8", 16, (512, 256, 0), FORMAT),
        ("fp8", 16, (384, 192, 64), FORMAT),
        ("mxfp4", 16, (576, 480, 0), EXACT),
        ("mxfp4", 16, (320, 216, 72), EXACT),
        ("mxfp4", 16, (320, 211, 13), EXACT),
        ("mxfp4", 128, (320, 216, 40), EXACT),
    ],
)
@torch.inference_mode()
def test_experts(kind: str, count: int, sizes: tuple[int, int, int], bound: float, num_tokens: int) -> None:
    chosen = 4
    fast, slow = (fp8_experts if kind == "fp8" else mx_experts)(count, *sizes)
    x = draw(num_tokens, sizes[0], seed=5)
    weights, ids = choose(num_tokens, count, chosen)
    found = fast(x, weights, ids)
    assert error(found, slow(x.float(), weights, ids)) < bound
    for _ in range(5):
        assert torch.equal(fast(x, weights, ids), found)  # nothing races
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = fast(x, weights, ids)
    ids.copy_(ids.roll(1, 0))
    x.mul_(0.5)
    graph.replay()
    assert error(recorded, slow(x.float(), weights, ids)) < bound


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@torch.inference_mode()
def test_scales_of_another_group_are_noticed(kind: str) -> None:
    fast, slow = fp8_experts(8, 512, 256, 0) if kind == "fp8" else mx_experts(8, 576, 480, 0)
    matrices = fast._up
    matrices._scales = matrices._scales.roll(1, 2 if kind == "fp8" else 1)  # type: ignore[attr-defined]
    x = draw(64, 512 if kind == "fp8" else 576, seed=5)
    weights, ids = choose(64, 8, 4)
    assert error(fast(x, weights, ids), slow(x.float(), weights, ids)) > 3 * FORMAT


CHECKPOINTS = {
    "deepseek_v3": (
        fp8_blocks,
        {"num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 384},
    ),
    "gpt_oss": (
        mxfp4_experts,
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_published_checkpoint_gives_the_same_text_in_both_forms(tmp_path: Path, family: str) -> None:
    form, settings = CHECKPOINTS[family]
    write_quantised(
        make_family(tmp_path / "source", family, **settings), tmp_path / "model", tmp_path / "plain", form()
    )
    model = tiny_tokenizers.byte_level(tmp_path / "model")
    prompts = [np.random.default_rng(i).integers(3, 500, 60).tolist() for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = {}
    for weights in ("bfloat16", "stored"):
        with LLM(str(model), device="cuda", dtype="bfloat16", weights=weights, num_pages=64, max_running=8) as llm:
            found[weights] = [one.logprobs[0].logprob for one in llm.generate(prompts, params)]
    worst = float(np.abs(np.subtract(found["bfloat16"], found["stored"])).max())
    assert worst < 0.2, worst  # 0 is right for MXFP4, whose numbers bfloat16 has exactly
