"""Checks of grammars in a process that may crash, hang or be left, and never outlives its server."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from launch.http import app
from raycache.api import constraint
from raycache.api.grammar_checker import GrammarChecker
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError, RequestFailedError
from raycache.types import EngineInfo
from raycache.vocabulary import grammar_check
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, over_port, run

_BROKEN = (
    *grammar_check.command()[:-1],
    f"import sys; sys.path[:] = {sys.path!r}; from tests.unit.broken_checks import check, main; main(check)",
)
_PARENT = """
import asyncio, signal, sys
import psutil
from raycache.api.grammar_checker import GrammarChecker
from raycache.api.tokenizer import Tokenizer
from raycache.types import EngineInfo

async def main():
    tokenizer, interrupted = Tokenizer(sys.argv[1]), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    checker = GrammarChecker(tokenizer, EngineInfo("m", "", tokenizer.vocab_size, (tokenizer.eos_id,), 100, 8, 10, 4))
    for text in "ab":
        await checker.check(f'start: "{text}"', field="x")
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        await interrupted.wait()
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def info(tokenizer: Tokenizer) -> EngineInfo:
    assert tokenizer.eos_id is not None
    return EngineInfo("m", "", tokenizer.vocab_size, (tokenizer.eos_id,), 100, 8, 10, 4)


def broken(tokenizer: Tokenizer, **settings: Any) -> GrammarChecker:
    return GrammarChecker(tokenizer, info(tokenizer), program=_BROKEN, **settings)


def children() -> list[int]:
    """Processes that check grammars. Each has a session of its own, which those of multiprocessing have not."""
    found = []
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            found += [child.pid] if os.getsid(child.pid) == child.pid else []
    return found


async def refusal(checker: GrammarChecker, grammar: str) -> str:
    try:
        await checker.check(grammar, field="x")
    except RequestError as error:
        assert error.field == "x"
        return error.message
    return ""


def test_a_wrong_grammar_is_refused_and_remembered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario() -> None:
        checker = GrammarChecker(tokenizer, info(tokenizer))
        await checker.check('start: "a"', field="x")
        wrong = constraint.regex(r"(a)\1")
        message = await refusal(checker, wrong)
        assert message.startswith("x cannot be enforced: ") and message.endswith("backreferences are not supported")
        [compiler] = children()
        os.kill(compiler, signal.SIGSTOP)
        assert await refusal(checker, wrong) == message
        await checker.check('start: "a"', field="x")

    run(scenario())
    assert not children()


def test_equal_grammars_are_checked_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario() -> None:
        checker, counted = broken(tokenizer), tmp_path / "counted"
        await asyncio.gather(*(checker.check(f"count {counted}", field="x") for _ in range(20)))
        await checker.check(f"count {counted}", field="x")
        assert counted.read_text() == "."
        await checker.check(f"count {counted} ", field="x")

    run(scenario())


def test_only_recent_grammars_are_remembered(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycache.api.grammar_checker._NUM_REMEMBERED", 2)

    async def scenario() -> None:
        checker, names = broken(tokenizer), [str(tmp_path / name) for name in "abc"]
        for name in (*names[:2], names[0], names[2], *names):
            await checker.check(f"count {name}", field="x")
        # a was asked for again before c came, so c took the place of b.
        assert [len(Path(name).read_text()) for name in names] == [1, 2, 2]

    run(scenario())


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("segfault", "crashed the compiler (SIGSEGV)"),
        ("exhaust", "crashed the compiler (exit status 1)"),
        ("start: a0\n" + "".join(f'a{i}: a{i + 1} | "x"\n' for i in range(3_500)) + 'a3500: "y"', "(SIGSEGV)"),
    ],
    ids=["segfault", "memory", "stack"],
)
def test_a_grammar_that_ends_the_process_is_refused_and_others_are_not(
    tokenizer: Tokenizer, grammar: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        checker = broken(tokenizer)
        grammars = ['start: "a"', grammar, grammar, "fine", "start: start"]
        first, *crashed, fine, wrong = await asyncio.gather(*(refusal(checker, each) for each in grammars))
        assert (first, fine) == ("", "")
        assert crashed[0] == crashed[1] and crashed[0].startswith("x cannot be enforced: the grammar crashed")
        assert message in crashed[0]
        assert "cannot be enforced" in wrong
        assert len(children()) == 1

    run(scenario())
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"a grammar of {len(grammar)} bytes crashed the compiler") and message in told
    assert not children()


