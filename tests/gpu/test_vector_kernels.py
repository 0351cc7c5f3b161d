"""Products with one and two tokens against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raycache.layers.linear import RowBlocks, linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU or later"
    ),
]

SIZES = [(1, 64), (7, 104), (513, 2048), (2048, 4096), (12352, 2048), (2880, 4096), (5120, 2880), (300, 7168), (3, 8)]
SIZES += [(4096, 6144), (67, 5120), (33, 4616), (7, 5000), (9, 8192), (300, 520)]  # most as two powers of two
SIZES += [(70001, 1024), (303, 9728), (41, 12288), (5, 14336), (6, 25600), (3, 32768)]


def draw(*shape: int, seed: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, device="cuda").to(torch.bfloat16)


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    from raycache.layers import vector_kernels

    assert vector_kernels.takes(x, weight, bias)
    compare(linear(x, weight, bias), x, weight, bias)


def compare(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # A float32 sum and one rounding to bfloat16.
    bound = right.abs() * 2**-8 + (x.double().abs() @ weight.double().abs().T) * 1e-6
    assert bool(((found.double() - right).abs() <= bound).all())


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("size", "depth"), SIZES)
@torch.inference_mode()
def test_products(size: int, depth: int, has_bias: bool, tokens: int) -> None:
    check(draw(tokens, depth, seed=1), draw(size, depth, seed=2), draw(size, seed=3) if has_bias else None)


@torch.inference_mode()
def test_views() -> None:
    weight, x = draw(400, 1024, seed=1), draw(3, 2048, seed=2)
    check(x[1:2, 512:1024], weight[100:300, 256:768], None)
    check(x[2:, :1024], weight[::2], None)
    check(x[::2, 8:520], weight[:, 8:520], None)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("rows", "depth"), [(100, 1024), (7, 104), (4096, 4096)])
@torch.inference_mode()
def test_blocks_of_rows(rows: int, depth: int, has_bias: bool, tokens: int) -> None:
    from raycache.layers import vector_kernels

    whole = draw(3, 2 * rows, depth, seed=1)
    blocks, x = whole[:, rows:], draw(tokens, depth, seed=2)
    bias = draw(3 * rows, seed=3) if has_bias else None
    assert vector_kernels.takes(x, blocks, bias)
    compare(RowBlocks(blocks).multiply(x, bias), x, blocks.flatten(0, 1), bias)
    several = draw(5, depth, seed=4)
    compare(RowBlocks(blocks).multiply(several), several, blocks.flatten(0, 1), None)
    if bias is not None:  # which is added to a product that has been rounded
        product = RowBlocks(blocks).multiply(several)
        assert torch.equal(RowBlocks(blocks).multiply(several, bias), product + bias)
    assert RowBlocks(blocks).multiply(several[:0], bias).shape == (0, 3 * rows)


@torch.inference_mode()
def test_tensors_that_the_kernel_does_not_take_are_multiplied_by_torch() -> None:
    from raycache.layers import vector_kernels

    weight, x = draw(64, 136, seed=1), draw(1, 136, seed=2)
    for own, other in (
        (x[:, 1:129], weight[:, :128]),
        (x[:, :128], weight[:, 1:129]),
        (x[:, :100], draw(9, 100, seed=3)),
        (draw(2, 132, seed=4)[:, :128], weight[:, :128]),
        (draw(3, 128, seed=4), weight[:, :128]),
        (draw(1, 40000, seed=5), draw(3, 40000, seed=6)),
        (x.half(), weight.half()),
    ):
        assert not vector_kernels.takes(own, other, None)
        torch.testing.assert_close(linear(own, other), torch.nn.functional.linear(own, other))
    assert linear(draw(1, 128, seed=7)[:0], weight[:, :128]).shape == (0, 64)


@pytest.mark.parametrize("tokens", [1, 2])
def test_no_number_is_loaded_by_itself(tokens: int) -> None:
    import triton

    from raycache.layers import vector_kernels
    from raycache.parallel.devices import early

    features, rest, rows, num_warps = vector_kernels._tile(6144, tokens)
    compiled = vector_kernels._multiply.warmup(
        *[triton.MockTensor(torch.bfloat16)] * 4,
        *(4096, 6144, 4096, 0, 6144),
        TOKENS=tokens,
        NUM_FEATURES=6144,
        FEATURES=features,
        REST=rest,
        ROWS=rows,
        HAS_BIAS=False,
        num_warps=num_warps,
        grid=(1,),
        **early(torch.device("cuda")),
    )
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "ld.global.b16" not in compiled.asm["ptx"]


@pytest.mark.parametrize("tokens", [1, 2])
@torch.inference_mode()
def test_one_behind_the_other_in_a_graph(tokens: int) -> None:
    """Each reads its weights before the kernel before it has ended, and its input only then."""
    weights = [draw(1024, 1024, seed=i) / 32 for i in range(24)]
    x = draw(tokens, 1024, seed=99)

    def run() -> Tensor:
        value = x
        for weight in weights:
            value = linear(value, weight)
        return value

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run()
    for seed in range(20):
        x.copy_(draw(tokens, 1024, seed=seed))
        graph.replay()
        one_by_one = x
        for weight in weights:
            one_by_one = linear(one_by_one, weight)
            torch.cuda.synchronize()
        assert torch.equal(recorded, one_by_one)
