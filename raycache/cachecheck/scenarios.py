"""Ways to use a cache, one prompt at a time.

A space begins empty. What is asked in it may be answered from what was asked in it before; `lab.cold` answers the same
question without. Warm questions come first: with flushes, a cold one empties all spaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from raycache.cachecheck.answers import Question
from raycache.cachecheck.lab import Finding, Lab

_CALL = {"id": "call00001", "type": "function", "function": {"name": "find_record", "arguments": '{"number": 2}'}}


async def repeated(lab: Lab) -> AsyncIterator[Finding]:
    """The same prompt again: the first answer is the cold one."""
    question, space = lab.writer.question(), await lab.space()
    first = await lab.ask(question, space)
    for time in ("second", "third"):
        answer = await lab.ask(question, space)
        for one in lab.both(f"the {time} time", reference=first, observed=answer):
            yield one


async def branched(lab: Lab) -> AsyncIterator[Finding]:
    """Other endings at other depths of a prompt that is cached, and the first one again."""
    write, space = lab.writer, await lab.space()
    count = write.length() + 4
    lines = write.records(count).splitlines(keepends=True)
    trunk = write.ask(write.unique(), "".join(lines) + write.ending(count))
    first = await lab.ask(trunk, space)
    again = await lab.ask(trunk, space)  # before the cold ones, which may empty the cache
    branches = []
    depths = sorted({write.choose(2, count - 1), write.choose(count // 2, count)})
    for depth in depths:
        text = "".join(lines[:depth]) + "Others:\n" + write.records(write.choose(1, 4), start=500) + write.ending(depth)
        branch = dataclasses.replace(trunk, text=text)
        branches.append((depth, branch, await lab.ask(branch, space)))
    last = await lab.ask(trunk, space)
    for what, answer in (("the trunk again", again), ("the trunk after its branches", last)):
        for one in lab.both(what, reference=first, observed=answer):
            yield one
    head = dataclasses.replace(trunk, text="".join(lines[: depths[0]]), output_tokens=1)
    shared = (await lab.cold(head)).prompt_tokens
    for depth, branch, answer in branches:
        cold = await lab.cold(branch)
        what = f"a branch behind record {depth} of {count}"
        most = shared if depth == depths[0] else first.prompt_tokens
        for one in lab.both(what, reference=cold, observed=answer, shared=most):
            yield one


async def grown(lab: Lab) -> AsyncIterator[Finding]:
    """A text that grows by the answer and more, turn by turn; then back to an earlier turn, and on from there."""
    write, space = lab.writer, await lab.space()
    question = write.question(max(3, write.num_records // 2))
    warm, shared = [], 0
    for turn in range(1, 5):
        answer = await lab.ask(question, space)
        warm.append((f"turn {turn}", question, answer, shared))
        shared = (answer.prompt_tokens or 0) + lab.writer.output_tokens
        more = write.records(write.choose(1, max(2, write.num_records // 3)), start=100 * turn)
        question = dataclasses.replace(question, text=f"{question.text}{answer.text}\n{more}{write.ending(5)}")
    turn = write.choose(2, 3)
    earlier = warm[turn - 1][1]
    back = dataclasses.replace(earlier, text=f"{earlier.text} same\n{write.ending(5)}")
    warm.append((f"another turn {turn + 1} after turn 4", back, await lab.ask(back, space), shared))
    known = warm[0][2].prompt_tokens is not None
    for what, asked, answer, most in warm[1:]:
        cold = await lab.cold(asked)
        for one in lab.both(what, reference=cold, observed=answer, shared=most if known else None):
            yield one


async def cut(lab: Lab) -> AsyncIterator[Finding]:
    """A stream that the client closes, and the same prompt again."""
    question, space = lab.writer.question(), await lab.space()
    events = lab.writer.choose(1, 4)
    await lab.cut(question, space, after=events)
    answers = [await lab.ask(question, space) for _ in range(2)]
    cold = await lab.cold(question)
    for time, answer in zip(("after", "again after"), answers, strict=True):
        for one in lab.both(f"{time} a stream cut at event {events}", reference=cold, observed=answer):
            yield one


async def tenants(lab: Lab) -> AsyncIterator[Finding]:
    """The same prompt under two salts: the second must neither hit nor differ."""
    question, mine, other = lab.writer.question(), await lab.space(), await lab.space()
    first = await lab.ask(question, mine)
    for time in ("first", "second"):
        answer = await lab.ask(question, other)
        if time == "first" and answer.cached_tokens:
            yield lab.violation(
                f"a prompt under a new salt had {answer.cached_tokens} cached tokens, sent under another salt"
            )
        for one in lab.both(f"another salt's {time} time", reference=first, observed=answer):
            yield one


async def tools(lab: Lab) -> AsyncIterator[Finding]:
    """A conversation with tools: again, with other tools, and grown by a call and its result."""
    write, space = lab.writer, await lab.space()
    user = {"role": "user", "content": write.ending(5)}
    mine = Question(write.unique(), write.records(write.length()), (user,), write.tools(), write.output_tokens)
    called = (user, {"role": "assistant", "content": "", "tool_calls": [_CALL]})
    results = [
        {"role": "tool", "tool_call_id": _CALL["id"], "content": write.records(write.choose(2, 5), start=200)}
        for _ in range(2)
    ]
    asked = [
        ("the same tools", mine),
        ("other tools", dataclasses.replace(mine, tools=write.tools())),
        ("no tools", dataclasses.replace(mine, tools=())),
        ("a tool's result", dataclasses.replace(mine, messages=(*called, results[0]))),
        ("another result of the same call", dataclasses.replace(mine, messages=(*called, results[1]))),
    ]
    await lab.ask(mine, space)
    warm = [(what, question, await lab.ask(question, space)) for what, question in asked]
    for what, question, answer in warm:
        for one in lab.both(what, reference=await lab.cold(question), observed=answer):
            yield one


async def drafts(lab: Lab) -> AsyncIterator[Finding]:
    """A text that draft tokens get right, and which is cached."""
    question, space = lab.writer.pattern(), await lab.space()
    first = await lab.ask(question, space)
    answer = await lab.ask(question, space)
    for one in lab.both("a predictable text, with drafts", reference=first, observed=answer):
        yield one
