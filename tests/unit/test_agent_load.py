"""Replays of agents: what is sent, in what order and when, on a clock that only waiting moves; the search; a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import selectors
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import agents
from benchmarks.agent_load import Agents, Play, Target, Trial, bisect
from benchmarks.client import Reply, complete
from benchmarks.sessions import Piece, Session, Turn
from benchmarks.trace import Prompt
from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_port, run


class _WaitsWithoutTime(selectors.DefaultSelector):
    """Notes how long it would wait instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and for nobody"
        self.now_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    """Its time passes only where all wait."""

    def __init__(self) -> None:
        self._waits = _WaitsWithoutTime()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now_s


def simulated(work: Awaitable[Any]) -> Any:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(_bounded(work))


async def _bounded(work: Awaitable[Any]) -> Any:
    return await work


@dataclass
class Scripted:
    """Answers after a second, then a token every tenth of one; notes prompts with their times."""

    seconds: float = 1.0
    gap_s: float = 0.1
    fails_at: int = -1
    asked: list[tuple[float, list[int], int]] = field(default_factory=list)

    async def ask(self, tokens: Sequence[int], output_len: int) -> Reply:
        loop = asyncio.get_running_loop()
        self.asked.append((loop.time(), list(tokens), output_len))
        if len(self.asked) - 1 == self.fails_at:
            raise RuntimeError("429: too many requests")
        start_s = loop.time()
        times = [start_s + self.seconds + self.gap_s * number for number in range(output_len)]
        await asyncio.sleep(times[-1] - start_s)
        answer = tuple(-1 - len(self.asked) for _ in range(output_len))
        return Reply(start_s, tuple(times), len(tokens), len(tokens) // 2, answer, output_len)


def plain(*think_s: float, name: str = "s", length: int = 20, output_len: int = 3) -> Session:
    """A session of turns of one piece each, with these think times."""
    turns = [Turn(None if n else 0, (Piece(f"{name}{n}", length),), output_len, t) for n, t in enumerate(think_s)]
    return Session(name, tuple(turns))


def counted(server: Scripted) -> list[tuple[float, list[int], int]]:
    """What was asked, without warm-ups."""
    return [each for each in server.asked if each[2] > 1]


def begin_at(turn: int, session: Session) -> int:
    """A seed with which the first agent begins there."""
    for seed in range(1000):
        server = Scripted()
        play = Play(seconds=1e-9, seed=seed, think=0.0)
        simulated(Agents(server, [session], play).trial(1))
        ((_, prompt, _),) = counted(server)
        if len(prompt) == 20 + 23 * turn:
            return seed
    raise AssertionError("no such seed")


def test_a_prompt_is_the_one_before_with_its_answer_and_what_is_new() -> None:
    session = plain(0.0, 2.0, 4.0)
    server = Scripted()
    play = Play(seconds=9.0, seed=begin_at(0, session))
    trial = simulated(Agents(server, [session], play).trial(1))
    (at0, first, _), (at1, second, _), (at2, third, _) = server.asked
    assert second[:23] == [*first, -2, -2, -2] and len(second) == 43
    assert third[:46] == [*second, -3, -3, -3] and len(third) == 66
    assert (at0, at1, at2) == pytest.approx((0.0, 1.2 + 2.0, 3.2 + 1.2 + 4.0))
    assert len(trial.replies[0]) == len(server.asked)


def test_think_times_are_scaled_and_limited() -> None:
    session = plain(0.0, 4.0, 100.0, 4.0)
    server = Scripted()
    play = Play(seconds=100.0, think=0.5, longest_think_s=5.0, seed=begin_at(0, session))
    simulated(Agents(server, [session], play).trial(1))
    times = [at for at, _, _ in server.asked][:5]
    thought = [after - before - 1.2 for before, after in itertools.pairwise(times)]
    assert thought == pytest.approx([2.0, 5.0, 2.0, 0.0])  # the last one begins another session


def test_a_turn_after_subagents_waits_for_all_of_them() -> None:
    short, long = plain(0.0, name="short"), plain(0.0, 1.0, name="long")
    turns = (Turn(0, (Piece("a", 20),), 3, 0.0, (short, long)), Turn(None, (Piece("b", 20),), 3, 2.0))
    session = Session("s", turns)
    server = Scripted()
    play = Play(seconds=10.0, seed=begin_at(0, session))
    trial = simulated(Agents(server, [session], play).trial(1))
    times = [at for at, _, _ in server.asked]
    assert times[:5] == pytest.approx([0.0, 1.2, 1.2, 3.4, 3.4 + 1.2 + 2.0])
    parent, child, _, grandchild, after = [prompt for _, prompt, _ in server.asked[:5]]
    assert len(child) == 20 and child[:1] != parent[:1] and grandchild[:20] in (child, server.asked[2][1])
    assert after[:23] == [*parent, -2, -2, -2]
    assert len(trial.replies) == 1 and len(trial.replies[0]) == len(server.asked)


def test_warm_up_sends_the_text_before_the_first_turn_and_is_not_counted() -> None:
    session = plain(0.0, 0.0, 0.0)
    server = Scripted()
    play = Play(seconds=1e-9, seed=begin_at(2, session))
    trial = simulated(Agents(server, [session], play).trial(1))
    (_, warm_up, one), (_, prompt, _) = server.asked
    assert one == 1 and prompt[: len(warm_up)] == warm_up and len(warm_up) == 46
    assert trial.figures()["requests"] == 1 and trial.seconds == pytest.approx(1.2)


def test_requests_that_begin_in_time_are_counted_when_they_end() -> None:
    server = Scripted()
    sessions = [plain(*[1.0] * 50, name=str(number)) for number in range(3)]
    trial = simulated(Agents(server, sessions, Play(seconds=30.0)).trial(5))
    warm_end_s = max((at for at, _, length in server.asked if length == 1), default=-1.0) + 1.0
    begun = [at - warm_end_s for at, _, _ in counted(server)]
    assert max(begun) < 30.0 and trial.figures()["requests"] == len(begun)
    assert all(len(replies) in (13, 14) for replies in trial.replies)  # 2.2 s each, the first one after less thought


def test_agents_of_one_session_and_of_two_trials_do_not_share_their_text() -> None:
    session = Session("s", (Turn(0, (Piece("tools", 30), Piece("own", 30)), 3),))
    other = Session("t", (Turn(0, (Piece("tools", 30), Piece("other", 30)), 3),))
    server = Scripted()
    both = Agents(server, [session, other], Play(seconds=1e-9))

    async def two() -> None:
        await both.trial(4)
        await both.trial(2)

    simulated(two())
    prompts = [prompt for _, prompt, _ in server.asked]
    assert len(prompts) == 6
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 6


def test_lengths_are_scaled() -> None:
    session = Session("s", (Turn(0, (Piece("a", 4000),), 1000),))
    server = Scripted()
    simulated(Agents(server, [session], Play(seconds=1e-9, scale=0.01)).trial(1))
    ((_, prompt, output_len),) = server.asked
    assert (len(prompt), output_len) == (40, 10)


def test_a_request_that_fails_ends_the_trial_which_then_misses_every_target() -> None:
    server = Scripted(fails_at=7)
    sessions = [plain(*[1.0] * 50)]
    trial = simulated(Agents(server, sessions, Play(seconds=1e6)).trial(3))
    assert trial.failure == "429: too many requests" and len(server.asked) == 8
    assert not trial.meets(Target(0.0, 1e9))


def reply(*times_s: float, tokens: int | None = None) -> Reply:
    return Reply(0.0, times_s, 100, 60, (), len(times_s) if tokens is None else tokens)


def test_speed_is_that_of_nine_agents_of_ten_and_the_first_token_that_of_95_requests_of_a_hundred() -> None:
    fast, slow = reply(1.0, 1.1, 1.2), reply(3.0, 4.0, 5.0)
    trial = Trial(20, 10.0, ((slow,), *[(fast,)] * 19))
    assert trial.figures()["tokens_per_s_p90"] == pytest.approx(10)
    assert trial.figures()["first_token_p95_s"] == 1.0
    assert trial.meets(Target(9.9, 1.0)) and not trial.meets(Target(10.1, 1.0)) and not trial.meets(Target(9.9, 0.9))
    worse = Trial(20, 10.0, (*[(slow,)] * 3, *[(fast,)] * 17))
    assert worse.figures()["tokens_per_s_p90"] == pytest.approx(1)
    assert worse.figures()["first_token_p95_s"] == 3.0
    assert worse.figures()["cached"] == pytest.approx(0.6)


def test_the_speed_of_an_agent_is_of_all_its_answers_as_the_server_counts_them() -> None:
    trial = Trial(1, 10.0, ((reply(1.0, 2.0, tokens=5), reply(1.0, 7.0, tokens=4)),))
    assert trial.speeds() == [pytest.approx((4 + 3) / (1.0 + 6.0))]


def test_a_trial_without_requests_meets_nothing() -> None:
    assert not Trial(3, 1.0, ((), (), ())).meets(Target(0.0, 1e9))


@given(st.integers(0, 3000), st.integers(1, 64), st.integers(1, 2048), st.sampled_from([0.0, 0.05, 0.1, 0.3]))
def test_the_search_finds_how_many_are_carried(carried: int, first: int, most: int, step: float) -> None:
    tried: list[int] = []

    async def try_(count: int) -> Trial:
        tried.append(count)
        return Trial(count, 1.0, ((reply(0.1, 0.2),),), "" if count <= carried else "too many")

    found = asyncio.run(bisect(try_, Target(1.0, 1.0), first=first, most=most, step=step))
    right = min(carried, most)
    assert found <= right <= found + max(0, int(found * step) - 1)
    assert found == max((count for count in tried if count <= carried), default=0)
    assert max(tried) <= most and len(tried) == len(set(tried)) <= 2 * most.bit_length() + 1


def test_the_search_finds_what_a_server_that_divides_its_tokens_carries() -> None:
    class Divided:
        """Computes 100 tokens per second, divided among the requests in progress, in slices of 20 ms."""

        in_progress = 0

        async def ask(self, tokens: Sequence[int], output_len: int) -> Reply:
            loop = asyncio.get_running_loop()
            self.in_progress += 1
            start_s, done, times = loop.time(), 0.0, list[float]()
            while len(times) < output_len:
                await asyncio.sleep(0.02)
                done += 2.0 / self.in_progress
                times += [loop.time()] * (int(done) - len(times))
            self.in_progress -= 1
            return Reply(start_s, tuple(times[:output_len]), len(tokens), 0, (), output_len)

    # Without think times all agents ask all the time: each gets 100 / N tokens per second.
    server = Divided()
    sessions = [plain(*[0.0] * 30, output_len=40)]
    both = Agents(server, sessions, Play(seconds=8.0, think=0.0))
    assert simulated(bisect(both.trial, Target(12.0, 10.0), step=0.0)) == 8


def test_a_running_server_is_measured(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path))
    engine, written = ScriptedEngine(tokenizer, context=2000), tmp_path / "figures.json"

    async def measure() -> None:
        async with over_port(engine, tokenizer) as endpoint:
            flags = ["--scale", "0.005", "--vocab-size", "200", "--seconds", "0.2", "--think", "0", "--agents", "1,3"]
            argv = ["--endpoint", endpoint, *flags, "--json", str(written)]
            assert await asyncio.to_thread(agents.main, argv) == 0

    run(measure())
    figures = json.loads(written.read_text())
    assert figures["sessions"]["turns"] == 43
    (case,) = figures["cases"]
    assert [trial["agents"] for trial in case["trials"]] == [1, 3]
    assert all(trial["requests"] > 0 and not trial["failure"] for trial in case["trials"])
    assert len(engine.requests) >= sum(trial["requests"] for trial in case["trials"])


