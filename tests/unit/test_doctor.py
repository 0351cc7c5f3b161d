"""What the doctor says of models, splits and memory, and that it reads no weight for it."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from launch.cli.main import main
from launch.doctor.check import CheckResult, Outcome
from launch.doctor.command import examine, run
from launch.doctor.gpu import missing_kernels, read_topology, wanted_kernels
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.errors import ConfigError
from raycache.memory.component import CacheFormat, Component, kv, latent
from tests.oracle import tiny_tokenizers
from tests.oracle.families import make_family
from tests.oracle.tiny import make_tiny
from tests.oracle.wrappers import make_wrapper

KIB = 2**10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers, 8 heads, 2 KV heads of 16 numbers."""
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tiny")
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def examined(model: Path, **settings: Any) -> dict[str, CheckResult]:
    found = list(examine({"model": str(model), "device": "cpu", "port": "auto", **settings}))
    return {one.check: one for one in found}


def refused(found: dict[str, CheckResult]) -> set[str]:
    return {subject for subject, one in found.items() if one.outcome is Outcome.FAILED}


def test_a_model_that_can_be_served_is_refused_nowhere(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tiny), "--device", "cpu", "--port", "auto", "--kv-memory", "1MiB"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nno check failed, 2 warnings\n") and "torch: float32 on cpu" in said