def test_a_grammar_that_takes_too_long_is_refused_and_others_are_not(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        checker = broken(tokenizer, timeout_s=4)
        late, fine = await asyncio.gather(refusal(checker, "hang"), refusal(checker, "fine"))
        assert late == "x cannot be enforced: the grammar took longer than 4 s to check"
        assert fine == ""

    run(scenario())
    assert not children()


def test_who_leaves_stops_waiting_and_who_stays_does_not(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pipe, counted = tmp_path / "pipe", [tmp_path / "left", tmp_path / "kept"]
    os.mkfifo(pipe)

    async def scenario() -> None:
        checker = broken(tokenizer)
        blocked = asyncio.create_task(checker.check(f"read {pipe}", field="x"))
        leaving = [asyncio.create_task(checker.check(f"count {path}", field="x")) for path in counted]
        staying = asyncio.create_task(checker.check(f"count {counted[1]}", field="x"))
        await asyncio.sleep(0)  # all of them wait
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert all(task.cancelled() for task in leaving)
        await asyncio.to_thread(pipe.write_text, "")
        await asyncio.gather(blocked, staying)
        assert [path.exists() for path in counted] == [False, True]

    run(scenario())


def test_a_process_that_ended_while_it_was_idle_is_replaced(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        checker = GrammarChecker(tokenizer, info(tokenizer))
        await checker.check('start: "a"', field="x")
        [compiler] = map(psutil.Process, children())
        compiler.kill()
        while compiler.pid in children():
            await asyncio.sleep(0.01)
        for _ in range(5):  # turns of the loop, in which it sees that the pipe is closed
            await asyncio.sleep(0.01)
        await checker.check('start: "b"', field="x")
        assert children() and compiler.pid not in children()

    run(scenario())


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        checker = GrammarChecker(tokenizer, info(tokenizer), program=(sys.executable, "-c", "raise SystemExit(3)"))
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="did not start: exit status 3"):
                await checker.check('start: "a"', field="x")

    run(scenario())


def test_a_process_that_cannot_be_made_is_no_fault_of_the_grammar(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycache.api.grammar_checker._WAIT_S", 20)
    program = tmp_path / "program"

    async def scenario() -> None:
        checker = GrammarChecker(tokenizer, info(tokenizer), program=(str(program),))
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="did not start: .*No such file"):
                await checker.check('start: "a"', field="x")
        program.write_text(f"#!/bin/sh\nexec {shlex.join(grammar_check.command())}\n")
        program.chmod(0o700)
        await checker.check('start: "a"', field="x")

    run(scenario())


def test_a_grammar_during_which_somebody_kills_the_process_is_checked_again(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    marker = tmp_path / "counted"

    async def scenario() -> None:
        checker = broken(tokenizer)
        assert await refusal(checker, f"killed-once {marker}") == ""
        assert marker.read_text() == ".."
        message = await refusal(checker, "killed")
        assert message == "x cannot be enforced: the grammar crashed the compiler (SIGKILL)"
        assert await refusal(checker, "fine") == ""

    run(scenario())


def test_entries_of_the_path_that_are_no_texts_are_left_out(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, 'it\'s "odd"\n'])
    run(GrammarChecker(tokenizer, info(tokenizer)).check('start: "a"', field="x"))


def test_a_model_without_an_end_token_refuses_grammars(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer, EngineInfo("m", "", 100, (100,), 100, 8, 10, 4))
    with pytest.raises(RequestError, match="no end token"):
        run(checker.check('start: "a"', field="x"))


def test_the_process_survives_an_interrupt_and_ends_with_its_server(folder: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", _PARENT, folder], stdout=subprocess.PIPE, start_new_session=True)
    assert server.stdout is not None
    try:
        compiler = psutil.Process(int(server.stdout.readline()))
        os.killpg(server.pid, signal.SIGINT)
        assert int(server.stdout.readline()) == compiler.pid
    finally:
        server.kill()
        server.communicate()
    compiler.wait(60)


def test_the_process_ends_itself_when_nobody_ends_a_check(tokenizer: Tokenizer) -> None:
    compiler = subprocess.Popen(_BROKEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert compiler.stdin is not None
    setup = grammar_check.Setup.of(
        tokenizer.vocabulary, num_logits=tokenizer.vocab_size, eos_token_ids=[0], timeout_s=0
    )
    compiler.stdin.write(grammar_check.framed(setup.packed()) + grammar_check.framed(b"hang"))
    compiler.stdin.flush()
    assert compiler.wait(60) == -signal.SIGALRM
    compiler.communicate()


# --- behind the server ------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "GrammarChecker", partial(GrammarChecker, program=_BROKEN))


def body(grammar: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a", "structured_outputs": {"grammar": grammar}}


@pytest.mark.usefixtures("broken_server")
def test_a_server_answers_400_to_a_grammar_that_ends_the_process(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(ScriptedEngine(tokenizer), tokenizer) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body(each)) for each in ("segfault", "fine"))
            )
            assert [answer.status_code for answer in answers] == [400, 200]
            assert answers[0].json()["error"]["param"] == "structured_outputs"

    run(scenario())


@pytest.mark.usefixtures("broken_server")
def test_a_client_that_leaves_does_not_wait_for_the_check(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scenario() -> None:
        engine = ScriptedEngine(tokenizer)
        async with over_port(engine, tokenizer) as endpoint, httpx.AsyncClient(base_url=endpoint) as client:
            waiting = asyncio.create_task(client.post("/v1/completions", json=body(f"read {pipe}")))
            writer = await asyncio.to_thread(pipe.open, "w")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            while 'status="499"' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            writer.close()
        assert not engine.requests

    run(scenario())