async def _other_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A stream as of servers without token ids, where an event may have several tokens."""
    await reader.readuntil(b"\r\n\r\n")
    events = [
        {"choices": [{"text": "Hello"}]},
        {"choices": [{"text": " and more", "token_ids": None}]},
        {"choices": [{"text": ".", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7, "prompt_tokens_details": None}},
    ]
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    writer.write(f"HTTP/1.1 200 OK\r\n\r\n{lines}data: [DONE]\n\n".encode())
    await writer.drain()
    writer.close()


def test_a_server_that_tells_no_token_ids_is_measured_by_its_own_count() -> None:
    async def ask() -> None:
        async with await asyncio.start_server(_other_server, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            prompt = Prompt(0.0, (1, 2, 3, 4), 3)
            found = await complete(f"http://127.0.0.1:{port}", prompt, model="m", timeout_s=30)
        assert (len(found.token_times_s), found.output_tokens, found.tokens, found.cached_tokens) == (
            3,
            7,
            (-1, -1, -1),
            0,
        )

    run(ask())


@pytest.mark.parametrize(
    "argv", [[], ["model", "--endpoint", "http://x"], ["model", "--scale", "0"], ["model", "--scale", "2"]]
)
def test_options_that_cannot_work_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        agents.main(argv)
    assert "error: " in capsys.readouterr().err
