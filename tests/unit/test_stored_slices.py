"""Slices of quantised tensors = the same slices of whole tensors dequantised in numpy; damage is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from raycache.checkpoint.slices import CHUNK, chunks
from raycache.checkpoint.stored_slice import Format, decode
from raycache.checkpoint.tensor_files import OUTLINE, SINGLE, Checkpoint
from raycache.checkpoint.weights import CheckedNames, CheckpointWeights
from raycache.errors import CheckpointError
from tests.oracle.number_formats import E2M1, E4M3, INT4, Numbers
from tests.oracle.quantised import Form, fp8_blocks, fp8_channels, fp8_tensor, int4_groups, mxfp4_experts, nvfp4
from tests.oracle.weights import open_weights

CPU = torch.device("cpu")
MATRIX = (52, 96)
EXPERTS = (3, 96, 20)
FORMS: dict[str, tuple[Callable[[], Form], Format]] = {
    "fp8 blocks": (lambda: fp8_blocks((24, 40)), Format.FP8_BLOCK),
    "fp8 blocks in bfloat16": (lambda: fp8_blocks((16, 16), scale_dtype=torch.bfloat16), Format.FP8_BLOCK),
    "fp8 per tensor": (fp8_tensor, Format.FP8_TENSOR),
    "fp8 per channel": (fp8_channels, Format.FP8_CHANNEL),
    "int4": (int4_groups, Format.INT4),
    "nvfp4": (nvfp4, Format.NVFP4),
    "nvfp4, compressed-tensors": (lambda: nvfp4(by="compressed-tensors"), Format.NVFP4),
    "mxfp4": (mxfp4_experts, Format.MXFP4),
}


def name_and_shape(form: str) -> tuple[str, tuple[int, ...]]:
    return ("experts.up", EXPERTS) if form == "mxfp4" else ("layer.up.weight", MATRIX)


def write(folder: Path, form: str) -> Numbers:
    """A checkpoint with one tensor; what its numbers are."""
    folder.mkdir(exist_ok=True)
    name, shape = name_and_shape(form)
    made = FORMS[form][0]()
    tensors, numbers = made.quantise(name.removesuffix(".weight"), np.random.default_rng(0).normal(size=shape))
    save_file({part: tensor.contiguous() for part, tensor in tensors.items()}, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": made.config}))
    if made.file != "config.json":
        (folder / "config.json").write_text("{}")
        (folder / made.file).write_text(json.dumps(made.config))
    return numbers


@pytest.fixture(scope="module", params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Numbers]:
    folder = tmp_path_factory.mktemp("form")
    return request.param, folder, write(folder, request.param)


def source(folder: Path, dtype: torch.dtype = torch.float32) -> CheckpointWeights:
    return open_weights(folder, dtype=dtype, device=CPU)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slice_is_that_of_the_whole(case: tuple[str, Path, Numbers], data: st.DataObject) -> None:
    form, folder, numbers = case
    name, shape = name_and_shape(form)
    axis = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[axis]))
    stop = data.draw(st.one_of(st.none(), st.integers(start, shape[axis] + 3)))
    found = source(folder).read(name, shape=shape, axis=axis, start=start, stop=stop)
    wanted = np.moveaxis(np.moveaxis(numbers, axis, 0)[start:stop], 0, axis)
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-7, atol=0)
    if found.numel():
        stored = source(folder).stored(name, shape=shape, axis=axis, start=start, stop=stop)
        assert stored is not None and stored.format is FORMS[form][1]
        assert torch.equal(stored.dequantised(torch.float32), found)
        assert stored.num_bytes < found.nbytes


def test_the_whole_is_rounded_once(case: tuple[str, Path, Numbers]) -> None:
    form, folder, numbers = case
    name, shape = name_and_shape(form)
    found = source(folder, torch.bfloat16).read(name, shape=shape)
    assert torch.equal(found, torch.from_numpy(numbers).float().to(torch.bfloat16))


@pytest.mark.parametrize(("table", "form"), [(E4M3, Format.FP8_TENSOR), (E2M1, Format.MXFP4), (INT4, Format.INT4)])
def test_every_code_stands_for_its_number(table: Numbers, form: Format) -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = table[codes] if len(table) == 256 else np.stack((table[codes & 15], table[codes >> 4]), 1).ravel()
    stored = torch.from_numpy(codes)
    found = decode(form, stored.view(torch.float8_e4m3fn) if len(table) == 256 else stored)
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_parts_of_a_box_are_small_and_make_it_up() -> None:
    box = (range(2, 5), range(1, 4000), range(0, 1500))
    parts = list(chunks(box))
    sizes = [len(part[0]) * len(part[1]) * len(part[2]) for part in parts]
    assert max(sizes) <= CHUNK and sum(sizes) == 3 * 3999 * 1500 and len(set(parts)) == len(parts)


def damage(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
    return folder


def scale_name(form: str) -> str:
    return {"mxfp4": "experts.up_scales"}.get(form, f"layer.up.weight_scale{'_inv' if 'blocks' in form else ''}")


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 per channel", "int4", "nvfp4", "mxfp4"])
def test_scales_that_are_off_by_one_block_change_the_numbers(tmp_path: Path, form: str) -> None:
    numbers = write(tmp_path, form)
    name, shape = name_and_shape(form)

    def move(tensors: dict[str, Tensor]) -> None:
        scales = tensors[scale_name(form)]
        tensors[scale_name(form)] = scales.view(torch.uint8).roll(scales.element_size()).view(scales.dtype)

    found = source(damage(tmp_path, move)).read(name, shape=shape)
    assert np.abs(found.numpy() - numbers).max() > 0.01


@pytest.mark.parametrize("form", ["int4", "nvfp4", "mxfp4"])
def test_swapped_halves_of_bytes_change_the_numbers(tmp_path: Path, form: str) -> None:
    numbers = write(tmp_path, form)
    name, shape = name_and_shape(form)

    def swap(tensors: dict[str, Tensor]) -> None:
        codes = next(part for part in tensors if part.endswith(("_blocks", "_packed", ".weight")))
        byte = tensors[codes].view(torch.uint8)
        tensors[codes] = (byte >> 4 | byte << 4).view(tensors[codes].dtype)

    found = source(damage(tmp_path, swap)).read(name, shape=shape)
    assert np.abs(found.numpy() - numbers).max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_a_scale_that_is_not_finite_is_found_before_and_while_reading(tmp_path: Path, form: str) -> None:
    write(tmp_path, form)
    name, shape = name_and_shape(form)

    def spoil(tensors: dict[str, Tensor]) -> None:
        scales = tensors[scale_name(form)]
        is_code = scales.element_size() == 1
        if is_code:  # the NaN of E4M3 and of E8M0
            scales.view(torch.uint8).flatten()[-1] = 0x7F if form.startswith("nvfp4") else 0xFF
        else:
            scales.view(-1)[-1] = torch.inf

    checkpoint = Checkpoint(damage(tmp_path, spoil))
    for reader in (source(tmp_path), CheckedNames(checkpoint)):
        with pytest.raises(CheckpointError, match=rf"tensor {scale_name(form)} in .* has a scale that is not finite"):
            reader.read(name, shape=shape)


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_missing_or_of_another_shape_or_type_are_named(tmp_path: Path, form: str) -> None:
    name, shape = name_and_shape(form)
    changes: list[tuple[Callable[[Tensor], Tensor | None], str]] = [
        (lambda scales: None, f"no tensor {scale_name(form)}"),
        (lambda scales: torch.stack([scales, scales]), f"tensor {scale_name(form)} in model.safetensors is .* wants"),
        (
            lambda scales: torch.zeros(scales.shape, dtype=torch.int64),
            f"tensor {scale_name(form)} in .* is I64 .* wants",
        ),
    ]
    for change, message in changes:
        write(tmp_path, form)

        def apply(tensors: dict[str, Tensor], change: Callable[[Tensor], Tensor | None] = change) -> None:
            changed = change(tensors.pop(scale_name(form)))
            if changed is not None:
                tensors[scale_name(form)] = changed

        with pytest.raises(CheckpointError, match=message):
            CheckedNames(Checkpoint(damage(tmp_path, apply))).read(name, shape=shape)


def test_headers_without_numbers_are_enough_to_check_names(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4, compressed-tensors")
    data = (tmp_path / SINGLE).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    (tmp_path / SINGLE).write_bytes(data[:length] + bytes(len(data) - length))
    with pytest.raises(CheckpointError, match="weight_global_scale in .* is 0.0, which is not a valid scale"):
        CheckedNames(Checkpoint(tmp_path)).read("layer.up.weight", shape=MATRIX)
    (tmp_path / OUTLINE).touch()
    names = CheckedNames(Checkpoint(tmp_path))
    names.read("layer.up.weight", shape=MATRIX)
    assert not names.unread()


def test_columns_out_of_order_and_zero_points_are_refused(tmp_path: Path) -> None:
    for suffix in ("g_idx", "zero_point"):
        write(tmp_path, "int4")
        added = {f"layer.up.weight_{suffix}": torch.zeros(4, dtype=torch.int32)}
        damage(tmp_path, lambda tensors, added=added: tensors.update(added))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=f"has a tensor layer.up.weight_{suffix}"):
            CheckedNames(Checkpoint(tmp_path)).read("layer.up.weight", shape=MATRIX)


def test_codes_of_a_method_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "int4")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match="layer.up.weight_packed .* is INT4, of which config.json says nothing"):
        CheckedNames(Checkpoint(tmp_path)).read("layer.up.weight", shape=MATRIX)


def test_a_shard_that_is_cut_short_is_found_by_its_header(tmp_path: Path) -> None:
    write(tmp_path, "nvfp4")
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="the download is incomplete or damaged"):
        Checkpoint(tmp_path)


def test_transformers_dequantises_gpt_oss_to_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path, "mxfp4")
    parts = load_file(tmp_path / SINGLE)
    theirs = convert_moe_packed_tensors(parts["experts.up_blocks"], parts["experts.up_scales"], dtype=torch.float32)
    assert torch.equal(source(tmp_path).read("experts.up", shape=EXPERTS), theirs)


@pytest.mark.parametrize("form", ["fp8 blocks that fit", "fp8 per tensor", "fp8 per channel"])
def test_transformers_dequantises_fp8_to_the_same_numbers(tmp_path: Path, form: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMS, "fp8 blocks that fit", (lambda: fp8_blocks((26, 24)), Format.FP8_BLOCK))
        write(tmp_path, form)
    parts = load_file(tmp_path / SINGLE)
    dequantise = Fp8Dequantize(None)._dequantize_one
    theirs = dequantise(parts["layer.up.weight"], parts[scale_name(form)], torch.float32)
    assert torch.equal(source(tmp_path).read("layer.up.weight", shape=MATRIX), theirs)
