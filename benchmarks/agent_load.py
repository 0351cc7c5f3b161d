"""Replays sessions of agents against a server, and finds how many agents it carries.

    trial      warm-up: every agent sends the text before a turn in the middle of its session, uncounted
               then for some seconds each agent asks, thinks, asks; one that is through takes another session
               requests that began in that time are counted when they end

A prompt holds the answers that the server gave, as a client sends them back. Every trial has other text but for what
sessions share, so that no trial profits from the one before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.client import Reply
from benchmarks.figures import percentile
from benchmarks.sessions import Piece, Session, Turn, draw, shared_blocks


class Server(Protocol):
    """Answers prompts."""

    async def ask(self, tokens: Sequence[int], output_len: int) -> Reply:
        """Send token ids and wait for the answer.

        Raises:
            RuntimeError, TimeoutError, OSError: there is none.
        """
        ...


@dataclass(frozen=True)
class Play:
    """How sessions are replayed.

    Attributes:
        seconds: in which requests that begin are counted.
        scale: of lengths in tokens, above 0 and up to 1.
        think: factor of think times.
        longest_think_s: limit of a think time, after the factor.
        token_ids: to make text of.
        seed: of where agents begin.
    """

    seconds: float = 60.0
    scale: float = 1.0
    think: float = 1.0
    longest_think_s: float = 10.0
    token_ids: Sequence[int] = range(1000, 32_000)
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """What agents must get for a deployment to carry them.

    Attributes:
        tokens_per_s: that 90 % of the agents must reach while they are answered.
        first_token_s: time within which 95 % of the requests must have their first token.
    """

    tokens_per_s: float = 20.0
    first_token_s: float = 2.0


@dataclass(frozen=True)
class Trial:
    """What a number of agents got.

    Attributes:
        agents: that ran at a time.
        seconds: from the first counted request to the end of the last.
        replies: of each agent, those of its subagents included.
        failure: why the trial was given up, or "".
    """

    agents: int
    seconds: float
    replies: tuple[tuple[Reply, ...], ...]
    failure: str = ""

    def speeds(self) -> list[float]:
        """Tokens per second of each agent behind the first token, of those that got more than one."""
        found = []
        for replies in self.replies:
            seconds = sum(reply.token_times_s[-1] - reply.token_times_s[0] for reply in replies)
            if seconds > 0:
                found.append(sum(reply.output_tokens - 1 for reply in replies) / seconds)
        return found

    def figures(self) -> dict[str, Any]:
        """Seconds, tokens per second, and the share of prompt tokens that came from the cache."""
        replies = [reply for each in self.replies for reply in each]
        first_s = [reply.first_token_s for reply in replies]
        gaps_s = [gap for reply in replies for gap in reply.gaps_s]
        speeds = self.speeds()
        return {
            "agents": self.agents,
            "requests": len(replies),
            "seconds": self.seconds,
            "first_token_p50_s": percentile(first_s, 50),
            "first_token_p95_s": percentile(first_s, 95),
            "tokens_per_s_p50": percentile(speeds, 50),
            "tokens_per_s_p90": percentile(speeds, 10),  # 90 % have as many or more
            "between_tokens_p50_s": percentile(gaps_s, 50),
            "between_tokens_p99_s": percentile(gaps_s, 99),
            "output_tokens_per_s": sum(reply.output_tokens for reply in replies) / max(self.seconds, 1e-9),
            "cached": sum(reply.cached_tokens for reply in replies)
            / max(1, sum(reply.prompt_tokens for reply in replies)),
            "failure": self.failure,
        }

    def meets(self, target: Target) -> bool:
        """Whether the agents got what they must."""
        figures = self.figures()
        return (
            not self.failure
            and figures["tokens_per_s_p90"] >= target.tokens_per_s
            and figures["first_token_p95_s"] <= target.first_token_s
        )


class Agents:
    """Runs trials.

    Args:
        sessions: that agents take in turn; a trial with more agents has those of one with fewer.
    """

    def __init__(self, server: Server, sessions: Sequence[Session], play: Play) -> None:
        self._server, self._sessions, self._play = server, sessions, play
        self._shared = shared_blocks(sessions)
        self._num_trials = 0

    async def trial(self, count: int) -> Trial:
        """Let `count` agents work. The first request that fails ends the trial."""
        self._num_trials += 1
        agents = [
            _Agent(self._server, self._play, self._shared, f"{self._num_trials}.{number}", self._taken(number, count))
            for number in range(count)
        ]
        loop = asyncio.get_running_loop()
        failure, begin_s = "", loop.time()
        try:
            await _all([agent.warm_up(random.Random(f"{self._play.seed} {n}")) for n, agent in enumerate(agents)])
            begin_s = loop.time()
            await _all([agent.work(end_s=begin_s + self._play.seconds) for agent in agents])
        except (RuntimeError, TimeoutError, OSError) as error:
            failure = str(error) or type(error).__name__
        return Trial(count, loop.time() - begin_s, tuple(tuple(agent.replies) for agent in agents), failure)

    def _taken(self, number: int, count: int) -> Iterator[Session]:
        """The sessions of one of `count` agents."""
        while True:
            yield self._sessions[number % len(self._sessions)]
            number += count


class _Agent:
    """One agent of a trial.

    Args:
        name: of the trial and the agent; texts of other names differ.
        sessions: that it takes one after the other.
    """

    def __init__(
        self, server: Server, play: Play, shared: frozenset[str], name: str, sessions: Iterator[Session]
    ) -> None:
        self._server, self._play, self._shared, self._name, self._sessions = server, play, shared, name, sessions
        self._session, self._first, self._text = next(sessions), 0, list[int]()
        self._num_sessions = 0
        self._delay_s = self._end_s = 0.0
        self.replies: list[Reply] = []

    async def warm_up(self, random_: random.Random) -> None:
        """Begin somewhere in the first session, and send the text before."""
        turns = self._session.turns
        self._first = random_.randrange(len(turns))
        for number, turn in enumerate(turns[: self._first]):
            self._text = [*self._prompt(self._text, turn), *self._other_answer(self._session, number)]
        self._delay_s = self._think_s(turns[self._first]) * random_.random()
        if self._text:
            await self._server.ask(self._text, 1)

    async def work(self, *, end_s: float) -> None:
        """Go on until no request may begin any more."""
        self._end_s = end_s
        await self._sleep(self._delay_s)
        is_going_on = await self._turns(self._session, self._first, self._text)
        while is_going_on:
            self._num_sessions += 1
            is_going_on = await self._turns(next(self._sessions), 0, [])

    async def _turns(self, session: Session, first: int, text: list[int]) -> bool:
        """Do the turns of a session from one on, behind its text so far; False if there was no time for all."""
        for number, turn in enumerate(session.turns[first:], start=first):
            if number > first:
                await self._sleep(self._think_s(turn))
            if asyncio.get_running_loop().time() >= self._end_s:
                return False
            prompt = self._prompt(text, turn)
            reply = await self._server.ask(prompt, self._scaled(turn.output_len))
            self.replies.append(reply)
            is_known = bool(reply.tokens) and -1 not in reply.tokens
            text = [*prompt, *(reply.tokens if is_known else self._other_answer(session, number))]
            await _all([self._turns(subagent, 0, text) for subagent in turn.subagents])
        return True

    def _prompt(self, text: list[int], turn: Turn) -> list[int]:
        kept = len(text) if turn.kept is None else round(turn.kept * self._play.scale)
        return text[:kept] + (self._draw(turn.new) or ([] if kept else [self._play.token_ids[0]]))

    def _other_answer(self, session: Session, number: int) -> list[int]:
        """Tokens in place of an answer that is not known."""
        name = f"{session.name} answer {number}"
        return self._draw((Piece(name, session.turns[number].output_len),))

    def _draw(self, pieces: tuple[Piece, ...]) -> list[int]:
        play = f"{self._name}.{self._num_sessions}"
        return draw(pieces, scale=self._play.scale, play=play, shared=self._shared, token_ids=self._play.token_ids)

    def _scaled(self, output_len: int) -> int:
        return max(2, round(output_len * self._play.scale))  # one token has no speed

    def _think_s(self, turn: Turn) -> float:
        return min(turn.think_s * self._play.think, self._play.longest_think_s)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, max(0.0, self._end_s - asyncio.get_running_loop().time())))


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Run together; the first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def bisect(
    try_: Callable[[int], Awaitable[Trial]], target: Target, *, first: int = 1, most: int = 1024, step: float = 0.1
) -> int:
    """Find how many agents a deployment carries, if fewer never fail where more do not.

    Args:
        try_: runs a trial of so many agents.
        first: number to begin with; it is doubled while the target is met.
        most: number at which to stop.
        step: the answer is off by at most this share of it, or by less than one agent.
    Returns:
        The largest number tried that met the target; 0 if none did.
    """
    met, missed = 0, most + 1
    count = min(first, most)
    while missed - met > max(1, int(met * step)):
        if (await try_(count)).meets(target):
            met = count
        else:
            missed = count
        count = min(2 * met, most) if missed > most else (met + missed) // 2
    return met
