"""After a rank is ready nothing is compiled: requests of many kinds, with compilers watched and forbidden."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycache import LLM, SamplingParams
from raycache.types import CacheAction, CacheCommand
from tests.oracle.half import make_half
from tests.oracle.quantised import fp8_blocks, mxfp4_experts, write_quantised
from tests.oracle.tiny_tokenizers import byte_level

triton = pytest.importorskip("triton")
JITFunction = pytest.importorskip("triton.runtime").JITFunction

pytestmark = pytest.mark.gpu

FAMILIES = (
    "qwen3",
    "gpt_oss",
    "gemma3",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_linear",
    "qwen3_next",
    "nemotron_h",
    "bailing_moe_v2_5",
    "minimax",
)
LONGEST, STEP, ROWS = 12_288, 4096, 12
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 47, 64, 100, 127, 129, 200, 255, 257, 300, 511, 700, 1025, 1999, 2500)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"top_k": 5, "seed": 2},
    {"top_p": 0.7, "seed": 3},
    {"min_p": 0.2, "seed": 4},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 5},
    {"logit_bias": {7: 5.0, 9: -5.0}, "temperature": 0.0},
    {"logprobs": 3, "temperature": 0.0},
    {"prompt_logprobs": 2, "temperature": 0.0},
    {"grammar": 'start: "a"+', "temperature": 0.0},
)


@pytest.fixture(autouse=True)
def cold() -> None:
    """Let this process forget the kernels that Triton has loaded for other tests, and the listener that an engine of
    another test has left."""
    triton.knobs.compilation.listener = None
    gc.collect()
    for one in gc.get_objects():
        if type(one) is JITFunction:  # isinstance would wake lazy modules
            one.device_caches.clear()


@contextmanager
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Triton specialises meanwhile; FlashInfer raises instead of building or loading a library."""
    found: list[str] = []
    specialise: Callable[..., Any] = JITFunction._do_compile

    def noted(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        constants, _, attributes, _ = rest
        values = ", ".join(f"{self.arg_names[place[0]]}={value}" for place, value in constants.items())
        found.append(
            f"{self.fn.__name__}({values}; 16 divides {sorted(self.arg_names[place[0]] for place in attributes)})"
        )
        return specialise(self, key, signature, device, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "_do_compile", noted)
        patched.setenv("FLASHINFER_DISABLE_JIT", "1")
        yield found


def model_of(folder: Path, family: str) -> Path:
    return byte_level(make_half(folder / family, family, max_position_embeddings=LONGEST))


def serve(model: Path, **settings: Any) -> LLM:
    limits = {"max_model_len": LONGEST, "max_step_tokens": STEP, "max_running": ROWS, "page_size": 16}
    return LLM(str(model), device="cuda", dtype="bfloat16", **{**limits, "num_pages": 3072, **settings})


def prompts(vocab: int, seed: int) -> list[list[int]]:
    """Of many lengths, half of them behind the start of another one."""
    generator = np.random.default_rng(seed)
    found = [generator.integers(3, vocab, length).tolist() for length in generator.permutation(LENGTHS)]
    return found + [found[-1][: 16 * turn] + one[: 9 * turn + 1] for turn, one in enumerate(found)]


def ask_in_many_ways(llm: LLM) -> None:
    for seed in range(2):
        asked = prompts(515, seed)
        sampling = [
            SamplingParams(**SAMPLING[i % len(SAMPLING)], max_tokens=1 + i % 9, ignore_eos=True)
            for i in range(len(asked))
        ]
        llm.generate(asked, sampling)
        llm.generate(asked[::3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for prompt in asked[:6]:
            llm.generate([prompt], SamplingParams(top_p=0.9, max_tokens=5, ignore_eos=True))
    long = np.random.default_rng(9).integers(3, 515, LONGEST - 40).tolist()
    for length in (LONGEST - 40, 9000, 4500, 2100):
        llm.generate([long[:length], long[:30]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    llm.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_is_compiled_after_ready(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raycache.rank")
    with serve(model_of(tmp_path, family), host_memory="1GiB") as llm:
        print(*(record.getMessage() for record in caplog.records if "warmed" in record.msg), sep="\n")
        with forbidden(monkeypatch) as compiled:
            ask_in_many_ways(llm)
            llm.cache(CacheCommand(CacheAction.CLEAR, tiers=("device",)))
            ask_in_many_ways(llm)  # loads from the host
        assert not compiled, "\n".join(compiled)
    assert not [record for record in caplog.records if "after the start" in record.getMessage()]


@pytest.mark.parametrize("family", ["nemotron_h", "gpt_oss"])
def test_no_kernel_is_compiled_after_ready_without_graphs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(model_of(tmp_path, family), cuda_graphs=False) as llm, forbidden(monkeypatch) as compiled:
        ask_in_many_ways(llm)
    assert not compiled, "\n".join(compiled)


@pytest.mark.parametrize(("family", "draft"), [("qwen3", "qwen3"), ("nemotron_h", "qwen3"), ("qwen3", "ngram")])
def test_no_kernel_is_compiled_for_drafts(
    family: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path, family)
    draft = draft if draft == "ngram" else str(model_of(tmp_path / "draft", draft))
    with serve(model, draft=draft, draft_tokens=3) as llm, forbidden(monkeypatch) as compiled:
        ask_in_many_ways(llm)
    assert not compiled, "\n".join(compiled)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_no_kernel_is_compiled_for_quantised_experts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = fp8_blocks() if family == "deepseek_v3" else mxfp4_experts()
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 384}
    source = make_half(tmp_path / "source", family, **(sizes if family == "deepseek_v3" else {}))
    write_quantised(source, tmp_path / "model", tmp_path / "plain", form)
    with (
        serve(byte_level(tmp_path / "model"), max_model_len=4096, weights="stored") as llm,
        forbidden(monkeypatch) as compiled,
    ):
        for seed in range(2):
            llm.generate(prompts(515, seed), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert not compiled, "\n".join(compiled)


def test_on_two_gpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks are other processes, which log to the terminal; here they only have to start and answer."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model = model_of(tmp_path, "deepseek_v32")
    for split in ({"tp": 2}, {"cp": 2}, {"pp": 2}):
        with serve(model, **split) as llm:
            ask_in_many_ways(llm)


def test_without_warming_up_kernels_are_compiled_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the tests above watch does happen: experts have other kernels for steps between the smallest and the
    largest, and without graphs only the two steps that measure memory run at the start."""
    caplog.set_level(logging.INFO, "raycache.rank")
    monkeypatch.setattr("raycache.rank.build.warm_up", lambda rank, deployment, *, batch_sizes: None)
    with serve(model_of(tmp_path, "nemotron_h"), cuda_graphs=False) as llm, forbidden(monkeypatch) as compiled:
        ask_in_many_ways(llm)
    assert compiled
    said = [record for record in caplog.records if "after the start" in record.getMessage()]
    assert len(said) == len(compiled)
