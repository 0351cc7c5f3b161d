"""Runs a generation on an engine: all its choices at once, their increments in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from raycache.api.completions_form import to_json
from raycache.api.engine import AsyncEngine
from raycache.api.output_text import TextDelta
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem, problem_of
from raycache.errors import EngineStoppedError, RayCacheError, RequestFailedError, RequestTimeoutError
from raycache.observe.metrics import Metrics
from raycache.types import FinishReason, RequestOutput

PING_S = 10.0


class AnswerForm(Protocol):
    """Writes the answer of one generation in the shape of an API.

    Attributes:
        names_events: server-sent events are named by the "type" of their data.
        last_event: what ends a stream, or nothing.
    """

    names_events: bool
    last_event: bytes

    def whole(self, outputs: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """The answer of a request without stream.

        Args:
            outputs: for each choice, all that its request gave.
        """
        ...

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events that come before the first increment."""
        ...

    def chunks(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """Events of one increment of a choice; none if it shows nothing."""
        ...

    def closing(self) -> Iterator[dict[str, Any]]:
        """Events behind the last increment."""
        ...

    def failure(self, problem: Problem) -> dict[str, Any]:
        """The event that ends a stream which has failed."""
        ...


class Follower(Protocol):
    """Sees what a request gives."""

    def take(self, output: RequestOutput) -> None:
        """Called with each increment."""
        ...


class Follow(Protocol):
    """Follows the request of a choice."""

    def __call__(self, generation: Generation, choice: Choice) -> AbstractContextManager[Follower] | None:
        """Follows it while the context is open; None: it is of no interest."""
        ...


async def answer(
    engine: AsyncEngine, generation: Generation, *, form: AnswerForm, metrics: Metrics, follow: Sequence[Follow] = ()
) -> bytes:
    """Run to the end; returns the JSON answer. Cancelling the task cancels all its requests.

    Raises:
        RayCacheError: the engine refused or failed; nothing runs on.
    """
    outputs: list[list[TextDelta]] = [[] for _ in generation.choices]
    async with aclosing(_increments(engine, generation, metrics, follow)) as increments:
        async for choice, delta in increments:
            outputs[choice.index].append(delta)
    return to_json(form.whole(outputs))


async def answer_stream(
    engine: AsyncEngine, generation: Generation, *, form: AnswerForm, metrics: Metrics, follow: Sequence[Follow] = ()
) -> AsyncGenerator[bytes, None]:
    """Run and give server-sent events. Closing the generator cancels all its requests.

    Nothing is given before the engine's first increment, so a request that it refuses can still get an HTTP status.

    Raises:
        RayCacheError: the engine refused or failed; nothing runs on.
    """
    seen: set[int] = set()
    async with aclosing(_increments(engine, generation, metrics, follow)) as increments:
        async for choice, delta in increments:
            if not seen:
                for chunk in form.opening():
                    yield _event(form, chunk)
            is_first = choice.index not in seen
            seen.add(choice.index)
            for chunk in form.chunks(choice, delta, is_first=is_first):
                yield _event(form, chunk)
    for chunk in form.closing():
        yield _event(form, chunk)
    if form.last_event:
        yield form.last_event


async def with_pings(events: AsyncGenerator[bytes, None], ping: bytes) -> AsyncGenerator[bytes, None]:
    """The events, and before the first one a ping from time to time, so that clients do not give up."""
    async with aclosing(events):
        first = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait({first}, timeout=PING_S))[0]:
                yield ping
            yield first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async for event in events:
            yield event


def failure_event(form: AnswerForm, error: RayCacheError) -> bytes:
    """The server-sent event that ends a stream which has failed."""
    return _event(form, form.failure(problem_of(error)), name="error")


def _event(form: AnswerForm, chunk: dict[str, Any], *, name: str = "") -> bytes:
    name = chunk["type"] if form.names_events else name
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_json(chunk) + b"\n\n"


async def _increments(
    engine: AsyncEngine, generation: Generation, metrics: Metrics, follow: Sequence[Follow]
) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    runs = [_run(engine, generation, choice, metrics, follow) for choice in generation.choices]
    async with aclosing(runs[0] if len(runs) == 1 else _interleave(runs)) as merged:
        async for item in merged:
            yield item


async def _run(
    engine: AsyncEngine, generation: Generation, choice: Choice, metrics: Metrics, follow: Sequence[Follow]
) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    """One request. Leaving it before the engine has ended the request cancels it."""
    with ExitStack() as stack:
        watch, has_begun = stack.enter_context(metrics.watch(choice.request)), False
        followers: list[Follower] = [watch]

        def begin() -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                contexts = [each(generation, choice) for each in follow]
                followers.extend(stack.enter_context(each) for each in contexts if each is not None)

        # The engine, which has the request by then, does not wait for them.
        beginning = asyncio.get_running_loop().call_soon(begin)
        try:
            async with aclosing(engine.generate(choice.request)) as outputs:
                async for output in outputs:
                    begin()
                    for follower in followers:
                        follower.take(output)
                    _raise_if_failed(output, choice)
                    delta = choice.text.push(_without_tokens(output) if generation.is_score_only else output)
                    yield choice, delta
                    if delta.finish_reason is not None and output.finish_reason is None:
                        return  # a stop string ended it; closing the outputs cancels the request
        finally:
            beginning.cancel()
            begin()  # a request that was refused has followers, too
    if choice.text.finish_reason is None:
        raise RequestFailedError(f"the engine dropped request {choice.request.request_id} before its end")


def _raise_if_failed(output: RequestOutput, choice: Choice) -> None:
    match output.finish_reason:
        case FinishReason.ERROR:
            raise RequestFailedError(output.error or "the engine failed while it ran the request")
        case FinishReason.TIMEOUT:
            raise RequestTimeoutError(
                f"the request was not done after {choice.request.timeout_s} s and has {choice.text.num_tokens} tokens; "
                "raise timeout_s (the server bounds it by --request-timeout-s) or lower max_tokens"
            )
        case FinishReason.CANCELLED:
            raise EngineStoppedError("the engine cancelled the request because it stops")


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """The engine generates one token at least; the client asked for none."""
    return replace(output, token_ids=(), logprobs=None, finish_reason=FinishReason.LENGTH)


async def _interleave(
    runs: Sequence[AsyncGenerator[tuple[Choice, TextDelta], None]],
) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    """Items of several generators as they come. The first error ends all; so does closing this one."""
    queue: asyncio.Queue[_Item | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(run, queue)) for run in runs]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                running -= 1
                item.result()
            else:
                yield item.of_choice
                item.is_taken.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    run: AsyncGenerator[tuple[Choice, TextDelta], None], queue: asyncio.Queue[_Item | asyncio.Task[None]]
) -> None:
    """Put items into the queue, one after the other has been sent: increments that come meanwhile are one."""
    async with aclosing(run) as items:
        async for of_choice in items:
            item = _Item(of_choice)
            queue.put_nowait(item)
            await item.is_taken.wait()


@dataclass(eq=False)
class _Item:
    """An increment of a choice, until it is sent."""

    of_choice: tuple[Choice, TextDelta]
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)