def test_the_format_of_a_chat_model_is_told(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    turns = "{% for message in messages if message.role != 'developer' %}{{ message.content }}{% endfor %}"
    told = {
        turns: "plain: neither reasoning nor tool calls; the template ignores tools, so tools are refused",
        "{{ tools | tojson }}{# <tool_call> </tool_call> <think> </think> #}" + turns: (
            "hermes: reasoning between <think> and </think>, tool calls from <tool_call> on; "
            "developer messages become system messages"
        ),
        "{{ tools | tojson }}" + turns: "the format of calls is unknown",
    }
    for source, text in told.items():
        template.write_text(source)
        found = examined(tiny, chat_template=str(template))["chat format"]
        assert text in found.text
        assert (found.outcome is Outcome.WARNING) == ("unknown" in text)


def test_a_host_tier_of_a_model_with_windows_everywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    make_family(tmp_path, "mistral", sliding_window=64)
    (tmp_path / "tokenizer.json").symlink_to(tiny / "tokenizer.json")
    found = examined(tmp_path, host_memory="1GiB")["host tier"]
    assert (
        found.outcome is Outcome.FAILED and "none of whose layers keeps all tokens; use host_memory=none" in found.text
    )
    with pytest.raises(ConfigError, match=r"host_memory=1GiB is not supported"):
        check_model(Config(model=str(tmp_path), host_memory="1GiB"))
    assert check_model(Config(model=str(tmp_path))).num_layers == 4


def test_the_vision_part_of_a_model_is_said_to_be_left_out(tmp_path: Path) -> None:
    make_wrapper(tmp_path, "gemma3")
    assert "the text part of a gemma3, whose vision part is not loaded" in examined(tmp_path)["model"].text


@pytest.mark.parametrize(
    ("split", "page_bytes"),
    [
        # k and v, KV heads, numbers, bytes, layers, tokens
        ({}, 2 * 2 * 16 * 4 * 4 * 64),
        ({"tp": 2}, 2 * 1 * 16 * 4 * 4 * 64),
        ({"tp": 4}, 2 * 1 * 16 * 4 * 4 * 64),  # more ranks than KV heads
        ({"pp": 3}, 2 * 2 * 16 * 4 * 2 * 64),  # the fullest of 2 + 1 + 1 layers
        ({"cp": 4}, 2 * 2 * 16 * 4 * 4 * 16),
        ({"dtype": "bfloat16"}, 2 * 2 * 16 * 2 * 4 * 64),
        ({"tp": 2, "pp": 2, "cp": 2, "page_size": 32}, 2 * 1 * 16 * 4 * 2 * 16),
    ],
)
def test_the_cache_is_counted_for_the_fullest_rank(tiny: Path, split: dict[str, Any], page_bytes: int) -> None:
    found = examined(tiny, kv_memory="10MiB", **split)
    size = f"{page_bytes / KIB:.1f} KiB per page"
    assert found["cache per rank"].text.endswith(size)
    pages = 10 * KIB**2 // page_bytes
    assert found["cache"].text.startswith(f"{pages} pages, {pages * split.get('page_size', 64)} tokens")


def test_weights_are_divided_over_tensor_and_pipeline_ranks_and_converted(tiny: Path) -> None:
    def weights(**split: int | str) -> float:
        return float(examined(tiny, **split)["weights per rank"].text.split()[1])

    whole = (tiny / "model.safetensors").stat().st_size / KIB
    assert weights() == pytest.approx(whole, rel=0.01)
    assert weights(tp=2, pp=2, cp=2) == pytest.approx(whole / 4, rel=0.01)
    assert weights(dtype="float16") == pytest.approx(whole / 2, rel=0.01)


def test_all_refusals_are_shown_and_not_the_first_only(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"tp": 3, "pp": 5, "cp": 7, "max_model_len": 5000, "max_body": "much", "chat_template": "/nowhere"}
    found = list(examine({"model": str(tiny), "device": "cpu", "port": "auto", **wrong}))
    texts = " ".join(one.text for one in found if one.outcome is Outcome.FAILED)
    for name in ("tp=3", "pp=5", "cp=7", "max_model_len=5000", "max_body", "/nowhere"):
        assert name in texts
    assert run({"model": str(tiny), "port": "auto", **wrong}) == 1
    assert re.search(r"\nthe other .*\n\n6 of \d+ checks failed: launch would not start\n$", capsys.readouterr().out)


def test_settings_that_only_together_do_not_work_are_refused_once(tiny: Path) -> None:
    found = list(examine({"model": str(tiny), "device": "cpu", "port": "auto", "cp": 6, "page_size": 32}))
    assert [one.check for one in found if one.outcome is Outcome.FAILED] == ["settings"]
    assert not refused(examined(tiny, cp=3, page_size=96))


@pytest.mark.parametrize("family", ["gemma3", "kimi_linear"])
def test_a_hybrid_that_can_be_served_is_refused_nowhere(family: str, tmp_path: Path) -> None:
    folder = tiny_tokenizers.byte_level(make_family(tmp_path / family, family))
    found = examined(folder, tp=2, cp=2)
    assert refused(found) == set()
    assert "num_attention_heads" in found["tensor split"].text


def test_an_fp8_cache_is_refused_where_there_are_no_latents(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype=fp8 is for latents"):
        check_model(Config(model=str(tiny), kv_dtype="fp8"))


def test_an_unknown_setting_is_refused_and_the_rest_is_examined(tiny: Path) -> None:
    found = examined(tiny, tensor_parallel=2)
    assert "'tensor_parallel'" in found["settings"].text and found["model"].outcome is Outcome.OK


def test_a_missing_directory_is_one_refusal(tmp_path: Path) -> None:
    found = examined(tmp_path / "nothing")
    assert refused(found) == {"model"} and "neither a directory nor a name on the Hub" in found["model"].text


def test_an_empty_directory_lacks_config_weights_and_tokenizer(tmp_path: Path) -> None:
    assert refused(examined(tmp_path)) == {"model", "weights", "tokenizer"}


def test_a_half_downloaded_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 10000 if file.suffix == ".safetensors" else None])
    found = examined(tmp_path)
    assert refused(found) == {"weights"} and "incomplete" in found["weights"].text


