"""Where scenarios ask their questions: spaces that share nothing, and comparisons of what was answered in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from raycache.cachecheck.answers import Answer, Question
from raycache.cachecheck.client import Client
from raycache.cachecheck.compare import Difference, difference
from raycache.cachecheck.target import Cold, Target
from raycache.cachecheck.text import Writer

_SLACK = 2
"""Tokens by which two texts may share more than was counted, where a tokenizer joins them differently."""


@dataclass(frozen=True)
class Space:
    """A part of the cache of its own.

    Attributes:
        salt: empty: none.
        line: first line of all prompts in it; empty: their own.
        is_off: whether its requests turn the cache off.
    """

    salt: str = ""
    line: str = ""
    is_off: bool = False


@dataclass(frozen=True)
class Comparison:
    """An answer beside that to the same question without the cache.

    Attributes:
        scenario: which asked.
        what: the case, in words.
        reference: cold.
        observed: what is tested.
        difference: between both.
        number: last request that was sent before.
        topic: of the prompt, where a scenario has several.
        recalled: whether the cold and the tested answer have the fact that was asked for; None: none was.
    """

    scenario: str
    what: str
    reference: Answer
    observed: Answer
    difference: Difference
    number: int
    topic: str = ""
    recalled: tuple[bool, bool] | None = None

    @property
    def is_hit(self) -> bool:
        """Whether the tested answer came from the cache, as far as is told."""
        return self.observed.cached_tokens is None or self.observed.cached_tokens > 0


@dataclass(frozen=True)
class Violation:
    """Something that no noise explains.

    Attributes:
        scenario: which found it.
        what: in a sentence.
        number: last request that was sent before.
    """

    scenario: str
    what: str
    number: int


Finding = Comparison | Violation


class Scenario(Protocol):
    """A way to use the cache. Yields what was found as soon as it is."""

    def __call__(self, lab: Lab) -> AsyncIterator[Finding]: ...


class Lab:
    """Asks questions for one scenario.

    Args:
        name: of the scenario.
    """

    def __init__(self, name: str, *, client: Client, target: Target, writer: Writer) -> None:
        self.name, self.target, self.writer = name, target, writer
        self._client = client

    async def space(self) -> Space:
        """A part of the cache that is empty; with flushes, everything else is lost."""
        match self.target.cold:
            case Cold.SALT:
                return Space(salt=self.writer.unique())
            case Cold.LINE:
                return Space(line=self.writer.unique())
            case Cold.FLUSH:
                await self._client.command(self.target.flush)
                return Space()
            case Cold.OFF:
                return Space()  # each question has a topic of its own

    async def cold_space(self) -> Space:
        """A space for one request, which finds nothing in the cache."""
        return Space(is_off=True) if self.target.cold is Cold.OFF else await self.space()

    async def ask(self, question: Question, space: Space) -> Answer:
        """Ask a question in a space."""
        line = space.line or question.topic
        path, body = self.target.request(question, line=line, salt=space.salt, is_off=space.is_off)
        return await self._client.ask(path, body)

    async def cut(self, question: Question, space: Space, *, after: int) -> None:
        """Begin to ask, and close the connection after some events."""
        path, body = self.target.request(question, line=space.line or question.topic, salt=space.salt)
        await self._client.cut(path, body, after=after)

    async def together(self, asked: Sequence[tuple[Question, Space]]) -> list[Answer]:
        """Ask several questions at once; fewer if the budget ends."""
        tasks = [self.ask(*one) for one in asked[: max(1, self._client.left)]]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, Answer)]

    async def cold(self, question: Question) -> Answer:
        """Ask a question in a space of its own."""
        return await self.ask(question, await self.cold_space())

    def compare(self, what: str, *, reference: Answer, observed: Answer, topic: str = "") -> Comparison:
        """Compare answers to the same question."""
        apart = difference(reference, observed)
        return Comparison(self.name, what, reference, observed, apart, self._client.sent, topic)

    def violations(self, what: str, *, reference: Answer, observed: Answer, shared: int | None) -> list[Violation]:
        """What `usage` claims and cannot be.

        Args:
            shared: most tokens that the observed prompt shares with those before it in its space; None: not known.
        """
        cached, length = observed.cached_tokens or 0, observed.prompt_tokens
        found = []
        if length is not None and cached > length:
            found.append(f"{what}: usage claims {cached} cached tokens of a prompt of {length}")
        elif shared is not None and cached > shared + _SLACK:
            found.append(f"{what}: usage claims {cached} cached tokens, but only {shared} had been sent before")
        if self.target.cold is not Cold.LINE and length is not None and reference.prompt_tokens not in (None, length):
            found.append(f"{what}: the prompt has {length} tokens, and {reference.prompt_tokens} without the cache")
        return [Violation(self.name, one, self._client.sent) for one in found]

    def violation(self, what: str) -> Violation:
        """A fault that needs no comparison."""
        return Violation(self.name, what, self._client.sent)

    def both(
        self, what: str, *, reference: Answer, observed: Answer, shared: int | None = None, topic: str = ""
    ) -> list[Comparison | Violation]:
        """Compare answers and check what `usage` claims; see `Comparison` for `topic`."""
        return [
            *self.violations(what, reference=reference, observed=observed, shared=shared),
            self.compare(what, reference=reference, observed=observed, topic=topic),
        ]

    @property
    def left(self) -> int:
        """Requests left of the budget."""
        return self._client.left
