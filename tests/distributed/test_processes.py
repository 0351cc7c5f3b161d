"""Models split over processes: the same tokens as unsplit, and an end that is prompt, named and clean."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.errors import CheckpointError, RankLostError
from raycache.gang.processes import ProcessGang
from raycache.llm import LLM, Completion
from raycache.parallel.context import Store
from raycache.types import SamplingParams
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level
from tests.selection import mostly_long

VOCAB = 403
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
TWO_BY_TWO = {"tp": 2, "cp": 2}
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_tiny(tmp_path_factory.mktemp("model"), vocab_size=VOCAB))


def load(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{"device": "cpu", "page_size": 8, "num_pages": 600, "rank_timeout_s": 30, **settings})


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert boards() == []
    assert [process.name for process in multiprocessing.active_children()] == []


def boards(pid: int | None = None) -> list[str]:
    """Ack boards of a process, this one if it is not named."""
    return [path.name for path in Path("/dev/shm").glob(f"raycache-{pid or os.getpid()}-*")]


def rank_process(rank: int) -> psutil.Process:
    (process,) = [child for child in multiprocessing.active_children() if child.name == f"rank {rank}"]
    return psutil.Process(process.pid)


def ask(llm: LLM) -> list[Completion]:
    """Prompts of many lengths with many wishes, twice: cold and from the cache."""
    random = np.random.default_rng(5)
    shared = random.integers(3, VOCAB, 50).tolist()
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (1, 8, 33)]
    prompts += [[*shared, token] for token in (7, 8)]
    samplings = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=1),
        SamplingParams(temperature=0.7, top_p=0.8, seed=4, max_tokens=10, ignore_eos=True, presence_penalty=1),
    ]
    found = [completion for _ in range(2) for completion in llm.generate(prompts, samplings)]
    llm.check()
    assert llm.stats().pages_in_use == llm.stats().pages_locked == 0
    return found


@pytest.fixture(scope="module")
def unsplit(model: Path) -> list[Completion]:
    with load(model, max_step_tokens=24) as llm:
        return ask(llm)


@pytest.mark.parametrize(
    "split",
    mostly_long(
        [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"pp": 4}, {"tp": 4}, TWO_BY_TWO, {"pp": 2, "cp": 2}, {"tp": 2, "pp": 2}],
        but=[{"pp": 4}, {"tp": 4}, TWO_BY_TWO],
    ),
    ids=lambda split: " ".join(f"{axis}={size}" for axis, size in split.items()),
)
def test_a_split_model_says_what_the_whole_one_says(
    model: Path, unsplit: list[Completion], split: dict[str, int]
) -> None:
    with load(model, max_step_tokens=24, **split) as llm:
        found = ask(llm)
    assert [each.token_ids for each in found] == [each.token_ids for each in unsplit]
    for ours, right in zip(found, unsplit, strict=True):
        assert [entry and entry.token_id for entry in ours.prompt_logprobs] == [
            entry and entry.token_id for entry in right.prompt_logprobs
        ]
        for entry, other in zip(
            (*ours.logprobs, *ours.prompt_logprobs), (*right.logprobs, *right.prompt_logprobs), strict=True
        ):
            if entry is not None and other is not None:
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]


def test_a_plan_longer_than_a_frame_and_a_small_pool(model: Path) -> None:
    random = np.random.default_rng(6)
    long, short = random.integers(3, VOCAB, 4060).tolist(), random.integers(3, VOCAB, 30).tolist()
    with load(model, max_step_tokens=4096, num_pages=512) as llm:
        right = [completion.token_ids for completion in llm.generate([long, short], GREEDY)]
    with load(model, max_step_tokens=4096, num_pages=512, cp=2) as llm:
        for _ in range(2):
            assert [completion.token_ids for completion in llm.generate([long, short], GREEDY)] == right
        llm.check()


def test_an_idle_gang_lives_longer_than_the_deadline_of_a_step(model: Path) -> None:
    with load(model, tp=2, rank_timeout_s=2) as llm:
        (before,) = llm.generate([[5, 6]], GREEDY)
        time.sleep(2.5)
        (after,) = llm.generate([[5, 6]], GREEDY)
    assert before.token_ids == after.token_ids


# --- ranks that end ---------------------------------------------------------------------------------------------------


def lose(llm: LLM, harm: Callable[[], object], *, after_steps: int) -> tuple[RankLostError, float]:
    """Harm a rank in the middle of an answer; how that ends, and the seconds until then."""
    engine, steps = llm._engine, 0
    step, start = engine.step, 0.0

    def harmful_step() -> Any:
        nonlocal steps, start
        steps += 1
        if steps == after_steps:
            harm()
            start = time.monotonic()
        return step()

    engine.step = harmful_step  # type: ignore[method-assign]
    with pytest.raises(RankLostError) as lost:
        llm.generate([[5, 6, 7], [8, 9], [10] * 30], LONG)
    return lost.value, time.monotonic() - start


@pytest.mark.parametrize(
    ("split", "rank", "coords"),
    [
        ({"tp": 2}, 0, "pp=0 cp=0 tp=0"),
        ({"cp": 2}, 1, "pp=0 cp=1 tp=0"),
        ({"pp": 2}, 1, "pp=1 cp=0 tp=0"),
        pytest.param({"tp": 2}, 1, "pp=0 cp=0 tp=1", marks=pytest.mark.long),
        pytest.param({"pp": 2}, 0, "pp=0 cp=0 tp=0", marks=pytest.mark.long),
        pytest.param({"tp": 2, "pp": 2}, 1, "pp=0 cp=0 tp=1", marks=pytest.mark.long),
        pytest.param({"tp": 4}, 2, "pp=0 cp=0 tp=2", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_is_named_at_once(model: Path, split: dict[str, int], rank: int, coords: str) -> None:
    llm = load(model, **split)
    victim = rank_process(rank)
    error, waited_s = lose(llm, victim.kill, after_steps=20)
    assert (error.rank, error.coords) == (rank, coords)
    assert error.step > 0
    assert waited_s < 15, "half of the deadline of a step"
    with pytest.raises(RankLostError):
        llm.generate([[5]], GREEDY)
    llm.close()


@pytest.mark.parametrize(("killed", "stopped"), [(1, 0), (0, 1)])
def test_the_death_of_a_process_ends_a_wait_for_another(model: Path, killed: int, stopped: int) -> None:
    """A stopped rank answers nothing, and its connections stay: only the death of the other one can end the wait."""
    llm = load(model, tp=2, rank_timeout_s=3600)

    def harm() -> None:
        rank_process(stopped).suspend()
        rank_process(killed).kill()

    error, _ = lose(llm, harm, after_steps=20)
    assert error.rank == killed
    llm.close()


@pytest.mark.parametrize("rank", mostly_long([0, 1], but=[1]))
def test_a_rank_killed_while_idle_is_named_by_the_next_answer(model: Path, rank: int) -> None:
    llm = load(model, tp=2)
    llm.generate([[5]], GREEDY)
    rank_process(rank).kill()
    start = time.monotonic()
    with pytest.raises(RankLostError) as lost:
        llm.generate([[5]], GREEDY)
    assert lost.value.rank == rank
    assert time.monotonic() - start < 15
    llm.close()


@pytest.mark.parametrize("split", mostly_long([{"tp": 2}, {"pp": 2}], but=[{"tp": 2}]), ids=str)
def test_a_rank_that_hangs_is_named_at_the_deadline(model: Path, split: dict[str, int]) -> None:
    llm = load(model, rank_timeout_s=2, **split)
    victim = rank_process(1)
    error, waited_s = lose(llm, victim.suspend, after_steps=20)
    assert error.rank == 1
    assert 1 < waited_s < 30
    start = time.monotonic()
    llm.close()
    assert time.monotonic() - start < 30


def test_an_error_inside_the_with_block_ends_all_ranks(model: Path) -> None:
    with pytest.raises(ZeroDivisionError), load(model, tp=2) as llm:
        llm.generate([[5]], GREEDY)
        raise ZeroDivisionError
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("cp", mostly_long([2, 4], but=[2]))
def test_ranks_that_cannot_start_leave_nothing_and_say_why(tmp_path: Path, cp: int) -> None:
    model = byte_level(make_tiny(tmp_path / "broken", vocab_size=VOCAB, num_hidden_layers=1))
    config = (model / "config.json").read_text()
    # The shapes in the file are others than those that the settings promise: only loading finds out.
    (model / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 192'))
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="mlp"):
        load(model, cp=cp)
    assert time.monotonic() - start < 100


def test_a_script_without_a_main_guard_is_told_to_have_one(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from raycache import LLM\nLLM({str(model)!r}, device='cpu', tp=2, num_pages=20)\n")
    ended = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "ConfigError: every rank imports the main script" in ended.stderr
    assert ended.stderr.rstrip().endswith('under `if __name__ == "__main__":`')


def test_ranks_that_no_process_can_be_started_for_leave_nothing(model: Path) -> None:
    class Local(Config):
        """Cannot be sent to another process."""

    deployment = deploy(Config(model=str(model), tp=2), device_type="cpu")
    with pytest.raises(Exception, match="Local"):
        ProcessGang(replace(deployment, config=Local(**vars(deployment.config))))


def test_the_meeting_point_of_ranks_stays_as_long_as_they_run(model: Path) -> None:
    """NCCL goes on asking it, and warns for every rank when nobody answers."""

    def stores() -> int:
        gc.collect()
        return sum(type(each) is Store for each in gc.get_objects())

    before = stores()
    with load(model, tp=2):
        assert stores() == before + 1
    assert stores() == before


def test_a_killed_script_leaves_no_rank_behind(model: Path) -> None:
    script = f"""
        import multiprocessing, os, signal
        from raycache.llm import LLM
        from raycache.types import SamplingParams

        if __name__ == "__main__":
            llm = LLM({str(model)!r}, device="cpu", tp=2, page_size=8, num_pages=50)
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            llm.generate([[5]], SamplingParams(max_tokens=4))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    path = model / "script.py"
    path.write_text(textwrap.dedent(script))
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        assert len(ranks) == 2
        assert process.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, ranks))
    assert boards(process.pid) == []
