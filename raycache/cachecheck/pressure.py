"""Ways to use a cache that need many or long requests: many at once, eviction, recall, and time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import AsyncIterator

from raycache.cachecheck.lab import Comparison, Finding, Lab
from raycache.cachecheck.target import Cold

AT_ONCE = 8
"""Requests at the same time."""

_FILLERS, _FEW_FILLERS = 8, 3
_LONG = 4
"""Times the usual length."""

_TIMED = 6


async def load(lab: Lab) -> AsyncIterator[Finding]:
    """Prompts that are cached and branches of them, all at once."""
    write = lab.writer
    questions = [write.question() for _ in range(AT_ONCE // 2)]
    shared_space = await lab.space()  # one for all: with flushes, the next one would empty it
    spaces = [shared_space if lab.target.cold is Cold.FLUSH else await lab.space() for _ in questions]
    pairs = list(zip(questions, spaces, strict=True))
    firsts = [await lab.ask(*pair) for pair in pairs]
    branches = [dataclasses.replace(one, text=f"{one.text} same\n{write.ending(5)}") for one in questions]
    asked = [*pairs, *zip(branches, spaces, strict=True)]
    answers = await lab.together(asked)
    for question, first, answer in zip(questions, firsts, answers, strict=False):
        what = f"a repeated prompt, {AT_ONCE} at once"
        for one in lab.both(what, reference=first, observed=answer, topic=question.topic):
            yield one
    for branch, first, answer in zip(branches, firsts, answers[len(pairs) :], strict=False):
        cold, what = await lab.cold(branch), f"a branch, {AT_ONCE} at once"
        shared = None if first.prompt_tokens is None else first.prompt_tokens + write.output_tokens
        for one in lab.both(what, reference=cold, observed=answer, shared=shared, topic=branch.topic):
            yield one


async def evicted(lab: Lab) -> AsyncIterator[Finding]:
    """Two prompts again, after some long ones and after many: they take their place where the cache is small.

    A device forgets the first of them sooner than the tiers below it, and these the second.
    """
    write, space = lab.writer, await lab.space()
    old, recent = write.question(), write.question()
    first, second = [await lab.ask(question, space) for question in (old, recent)]
    fillers = [(write.question(_LONG * write.num_records), space) for _ in range(_FILLERS)]
    some = await lab.together(fillers[:_FEW_FILLERS])
    soon = await lab.ask(recent, space)
    more = await lab.together(fillers[_FEW_FILLERS:])
    late = await lab.ask(old, space)
    again = await lab.ask(old, space)
    few, many = (sum(other.prompt_tokens or 0 for other in others) for others in (some, [second, *some, soon, *more]))
    for what, reference, answer, topic in (
        (f"after {few:,} tokens of other prompts", second, soon, recent.topic),
        (f"after {many:,} tokens of other prompts", first, late, old.topic),
        (f"again after {many:,} tokens of other prompts", first, again, old.topic),
    ):
        for one in lab.both(what, reference=reference, observed=answer, topic=topic):
            yield one


async def needle(lab: Lab) -> AsyncIterator[Finding]:
    """A fact in a long prompt, asked cold and from the cache."""
    question, code = lab.writer.needle(_LONG * lab.writer.num_records)
    space = await lab.space()
    first = await lab.ask(question, space)
    answer = await lab.ask(question, space)
    recalled = code in first.text, code in answer.text
    for one in lab.both("a fact in a long prompt", reference=first, observed=answer):
        yield dataclasses.replace(one, recalled=recalled) if isinstance(one, Comparison) else one


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds until the first token of a long prompt.

    Attributes:
        short: prompts of a tenth of the length, cold.
        cold: without the cache.
        hit: repeated, as far as `usage` claims nearly all of it to be cached.
    """

    short: tuple[float, ...]
    cold: tuple[float, ...]
    hit: tuple[float, ...]

    @property
    def can_tell(self) -> bool:
        """Whether computing a prompt takes long enough to be noticed: each long one twice the time of any short one."""
        return len(self.hit) >= _TIMED and min(self.cold) > 2 * max(self.short)

    @property
    def is_refuted(self) -> bool:
        """Whether not one of the claimed hits was faster than computing, which is overwhelming evidence.

        A right server passes unless each of `_TIMED` hits is delayed by nearly the time of computing it, while not one
        short prompt is.
        """
        return self.can_tell and min(self.hit) >= 0.8 * statistics.median(self.cold)

    @property
    def text(self) -> str:
        """What was found, in a sentence."""
        if not self.hit:
            return "no prompt was claimed to be cached"
        cold, hit = statistics.median(self.cold), statistics.median(self.hit)
        found = f"{cold * 1e3:.0f} ms cold, {hit * 1e3:.0f} ms where usage claims a hit"
        if self.is_refuted:
            return f"{found}; no claimed hit was faster than computing"
        is_faster = hit < cold / 2
        return found if self.can_tell or is_faster else f"{found}; too close to that of short prompts to tell"


async def measure_time(lab: Lab) -> Timing:
    """Time cold and repeated prompts, alternating, one token each."""
    short, cold, hit = [], [], []
    for _ in range(_TIMED):
        space = await lab.space()
        little = dataclasses.replace(lab.writer.question(max(1, _LONG * lab.writer.num_records // 10)), output_tokens=1)
        long = dataclasses.replace(lab.writer.question(_LONG * lab.writer.num_records), output_tokens=1)
        short.append((await lab.ask(little, space)).seconds)
        cold.append((await lab.ask(long, space)).seconds)
        again = await lab.ask(long, space)
        if (again.cached_tokens or 0) >= 0.8 * (again.prompt_tokens or 1):
            hit.append(again.seconds)
    return Timing(tuple(short), tuple(cold), tuple(hit))
