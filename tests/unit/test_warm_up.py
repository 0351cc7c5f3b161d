"""Steps that warm up a rank are steps that it can run; what compiles kernels is noticed; what `prepare` says."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch.cli import prepare
from launch.cli.main import main
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.memory.component import STATE
from raycache.rank.build import load
from raycache.rank.compilations import Compilations, warn_of_compilers
from raycache.rank.member import alone
from raycache.rank.warm_up import WarmUpStep, eager_steps, recorded_steps
from tests.oracle.families import make_family

LONGEST, ROWS, TOKENS, PAGE, DRAFTS = 480, 6, 400, 16, 3


def deployment(folder: Path, family: str, **settings: Any) -> Deployment:
    model = make_family(folder / family, family)
    limits = {"max_model_len": LONGEST, "max_running": ROWS, "max_step_tokens": TOKENS, "page_size": PAGE}
    return deploy(Config.from_mapping({"model": str(model), "num_pages": 40, **limits, **settings}), device_type="cpu")


def all_steps(of: Deployment) -> list[WarmUpStep]:
    return [*eager_steps(of), *recorded_steps(of, sizes=range(1, ROWS * (1 + DRAFTS) + 1))]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v32", "nemotron_h", "kimi_linear"])
def test_every_step_runs(family: str, tmp_path: Path) -> None:
    of = deployment(tmp_path, family, draft="ngram", draft_tokens=DRAFTS)
    rank = load(of, alone()).build(40)
    for step in all_steps(of):
        found = rank.execute(step.plan, step.plan.masks_allowing_all())
        assert len(found) or all(row.output_position < 0 for row in step.plan.rows)


@pytest.mark.parametrize(("family", "draft"), [("llama", "llama"), ("nemotron_h", "llama")])
def test_every_step_runs_with_a_draft_model(family: str, draft: str, tmp_path: Path) -> None:
    drafts = make_family(tmp_path / "draft", draft)
    of = deployment(tmp_path, family, draft=str(drafts), draft_tokens=DRAFTS)
    rank = load(of, alone()).build(40)
    counts = set()
    for step in all_steps(of):
        rank.execute(step.plan, step.plan.masks_allowing_all())
        counts |= {row.num_next_drafts for row in step.plan.rows}
    assert counts == {0, DRAFTS}


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_steps_are_within_the_limits_and_reach_them(family: str, tmp_path: Path) -> None:
    of = deployment(tmp_path, family, draft="ngram", draft_tokens=DRAFTS)
    steps = all_steps(of)
    rows = [row for step in steps for row in step.plan.rows]
    assert max(row.start + row.num_tokens for row in rows) == LONGEST
    assert max(sum(row.num_tokens for row in step.plan.rows) for step in steps) == TOKENS
    assert max(len(step.plan.rows) for step in steps) == ROWS
    assert {row.num_drafts for row in rows} == set(range(DRAFTS + 1))
    for step in steps:
        pages = {admit.slot: admit.pages for admit in step.plan.admits}
        for row in step.plan.rows:
            assert row.slot < ROWS and all(
                row.start + row.num_tokens <= PAGE * len(ids) <= LONGEST and set(ids) == {0}
                for ids in pages[row.slot].values()
            )
    has_states = any(part.space == STATE for part in of.components)
    read = {row.read_state for row in rows}
    written = {state for row in rows for state in (row.write_state, *row.draft_states)}
    assert not read & written, "a row waits for another"
    assert not has_states or max(read | written) < of.pool_sizes(1)[STATE]
    replayed = {sum(row.num_tokens for row in step.plan.rows) for step in steps if step.kind == "graphs"}
    assert replayed == set(range(1, (ROWS if has_states else ROWS * (1 + DRAFTS)) + 1))


@pytest.mark.parametrize("cp", [1, 2, 3, 5])
def test_ranks_compute_and_score_one_and_two_tokens(cp: int, tmp_path: Path) -> None:
    """Kernels for so few tokens are compiled by themselves, also where one request runs at a time."""
    of = deployment(tmp_path, "llama", max_running=1, cp=cp, page_size=PAGE * cp)
    steps = [row for step in eager_steps(of) for row in step.plan.rows if len(step.plan.rows) == 1]
    assert {cp, 2 * cp} <= {row.num_tokens for row in steps if row.start == 0}
    assert 2 * cp in {1 + len(row.targets) // 4 for row in steps if row.num_tokens == 2 * cp}


@pytest.mark.parametrize(("longest", "rows", "tokens"), [(16, 1, 1), (20, 2, 7), (64, 1, 512)])
def test_small_limits_leave_steps_that_fit(longest: int, rows: int, tokens: int, tmp_path: Path) -> None:
    limits = {"max_model_len": longest, "max_running": rows, "max_step_tokens": tokens}
    of = deployment(tmp_path, "llama", **limits)
    rank = load(of, alone()).build(40)
    for step in eager_steps(of):
        assert sum(row.num_tokens for row in step.plan.rows) <= tokens and len(step.plan.rows) <= rows
        assert all(row.start + row.num_tokens <= longest for row in step.plan.rows)
        rank.execute(step.plan, step.plan.masks_allowing_all())


# --- what compiles


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, logging.Logger]]:
    """Triton's settings, and FlashInfer's logger."""
    knobs, logger = SimpleNamespace(listener=None), logging.Logger("flashinfer.jit")
    for name, content in (
        ("triton", {}),
        ("triton.knobs", {"compilation": knobs}),
        ("flashinfer", {}),
        ("flashinfer.jit", {}),
        ("flashinfer.jit.core", {"logger": logger}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return iter([(knobs, logger)])


def compile_kernel(listener: Callable[..., None], name: str, *, cache_hit: bool) -> None:
    """Call a listener as Triton does."""
    listener(src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)


def test_kernels_are_counted_by_whether_they_were_compiled(libraries: Iterator[tuple[Any, logging.Logger]]) -> None:
    knobs, logger = next(libraries)
    earlier: list[str] = []
    knobs.listener = before = lambda *, src, **more: earlier.append(src.name)
    with Compilations() as found:
        compile_kernel(knobs.listener, "gated", cache_hit=False)
        compile_kernel(knobs.listener, "rotate", cache_hit=True)
        logger.info("Building JIT module %s; this can take several minutes on first use.", "prefill")
        logger.info("Loaded %s", "decode")
    assert dict(found.compiled) == {"gated": 1, "prefill of FlashInfer": 1} and dict(found.read) == {"rotate": 1}
    assert str(found) == "2 kernels compiled, 1 read from the disk"
    assert knobs.listener is before and earlier == ["gated", "rotate"] and not logger.handlers


def test_a_kernel_compiled_while_serving_is_named_until_the_rank_is_closed(
    libraries: Iterator[tuple[Any, logging.Logger]], caplog: pytest.LogCaptureFixture
) -> None:
    knobs, _ = next(libraries)
    first, second = warn_of_compilers(), warn_of_compilers()
    first()  # another one was added after it
    compile_kernel(knobs.listener, "gated", cache_hit=False)
    compile_kernel(knobs.listener, "rotate", cache_hit=True)
    second()
    if knobs.listener is not None:
        compile_kernel(knobs.listener, "late", cache_hit=False)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and "gated" in said[0] and "after the start" in said[0]


def test_without_the_libraries_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with Compilations() as found:
        pass
    assert str(found) == "0 kernels compiled, 0 read from the disk"


# --- the command


def test_without_gpus_it_says_where_to_run_and_what_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "one"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "two"))
    assert main(["prepare", "models/m", "--tp", "2"]) == 2
    said = capsys.readouterr().err
    assert "2 GPUs requested" in said and "--device cpu" not in said
    assert f"copy {tmp_path}/one/.cache/flashinfer and {tmp_path}/two from there" in said
    assert main(["prepare", "models/m", "--device", "cpu"]) == 2
    assert "device=cpu has none to compile" in capsys.readouterr().err


def test_it_starts_the_ranks_of_the_settings_and_names_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "old.cubin").write_bytes(b"12345")
    monkeypatch.setattr("raycache.parallel.devices.require_gpus", lambda count: None)
    asked: dict[str, Any] = {}

    class Ranks:
        def __init__(self, model: str, **settings: Any) -> None:
            asked.update(settings, model=model)
            for kernel in ("a/gated.cubin", "b/gated.cubin", "c/rotate.cubin"):
                path = tmp_path / "triton" / kernel
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"12345")

        def close(self) -> None:
            asked["is_closed"] = True

    monkeypatch.setattr("raycache.llm.LLM", Ranks)
    assert prepare.run({"model": "m", "tp": 2, "storage": "file:///x?size=1GiB", "host_memory": "1GiB"}) == 0
    assert asked == {
        "model": "m",
        "tp": 2,
        "host_memory": "1GiB",
        "storage": "none",
        "device": "cuda",
        "dummy_weights": True,
        "replicas": 1,
        "address": "local",
        "is_closed": True,
    }
    said = capsys.readouterr().out
    assert "\ngated (2)\nrotate\n" in said and "compiled 3 kernels in " in said
    assert [line.split()[:4] for line in said.splitlines() if line.startswith("triton")] == [["triton", "3", "4", "20"]]
    monkeypatch.setattr(Ranks, "__init__", lambda self, model, **settings: None)
    assert prepare.run({"model": "m"}) == 0
    assert "all kernels were already compiled" in capsys.readouterr().out
