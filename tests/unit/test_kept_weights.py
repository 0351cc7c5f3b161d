"""Codes and scales as the kernels want them stand for the numbers that a checkpoint's definition gives."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raycache.checkpoint.dummy import QuantisedDummyWeights
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.stored_slice import Format, StoredSlice
from raycache.checkpoint.weights_form import weights_form, why_dequantised
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.deployment.weights import model_identity, with_weights_form
from raycache.errors import CheckpointError, ConfigError
from raycache.layers.kept_weights import (
    Cut,
    KeptWeights,
    each_expert,
    fp8_matrices,
    fp8_matrix,
    fp8_obstacle,
    mx_matrices,
    mx_obstacle,
)
from raycache.models.base import read_config
from raycache.parallel.devices import GpuModel
from tests.oracle.families import make_family
from tests.oracle.quantised import Form, fp8_blocks, fp8_channels, fp8_tensor, mxfp4_experts, write_quantised
from tests.oracle.stored import draw_fp8, draw_mxfp4
from tests.oracle.weights import dequantised, open_weights

CPU = torch.device("cpu")
HOPPER, ADA = GpuModel("NVIDIA H200", (9, 0)), GpuModel("NVIDIA L40S", (8, 9))


def close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and bool(torch.allclose(found.double(), right.double(), rtol=1e-6, atol=0))


def write(folder: Path, family: str, form: Form, **settings: object) -> Path:
    source = make_family(folder / "source", family, num_hidden_layers=1, **settings)
    write_quantised(source, folder / "model", folder / "plain", form)
    return folder / "model"


@pytest.mark.parametrize("form", [fp8_blocks(), fp8_tensor(), fp8_channels()], ids=["blocks", "tensor", "channels"])
@pytest.mark.parametrize(
    ("axis", "taken"), [(0, range(64, 320)), (0, range(384)), (1, range(40, 300)), (1, range(128, 256))]
)
def test_a_cut_of_an_fp8_matrix(tmp_path: Path, form: Form, axis: int, taken: range) -> None:
    sizes = {"hidden_size": 320, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = write(tmp_path, "qwen3", form, **sizes)
    name, shape = ("gate_proj", (384, 320)) if axis == 0 else ("down_proj", (320, 384))
    name = f"model.layers.0.mlp.{name}.weight"
    right = load_file(tmp_path / "plain" / "model.safetensors")[name].narrow(axis, taken.start, len(taken))
    one = open_weights(model, dtype=torch.float32, device=CPU).stored(
        name, shape=shape, axis=axis, start=taken.start, stop=taken.stop
    )
    assert one is not None
    assert not fp8_obstacle([one, one])
    assert close(dequantised(fp8_matrix([one])), right)
    assert close(dequantised(fp8_matrix([one, one])), torch.cat((right, right)))
    both = fp8_matrices(iter([[one, one], [one, one]]), 2, rows=range(2 * len(right) - 1, -1, -1))
    assert close(dequantised(both, num_inputs=right.shape[1]), torch.cat((right, right)).flip(0).expand(2, -1, -1))


@pytest.mark.parametrize("taken", [range(96), range(32, 64), range(24, 72), range(21, 58)])
def test_a_cut_of_gpt_oss_experts(tmp_path: Path, taken: range) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 96, "num_local_experts": 4, "layer_types": ["full_attention"]}
    model = write(tmp_path, "gpt_oss", mxfp4_experts(), **sizes)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    source = open_weights(model, dtype=torch.float32, device=CPU)
    at = "model.layers.0.mlp.experts"
    down = source.stored(f"{at}.down_proj", shape=(4, 96, 160), axis=1, start=taken.start, stop=taken.stop)
    pairs = range(2 * taken.start, 2 * taken.stop)
    up = source.stored(f"{at}.gate_up_proj", shape=(4, 160, 192), axis=2, start=pairs.start, stop=pairs.stop)
    assert up is not None
    assert down is not None
    assert not mx_obstacle([up])
    right = plain[f"{at}.down_proj"][:, taken.start : taken.stop].mT
    assert close(dequantised(mx_matrices(each_expert([down]), 4), num_inputs=right.shape[2]), right)
    gate_first = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
    right = plain[f"{at}.gate_up_proj"][..., pairs.start : pairs.stop].mT[:, gate_first]
    assert close(dequantised(mx_matrices(each_expert([up]), 4, rows=gate_first), num_inputs=right.shape[2]), right)


def test_random_codes_at_odd_columns() -> None:
    for start in (0, 1, 13, 31):
        one, numbers = draw_mxfp4(2, 6, 131, seed=start, start=start)
        assert close(dequantised(mx_matrices(each_expert([one]), 2), num_inputs=131), torch.from_numpy(numbers))
        wrong = replace(one, scales=one.scales.roll(1, -1))
        assert not close(dequantised(mx_matrices(each_expert([wrong]), 2), num_inputs=131), torch.from_numpy(numbers))
    for offset in ((0, 0), (5, 0), (0, 77), (127, 127)):
        fp8, right = draw_fp8(200, 300, seed=sum(offset), offset=offset)
        assert close(dequantised(fp8_matrix([fp8])), torch.from_numpy(right))
        wrong = replace(fp8, scales=fp8.scales.roll(1, 0))
        assert not close(dequantised(fp8_matrix([wrong])), torch.from_numpy(right))


def test_scales_take_no_more_memory_than_their_blocks_where_these_begin_with_the_first_row() -> None:
    whole, cut = (draw_fp8(256, 256, seed=1, offset=(rows, 0))[0] for rows in (0, 64))
    aligned, shifted = (fp8_matrices(iter([[one]]), 1) for one in (whole, cut))
    assert aligned._scales.shape == (1, 2, 2)
    assert shifted._scales.shape == (1, 256, 2)


def test_what_no_kernel_takes_has_a_reason() -> None:
    fp8, _ = draw_fp8(128, 256, seed=1)
    mx, _ = draw_mxfp4(2, 4, 64, seed=1)
    assert "blocks of 64 columns" in fp8_obstacle([replace(fp8, block=(128, 64), scales=fp8.scales.repeat(1, 2))])
    assert "transposed" in fp8_obstacle([replace(fp8, is_transposed=True)])
    assert "MXFP4" in fp8_obstacle([mx])
    assert "different columns" in fp8_obstacle([fp8, replace(fp8, offset=(0, 5))])
    assert "above 2" in mx_obstacle([replace(mx, scales=mx.scales + 12)])
    assert not mx_obstacle([replace(mx, scales=mx.scales.clamp(128, 128))])
    assert "1 x 16" in mx_obstacle([replace(mx, block=(1, 16))])


class NamedSlices:
    """A weight source that has stored slices only; None is for plain tensors."""

    def __init__(self, **slices: StoredSlice | None) -> None:
        self._slices = slices

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def read(self, name: str, **where: object) -> Tensor:
        raise NotImplementedError

    def stored(self, name: str, **where: object) -> StoredSlice | None:
        return self._slices[name]


def test_nothing_is_kept_without_kernels(caplog: pytest.LogCaptureFixture) -> None:
    fp8, _ = draw_fp8(136, 256, seed=1)
    source = NamedSlices(**dict.fromkeys(("a.weight", "b.weight"), fp8))
    cuts = [Cut(f"{name}.weight", (136, 256), axis=0, taken=range(136)) for name in ("a", "b")]
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
        assert KeptWeights(source, torch.device(device), dtype).matrix(cuts) is None
    assert not caplog.records
    kept = KeptWeights(source, torch.device("cuda"), torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for cut in cuts:
            assert kept.matrix([cut]) is None
    (record,) = caplog.records
    assert "a.weight and others like it are dequantised" in record.message
    assert "136 output features are not a multiple" in record.message


def test_a_gang_with_a_gpu_without_kernels_dequantises_on_all_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write(tmp_path, "qwen3", fp8_blocks())
    deployment = Deployment(Config(model=str(model), dtype="bfloat16"), read_config(model), "cuda")
    wanted = {
        weights: replace(deployment, config=replace(deployment.config, weights=weights))
        for weights in ("auto", "stored", "bfloat16")
    }
    for one in wanted.values():
        assert with_weights_form(one, [HOPPER, HOPPER]) == one
    with caplog.at_level(logging.INFO):
        assert with_weights_form(wanted["auto"], [HOPPER, ADA, ADA]) == wanted["bfloat16"]
        assert with_weights_form(wanted["bfloat16"], [ADA]) == wanted["bfloat16"]
    (record,) = caplog.records
    reason = "no kernels for block FP8 weights on NVIDIA L40S (compute capability 8.9)"
    assert record.message == f"{reason}; they are dequantised to bfloat16"
    with pytest.raises(ConfigError, match=f"^{re.escape(reason)}; pass --weights auto"):
        with_weights_form(wanted["stored"], [HOPPER, ADA])
    forms = {weights: model_identity(one).weights.split(" weights ")[1] for weights, one in wanted.items()}
    assert forms == {
        "auto": "stored, else bfloat16",
        "stored": "stored, else bfloat16",
        "bfloat16": "dequantised to bfloat16",
    }


def test_plain_weights_need_no_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_family(tmp_path, "qwen3")
    deployment = Deployment(Config(model=str(model), dtype="bfloat16"), read_config(model), "cuda")
    with caplog.at_level(logging.INFO):
        assert with_weights_form(deployment, [ADA]) == deployment
    assert not caplog.records


def test_an_odd_number_of_output_features_has_no_mxfp4_kernel() -> None:
    (odd,), (even,) = (next(each_expert([draw_mxfp4(1, size, 64, seed=1)[0]])) for size in (3, 4))
    assert "odd number of output features" in mx_obstacle([odd])
    assert "odd number of output features" in mx_obstacle([odd, even])
    assert not mx_obstacle([odd, odd])


def test_experts_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredSlice, "to", lambda one, device: one)
    ((one,),) = each_expert([draw_mxfp4(1, 4, 64, seed=1)[0]])
    other, _ = draw_fp8(4, 64, seed=1)
    cuts = [[Cut(name, (4, 64), axis=0, taken=range(4))] for name in ("a", "b")]
    for second, reason in (
        (replace(one, scales=one.scales + 12), "scales above 2"),
        (other, "beside MXFP4"),
        (None, "it is not quantised"),
    ):
        kept = KeptWeights(NamedSlices(a=one, b=second), torch.device("cuda"), torch.bfloat16)
        with pytest.raises(CheckpointError, match=f"b cannot stay quantised like a: .*{reason}; pass --weights bf"):
            kept.experts(cuts)


def test_a_source_gives_only_formats_that_are_kept(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3", fp8_blocks())
    quantisation = read_quantisation(model)
    assert quantisation is not None
    form = weights_form(quantisation, "auto", dtype=torch.bfloat16, device_type="cuda")
    assert form.stored == {Format.FP8_BLOCK}
    assert weights_form(quantisation, "auto", dtype=torch.float16, device_type="cuda").stored == set()
    assert weights_form(quantisation, "bfloat16", dtype=torch.bfloat16, device_type="cuda").stored == set()
    assert why_dequantised(quantisation, "stored", dtype=torch.bfloat16, device_type="cuda") == []
    assert "float16" in why_dequantised(quantisation, "stored", dtype=torch.float16, device_type="cuda")[0]
    source = open_weights(model, dtype=torch.bfloat16, device=CPU)
    source._kept = frozenset()
    shape = tuple(load_file(model / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].shape)
    assert source.stored("model.layers.0.mlp.up_proj.weight", shape=shape) is None


def test_drawn_codes_have_the_size_of_drawn_numbers(tmp_path: Path) -> None:
    folders = (
        write(tmp_path / "a", "qwen3", fp8_blocks()),
        write(tmp_path / "b", "gpt_oss", mxfp4_experts(), layer_types=["full_attention"]),
    )
    for folder, name, shape in (
        (folders[0], "model.layers.0.mlp.up_proj.weight", (256, 384)),
        (folders[1], "model.layers.0.mlp.experts.down_proj", (4, 96, 160)),
    ):
        quantisation = read_quantisation(folder)
        assert quantisation is not None
        source = QuantisedDummyWeights(CPU, torch.float32, quantisation, kept=tuple(Format))
        whole, cut = source.stored(name, shape=shape), source.stored(name, shape=shape, axis=1, start=40, stop=73)
        assert whole is not None
        assert cut is not None
        numbers = whole.dequantised(torch.float32)
        inputs = shape[-1] if len(shape) == 2 else shape[-2]
        assert 0.6 < float(numbers.std()) * inputs**0.5 < 1.5
        assert torch.equal(cut.dequantised(torch.float32), numbers[:, 40:73])
        assert source.read(name, shape=shape).std() > 0
    assert source.stored("model.layers.0.self_attn.q_proj.weight", shape=(64, 64)) is None  # is excluded
    assert QuantisedDummyWeights(CPU, torch.float32, quantisation, kept=()).stored(name, shape=shape) is None


def test_numbers_of_the_definition() -> None:
    one, numbers = draw_fp8(3, 128, seed=0, block=(3, 128))
    assert np.array_equal(one.dequantised(torch.float64).numpy().astype(np.float32), numbers.astype(np.float32))
