"""What the doctor says of quantised checkpoints, and of random weights in their place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.doctor import model as doctor_model
from launch.doctor.check import CheckResult, Outcome
from launch.doctor.command import examine
from raycache.checkpoint.counted import CountedWeights
from raycache.checkpoint.layout import Layouts
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.tensor_files import SINGLE, Checkpoint
from raycache.checkpoint.weights_form import WeightsForm
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.models.base import load_model, read_config
from raycache.parallel.context import ParallelContext
from raycache.parallel.devices import GpuModel
from tests.oracle.families import make_family
from tests.oracle.quantised import PLAIN, nvfp4, write_quantised
from tests.oracle.tiny_tokenizers import byte_level


def examined(model: Path, **settings: Any) -> dict[str, CheckResult]:
    found = list(examine({"model": str(model), "device": "cpu", "port": "auto", "kv_memory": "40MiB", **settings}))
    return {one.check: one for one in found}


def refused(found: dict[str, CheckResult]) -> dict[str, str]:
    return {subject: one.text for subject, one in found.items() if one.outcome is Outcome.FAILED}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_family(tmp_path_factory.mktemp("models") / "gpt-oss", "gpt_oss_mxfp4"))


def test_format_form_and_bytes_per_rank_are_named(gpt_oss: Path) -> None:
    found = examined(gpt_oss, tp=2)
    assert not refused(found)
    assert found["quantisation"].text == "MXFP4 (mxfp4, config.json); dequantised to float32 in memory"
    plain = examined(byte_level(gpt_oss / PLAIN), tp=2)
    assert "quantisation" not in plain and plain["weights per rank"] == found["weights per rank"]
    halved = examined(gpt_oss, tp=2, weights="bfloat16")
    assert halved["quantisation"].text.endswith("dequantised to bfloat16 in memory")


def test_random_weights_need_no_files_and_take_the_same_memory(gpt_oss: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(gpt_oss / name, tmp_path)
    found = examined(tmp_path, dummy_weights=True)
    assert not refused(found)
    assert found["weights"].text == "random, with the shapes in config.json"
    assert found["weights per rank"] == examined(gpt_oss)["weights per rank"]
    assert "random weights are float32" in found["quantisation"].text
    assert set(refused(examined(tmp_path))) == {"weights"}


def test_the_file_of_modelopt_is_read(tmp_path: Path) -> None:
    source = byte_level(make_family(tmp_path / "source", "qwen3_moe", moe_intermediate_size=64))
    write_quantised(source, tmp_path / "Qwen3-NVFP4", tmp_path / "plain", nvfp4())
    found = examined(tmp_path / "Qwen3-NVFP4")
    assert not refused(found)
    assert found["quantisation"].text.startswith("NVFP4 (modelopt, hf_quant_config.json)")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_other_methods_are_refused_with_the_variants_that_run(tmp_path: Path, method: str) -> None:
    folder = byte_level(make_family(tmp_path / "Some-8B-AWQ", "llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    text = refused(examined(folder))["model"]
    assert f"quant_method {method!r}, which is not supported; supported are FP8" in text and "\n" not in text
    assert "use Some-8B, the same model without that suffix, in bfloat16 or in one of these" in text


def test_a_scale_that_is_not_finite_is_refused(gpt_oss: Path, tmp_path: Path) -> None:
    shutil.copytree(gpt_oss, tmp_path / "copy")
    tensors = load_file(gpt_oss / SINGLE)
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name].flatten()[0] = 255
    save_file(tensors, tmp_path / "copy" / SINGLE)
    assert refused(examined(tmp_path / "copy")).keys() == {"weights"}
    assert f"tensor {name}" in refused(examined(tmp_path / "copy"))["weights"]


def test_kept_formats_take_the_bytes_of_their_codes_and_scales(gpt_oss: Path) -> None:
    checkpoint, dtype = Checkpoint(gpt_oss), torch.bfloat16
    layouts = Layouts(checkpoint, read_quantisation(gpt_oss))
    counted = CountedWeights(checkpoint, layouts, form=WeightsForm(frozenset({Format.MXFP4}), dtype), dtype=dtype)
    ctx = ParallelContext.single(torch.device("meta"))
    load_model(read_config(gpt_oss), counted, ctx, dtype, on_progress=lambda done, total: None)
    tensors = load_file(gpt_oss / SINGLE)
    kept = sum(one.nbytes for one in tensors.values() if one.dtype == torch.uint8)
    others = sum(2 * one.numel() for one in tensors.values() if one.dtype != torch.uint8)
    assert counted.num_bytes == {"MXFP4": kept, "bfloat16": others}


def test_a_gpu_without_kernels_is_named_with_what_becomes_of_the_weights(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_model, "_gpus", lambda deployment: [GpuModel("NVIDIA L40S", (8, 9))])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90 << 30, 90 << 30))

    def said(weights: str) -> CheckResult:
        config = Config(model=str(gpt_oss), dtype="bfloat16", weights=weights)
        deployment = Deployment(config, read_config(gpt_oss), "cuda")
        return next(one for one in doctor_model._memory(deployment) if one.check == "quantisation")

    reason = "no kernels for MXFP4 weights on NVIDIA L40S (compute capability 8.9)"
    assert said("auto").text.endswith(f"dequantised to bfloat16 in memory: {reason}")
    assert said("bfloat16").text.endswith("dequantised to bfloat16 in memory")
    assert said("stored").outcome is Outcome.FAILED and reason in said("stored").text