def test_weights_beyond_the_memory_are_refused_without_reading_them(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    rows = 2**31 - 1
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    shapes = {name: value.shape for name, value in load_file(tiny / "model.safetensors").items()}
    tensors, size = {}, 0
    for name, shape in shapes.items():
        shape = [rows, *shape[1:]] if shape[0] == config["vocab_size"] else list(shape)
        end = size + 4 * math.prod(shape)
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [size, end]}
        size = end
    header = json.dumps(tensors).encode()
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.write(len(header).to_bytes(8, "little") + header)
        weights.truncate(8 + len(header) + size)  # takes no disk: nothing is written there
    found = examined(tmp_path, kv_memory="1MiB")
    assert refused(found) == {"memory"} and "1.0 TiB" in found["weights per rank"].text
    assert refused(examined(tmp_path)) == {"cache"}


def test_a_cache_below_the_context_is_a_warning(tiny: Path) -> None:
    found = examined(tiny, num_pages=10)
    assert found["cache"].outcome is Outcome.WARNING and "640 tokens" in found["cache"].text


@pytest.mark.parametrize(
    ("split", "page_bytes"),
    [
        ({}, 2 * 2 * 16 * 4 * 4 * 64),
        ({"tp": 2, "pp": 2, "cp": 2}, 2 * 2 * 16 * 4 * 4 * 64),
        ({"tp": 4}, 2 * 2 * 16 * 4 * 4 * 64),  # two ranks hold each KV head on the device, and store it once
    ],
)
def test_the_host_tier_holds_what_the_model_leaves_behind_under_any_split(
    tiny: Path, split: dict[str, Any], page_bytes: int
) -> None:
    found = examined(tiny, num_pages=64, host_memory="10MiB", **split)
    assert found["host tier"].text.startswith(f"at most {10 * KIB**2 // page_bytes * 64} tokens")


def test_a_host_tier_that_cannot_be_had_or_holds_nothing_is_refused(tiny: Path) -> None:
    assert refused(examined(tiny, num_pages=64, host_memory="900TiB")) == {"host tier"}
    assert "holds no page" in examined(tiny, num_pages=64, host_memory="1KiB")["host tier"].text
    assert examined(tiny, num_pages=64, host_memory="auto")["host tier"].outcome is Outcome.OK
    assert "host tier" not in examined(tiny, num_pages=64)


def test_a_storage_in_files_is_looked_at_and_not_made(tiny: Path, tmp_path: Path) -> None:
    def storage(url: str) -> CheckResult:
        return examined(tiny, num_pages=64, host_memory="1MiB", storage=url)["storage"]

    url = f"file://{tmp_path}/a/b"
    assert storage(f"{url}?size=2MiB").text.startswith(f"file:{tmp_path}/a/b: up to 2.0 MiB, ")
    assert storage(f"{url}?size=9000TiB").outcome is Outcome.WARNING
    assert storage(url).outcome is storage("file://?size=2MiB").outcome is Outcome.FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_storage_of_no_known_kind_is_refused(tiny: Path) -> None:
    assert refused(examined(tiny, num_pages=64, host_memory="1MiB", storage="ftp://host/x")) == {"storage"}


def test_a_storage_without_a_host_tier_is_refused_and_the_rest_is_examined(tiny: Path) -> None:
    found = examined(tiny, storage="file:///x?size=1GiB")
    assert "needs a host tier" in found["settings"].text and found["model"].outcome is Outcome.OK


