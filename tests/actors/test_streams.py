"""What the front end keeps of each request, so that another engine can go on with it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from actors.streams import Stream, Streams
from raycache.errors import QueueFullError, RequestError
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams, TokenLogprob


def opened(streams: Streams, name: str, **more: object) -> Stream:
    return streams.open(GenerateRequest(name, (1, 2, 3), SamplingParams(temperature=0), **more))


def token(name: str, token_id: int, **more: object) -> tuple[str, RequestOutput]:
    return name, RequestOutput(name, (token_id,), **more)


def read(stream: Stream) -> list[Any]:
    """All that its client gets without waiting."""

    async def receive() -> list[Any]:
        found = []
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                while True:
                    found.append(await stream.unread.get())
        return found

    return asyncio.run(receive())


def test_what_is_resumed_is_what_clients_do_not_have_yet_in_the_order_of_arrival() -> None:
    streams = Streams()
    for name in "abcd":
        opened(streams, name)
    streams.take([token("a", 7), token("b", 8), token("a", 9), token("c", 5, finish_reason=FinishReason.STOP)])
    streams.take([("d", RequestError("too long"))])
    assert [(rest.request_id, rest.output) for rest in streams.resume()] == [("a", (7, 9)), ("b", (8,))]


def test_a_seed_is_drawn_once_and_a_given_one_kept() -> None:
    streams = Streams()
    drawn = opened(streams, "drawn")
    given = streams.open(GenerateRequest("given", (1,), SamplingParams(seed=5)))
    seeds = [rest.sampling.seed for rest in streams.resume()]
    assert seeds == [drawn.request.sampling.seed, 5] and seeds[0] is not None
    assert [rest.sampling.seed for rest in streams.resume()] == seeds
    assert given.request.sampling.seed == 5


def test_one_id_is_open_once() -> None:
    streams = Streams()
    first = opened(streams, "a")
    with pytest.raises(RequestError, match="already in use"):
        opened(streams, "a")
    streams.close(first)
    opened(streams, "a")


def test_time_goes_on_while_no_engine_does() -> None:
    streams = Streams()
    late, early = opened(streams, "late", timeout_s=0.05), opened(streams, "early", timeout_s=30.0)
    time.sleep(0.06)
    (rest,) = streams.resume()
    assert rest.request_id == "early" and 0 < rest.timeout_s < 29.95
    (message,) = read(late)
    assert message.finish_reason is FinishReason.TIMEOUT and not read(early)


def test_the_first_engine_says_what_was_cached() -> None:
    streams = Streams()
    stream = opened(streams, "a")
    streams.take([token("a", 1, cached_tokens=2, cached_by_tier={"device": 2}, miss=Miss.NEVER_SEEN)])
    found = read(stream)
    streams.resume()
    streams.take([token("a", 2, cached_tokens=3, cached_by_tier={"host": 3}, miss=Miss.NONE)])
    told = [(output.cached_tokens, output.cached_by_tier, output.miss) for output in found + read(stream)]
    assert told == [(2, {"device": 2}, Miss.NEVER_SEEN)] * 2


def test_what_a_new_engine_has_no_room_for_comes_again_as_others_end() -> None:
    streams = Streams()
    for name in "abc":
        opened(streams, name)
    streams.resume()
    full = QueueFullError(1, 1.0)
    assert streams.take([("b", full), ("c", full), token("a", 1)]) == []
    assert [rest.request_id for rest in streams.take([token("a", 2, finish_reason=FinishReason.STOP)])] == ["b"]
    new = opened(streams, "d")
    streams.take([("d", full)])
    assert read(new) == [full], "a client that nobody has accepted is told so"
    assert [r.request_id for r in streams.take([token("b", 2, finish_reason=FinishReason.STOP)])] == ["c"]


def test_increments_that_nobody_has_read_yet_are_one() -> None:
    streams = Streams()
    stream = opened(streams, "a")
    entries = [TokenLogprob(token_id, -0.5 * token_id) for token_id in range(5)]
    of_all = {"cached_tokens": 2, "cached_by_tier": {"host": 2}, "cut_by": "state", "miss": Miss.STATE_MISSING}
    first = token("a", 1, logprobs=(entries[1],), prompt_logprobs=(None, entries[0]), queued_s=0.5, **of_all)
    second = token("a", 2, logprobs=(entries[2],), drafted_tokens=3, accepted_tokens=2, **of_all)
    third = RequestOutput("a", (3, 4), logprobs=tuple(entries[3:]), **of_all)  # of another engine: no drafts yet
    streams.take([first, second, ("a", third)])
    (joined,) = read(stream)
    assert joined == RequestOutput(
        "a",
        (1, 2, 3, 4),
        logprobs=tuple(entries[1:]),
        prompt_logprobs=(None, entries[0]),
        queued_s=0.5,
        drafted_tokens=3,
        accepted_tokens=2,
        **of_all,
    )
    streams.take([token("a", 5), token("a", 6, finish_reason=FinishReason.STOP)])
    assert [(each.token_ids, each.finish_reason) for each in read(stream)] == [((5, 6), FinishReason.STOP)]
    assert stream.tokens == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "end", [RequestError("too long"), RequestOutput("a", finish_reason=FinishReason.ERROR, error="rank 3 is lost")]
)
def test_tokens_come_before_the_failure_behind_them(end: RequestError | RequestOutput) -> None:
    streams = Streams()
    stream = opened(streams, "a")
    streams.take([token("a", 1), token("a", 2), ("a", end)])
    tokens, last = read(stream)
    assert tokens.token_ids == (1, 2) and tokens.finish_reason is None
    assert last is end


def test_an_increment_that_comes_while_one_waits_for_it_is_read_at_once() -> None:
    streams = Streams()
    stream = opened(streams, "a")

    async def receive() -> list[tuple[int, ...]]:
        found = []
        for token_id in (7, 8):
            waiting = asyncio.create_task(stream.unread.get())
            await asyncio.sleep(0)
            streams.take([token("a", token_id)])
            found.append((await asyncio.wait_for(waiting, 10)).token_ids)
        return found

    assert asyncio.run(receive()) == [(7,), (8,)]
