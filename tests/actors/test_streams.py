"""What the front end keeps of each request, so that another engine can go on with it."""

from __future__ import annotations

import time

import pytest

from actors.streams import Stream, Streams
from raycache.errors import QueueFullError, RequestError
from raycache.types import FinishReason, GenerateRequest, Miss, RequestOutput, SamplingParams


def opened(streams: Streams, name: str, **more: object) -> Stream:
    return streams.open(GenerateRequest(name, (1, 2, 3), SamplingParams(temperature=0), **more))


def token(name: str, token_id: int, **more: object) -> tuple[str, RequestOutput]:
    return name, RequestOutput(name, (token_id,), **more)


def read(stream: Stream) -> list[object]:
    return [stream.messages.get_nowait() for _ in range(stream.messages.qsize())]


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
    streams.resume()
    streams.take([token("a", 2, cached_tokens=3, cached_by_tier={"host": 3}, miss=Miss.NONE)])
    told = [(output.cached_tokens, output.cached_by_tier, output.miss) for output in read(stream)]
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