def test_a_port_in_use_is_refused(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert refused(examined(tiny, port=taken.getsockname()[1])) == {"endpoint"}


def test_a_package_of_the_server_that_is_missing_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "launch.http.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    found = examined(tiny)
    assert refused(found) == {"packages"} and "uvicorn" in found["packages"].text


def test_more_cuda_ranks_than_gpus_are_refused(tiny: Path) -> None:
    found = examined(tiny, device="cuda", cp=64)
    assert "device" in refused(found) and found["device"].text.startswith("64 GPUs requested")
    assert found["model"].outcome is Outcome.OK and "memory" not in found


def test_flashinfer_on_the_cpu_is_refused(tiny: Path) -> None:
    found = examined(tiny, attention="flashinfer")
    assert refused(found) == {"attention"} and "ranks run on cpu" in found["attention"].text


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-55\t0
GPU1\tNV18\t X \tPHB\tNODE\t0-55\t0
GPU2\tSYS\tPHB\t X \tSYS\t56-111\t1
NIC0\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_how_gpus_are_connected_is_read_from_the_drivers_table() -> None:
    assert {pair: way for pair, way in read_topology(TOPOLOGY).items() if pair[0] > pair[1]} == {
        (1, 0): "NV18",
        (2, 0): "SYS",
        (2, 1): "PHB",
    }
    assert read_topology("") == {}


PREFILL = (
    "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_"
    "posenc_0_use_swa_{}_use_logits_cap_False_f16qk_False"
)
LATENT = (
    "batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64_"
    "profiler_False_planabi2"
)
FMT = CacheFormat("bfloat16")


@pytest.mark.parametrize(
    ("part", "name", "library", "end"),
    [
        (kv("kv", [0], heads=2, dim=64, fmt=FMT), "heads of 64", PREFILL.format(False), "_kv_stride_equal"),
        (
            kv("window", [0], heads=2, dim=64, fmt=FMT, window=9),
            "heads of 64 with a window",
            PREFILL.format(True),
            "_kv_stride_equal",
        ),
        (latent([0], rank=512, rope_dim=64, fmt=FMT), "latents", LATENT, ""),
    ],
    ids=["full", "window", "latent"],
)
def test_kernels_that_are_not_built_are_told(
    part: Component, name: str, library: str, end: str, tmp_path: Path
) -> None:
    def missing(dtype: torch.dtype = torch.bfloat16, capability: tuple[int, int] = (9, 0)) -> list[str]:
        kernels, strange = wanted_kernels([part], dtype=dtype, capability=capability)
        assert not strange
        return missing_kernels(kernels, [tmp_path / "nowhere", tmp_path])

    def build(file: str) -> None:
        (tmp_path / file).mkdir()
        assert missing() == left, "a build that has begun"
        (tmp_path / file / f"{file}.so").touch()

    left = [f"{name} (fa2)", f"{name} (fa3)"]
    assert missing() == left and missing(capability=(8, 0)) == left[:1]
    build(f"{library}_sm90")
    left = [f"{name} (fa2)"]
    assert missing() == left
    build(library + end)
    assert missing() == missing(capability=(8, 0)) == []
    assert len(missing(dtype=torch.float16)) == 2


def test_wide_heads_have_one_family_of_kernels() -> None:
    kernels, strange = wanted_kernels(
        [kv("kv", [0], heads=2, dim=512, fmt=FMT)], dtype=torch.bfloat16, capability=(9, 0)
    )
    assert [kernel.name for kernel in kernels] == ["heads of 512 (fa2)"] and not strange


def test_what_flashinfer_has_no_kernel_for_is_told(tmp_path: Path) -> None:
    parts = [
        kv("kv", [0], heads=2, dim=80, fmt=FMT),
        latent([1], rank=256, rope_dim=64, fmt=FMT),
        latent([2], rank=512, rope_dim=64, fmt=CacheFormat("bfloat16", has_fp8_latent=True)),
    ]
    kernels, strange = wanted_kernels(parts, dtype=torch.bfloat16, capability=(9, 0))
    assert not kernels and strange == ["heads of 80", "latents of 256 + 64"], "Triton's are not FlashInfer's"
    _, strange = wanted_kernels(parts, dtype=torch.bfloat16, capability=(8, 9))
    assert strange[-1] == "latents in fp8 before Hopper"


def test_a_cluster_elsewhere_is_a_warning(tiny: Path) -> None:
    assert examined(tiny, address="http://10.0.0.1:8265")["cluster"].outcome is Outcome.WARNING


def test_what_this_machine_lacks_refuses_nothing_of_a_cluster_elsewhere(tiny: Path) -> None:
    found = examined(tiny, address="http://10.0.0.1:8265", device="cuda", cp=64)
    assert found["device"].outcome is Outcome.WARNING and "(ranks may run on others)" in found["device"].text
