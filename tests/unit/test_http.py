"""The HTTP server with a scripted engine: over ASGI, and over a real port with the official client."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.serve import serve
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError, QueueFullError
from raycache.types import FinishReason
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import TEXT, ScriptedEngine, over_asgi, over_port, run

_KEY = "secret"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@asynccontextmanager
async def official(engine: ScriptedEngine, tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        over_port(engine, tokenizer, api_key=_KEY, **settings) as endpoint,
        openai.AsyncOpenAI(base_url=f"{endpoint}/v1", api_key=_KEY, max_retries=0) as client,
    ):
        yield client


async def until(fact: Callable[[], bool]) -> None:
    while not fact():
        await asyncio.sleep(0.005)


def sse(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_official_client_completes(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        begin = int(time.time())
        async with official(engine, tokenizer) as client:
            (model,) = [model async for model in client.models.list()]
            assert (model.id, begin <= model.created <= time.time()) == ("tiny", True)
            assert await client.models.retrieve("tiny") == model
            whole = await client.completions.create(model="tiny", prompt="Hello there", max_tokens=100, temperature=0)
            assert whole.choices[0].text == TEXT
            assert whole.choices[0].finish_reason == "stop"
            prompt_len = len(tokenizer.encode("Hello there", add_special_tokens=True))
            output_len = len(tokenizer.encode(TEXT, add_special_tokens=False)) + 1
            assert whole.usage and whole.usage.prompt_tokens == prompt_len
            assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (output_len, prompt_len + output_len)
            assert whole.usage.prompt_tokens_details
            assert whole.usage.prompt_tokens_details.cached_tokens == prompt_len // 2
            stream = await client.completions.create(
                model="tiny", prompt="Hello there", max_tokens=100, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == TEXT
            assert all(chunk.usage is None for chunk in chunks[:-1])
            assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert not any("�" in choice.text for chunk in chunks for choice in chunk.choices)

    run(scenario())
    assert engine.cancelled == []


def test_the_official_client_chats(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            whole = await client.chat.completions.create(
                model="tiny", messages=messages, logprobs=True, top_logprobs=2, stop="five", max_completion_tokens=90
            )
            cut = TEXT[: TEXT.index("five")]
            assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (cut, "stop")
            assert whole.choices[0].message.role == "assistant"
            assert whole.choices[0].logprobs and whole.choices[0].logprobs.content
            entries = whole.choices[0].logprobs.content
            assert b"".join(bytes(e.bytes or []) for e in entries).decode().startswith(cut + "five"[:1])
            assert whole.usage and len(entries) == whole.usage.completion_tokens
            assert entries[0].top_logprobs[0].logprob == -9999.0
            stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True, stop=["five"])
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut
            assert chunks[-1].choices[0].finish_reason == "stop"
            assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    run(scenario())
    assert tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(engine.cancelled) == 2  # a stop string ended each, before the engine did


def test_errors_are_those_of_the_official_client(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            ask = client.completions.create
            with pytest.raises(openai.BadRequestError) as bad:
                await ask(model="tiny", prompt="x", temperature=-1)
            assert bad.value.param == "temperature"
            assert "between 0.0 and 100.0" in bad.value.message
            with pytest.raises(openai.NotFoundError) as missing:
                await ask(model="other", prompt="x")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("a/b")
            with pytest.raises(openai.AuthenticationError) as key:
                await client.with_options(api_key="wrong").models.list()
            assert key.value.code == "invalid_api_key"
            for stream in (False, True):
                engine.refusal = QueueFullError(8, 2.5)
                with pytest.raises(openai.RateLimitError) as full:
                    await ask(model="tiny", prompt="x", stream=stream)
                assert full.value.response.headers["retry-after"] == "3"
                engine.refusal = EngineStoppedError("the engine is stopped")
                with pytest.raises(openai.InternalServerError, match="the engine is stopped") as stopped:
                    await ask(model="tiny", prompt="x", stream=stream)
                assert stopped.value.status_code == 503

    run(scenario())


@pytest.mark.parametrize(
    ("reason", "status", "words"),
    [
        (FinishReason.ERROR, 500, "rank 3 is lost"),
        (FinishReason.TIMEOUT, 408, "timeout_s"),
        (FinishReason.CANCELLED, 503, "stops"),
    ],
)
def test_a_failure_midway_is_an_error_and_ends_the_stream(
    engine: ScriptedEngine, tokenizer: Tokenizer, reason: FinishReason, status: int, words: str
) -> None:
    engine.failure = (4, reason)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            with pytest.raises(openai.APIStatusError, match=words) as failed:
                await client.completions.create(model="tiny", prompt="x")
            assert failed.value.status_code == status
            stream = await client.completions.create(model="tiny", prompt="x", stream=True)
            seen = []
            with pytest.raises(openai.APIError, match=words):
                async for chunk in stream:
                    seen.append(chunk.choices[0].text)
            assert seen and TEXT.startswith("".join(seen))

    run(scenario())


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_cancels_its_requests(tokenizer: Tokenizer, streamed: bool, n: int) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.01)
    extra = {"ignore_eos": True}

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            ask = client.completions.create(
                model="tiny", prompt="x", n=n, max_tokens=190, stream=streamed, extra_body=extra
            )
            if streamed:
                stream: Any = await ask
                await anext(aiter(stream))
                assert len(engine.running) == n
                await stream.close()
            else:
                asking = asyncio.create_task(ask)
                await until(lambda: len(engine.running) == n)
                asking.cancel()
            await until(lambda: not engine.running)

    run(scenario())
    assert len(engine.cancelled) == n


def test_a_client_that_goes_away_before_the_first_token_cancels_its_stream(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=60)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:
            asking = asyncio.create_task(client.completions.create(model="tiny", prompt="x", stream=True))
            await until(lambda: len(engine.running) == 1)
            asking.cancel()
            await until(lambda: not engine.running)

    run(scenario())
    assert len(engine.cancelled) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_that_its_server_cancels_at_any_step_leaves_nothing_running(
    engine: ScriptedEngine, tokenizer: Tokenizer, streamed: bool
) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 190, "stream": streamed, "ignore_eos": True}

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            for steps in range(60):
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait([asking])
                assert not engine.running, steps

    run(scenario())
    assert len(engine.cancelled) > 10


def test_64_streams_with_random_cancellations_leave_nothing_running(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.002)
    chance = random.Random(0)

    async def scenario() -> None:
        async with official(engine, tokenizer) as client:

            async def one(chunks_wanted: int | None) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt="x", max_tokens=60, stream=True, timeout=20
                )
                text = ""
                async for number, chunk in aenumerate(stream):
                    text += chunk.choices[0].text
                    if number == chunks_wanted:
                        await stream.close()
                        break
                return text

            wanted = [chance.choice([None, chance.randrange(20)]) for _ in range(64)]
            texts = await asyncio.gather(*map(one, wanted))
            assert all(TEXT.startswith(text) for text in texts)
            assert all(text == TEXT for text, count in zip(texts, wanted, strict=True) if count is None)
            await until(lambda: not engine.running)

    run(scenario())
    assert len(engine.requests) == 64


async def aenumerate(items: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for item in items:
        yield number, item
        number += 1


def test_stopping_the_server_ends_streams_within_the_grace_time(tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.5)

    async def scenario() -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 190, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient() as client:
            async with over_port(engine, tokenizer) as endpoint:
                asking = asyncio.create_task(client.post(f"{endpoint}/v1/completions", json=body))
                await until(lambda: len(engine.running) == 1)
            # The server has stopped here, within its second, though the request would take ninety.
            assert not engine.running
            await asyncio.gather(asking, return_exceptions=True)

    started_s = time.monotonic()
    run(scenario())
    assert time.monotonic() - started_s < 45


@pytest.mark.parametrize(("stream", "has_begun"), [(False, False), (True, False), (True, True)])
def test_a_request_that_the_stopping_server_cancels_is_told(
    tokenizer: Tokenizer, stream: bool, has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(tokenizer, delay_s=0.5 if has_begun else 25.0)

    async def scenario() -> None:
        begun = asyncio.Event()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 190, "ignore_eos": True, "stream": stream}

        async def ask(client: httpx.AsyncClient, url: str) -> tuple[int, str]:
            text = ""
            async with client.stream("POST", url, json=body) as answer:
                async for piece in answer.aiter_text():
                    text += piece
                    begun.set()
            return answer.status_code, text

        async with httpx.AsyncClient() as client:
            async with over_port(engine, tokenizer) as endpoint:
                asking = asyncio.create_task(ask(client, f"{endpoint}/v1/completions"))
                await until(lambda: begun.is_set() if has_begun else len(engine.running) == 1)
            status, text = await asking
        assert status == (200 if has_begun else 503)
        assert (sse(text)[-1] if has_begun else json.loads(text))["error"]["code"] == "engine_stopped"

    run(scenario())
    assert not any(record.exc_info for record in caplog.records)


def test_choices_of_several_prompts_interleave_with_the_right_indices(
    engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {"model": "tiny", "prompt": ["a", "bb"], "n": 2, "max_tokens": 60, "seed": 5, "echo": True}
            whole = (await client.post("/v1/completions", json=body)).json()
            streamed = sse((await client.post("/v1/completions", json={**body, "stream": True})).text)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        wanted = ["a" + TEXT] * 2 + ["bb" + TEXT] * 2
        assert [choice["text"] for choice in whole["choices"]] == wanted
        texts = ["", "", "", ""]
        for chunk in streamed:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == wanted
        assert [chunk["choices"][0]["index"] for chunk in streamed[:4]] == [0, 1, 2, 3]
        prompts = [tokenizer.encode(text, add_special_tokens=True) for text in ("a", "bb")]
        assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))

    run(scenario())
    assert [request.sampling.seed for request in engine.requests[:4]] == [5, 6, 5, 6]


def test_echo_with_logprobs_scores_the_prompt(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    prompt = "one two Köln"
    ids = tokenizer.encode(prompt, add_special_tokens=True)

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
            answer = (await client.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
            assert answer["usage"]["completion_tokens"] == 0
            logprobs = choice["logprobs"]
            assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
            assert logprobs["top_logprobs"][0] is None
            assert len(logprobs["top_logprobs"][1]) == 3  # two alternatives and the token itself
            assert logprobs["text_offset"][0] == 0
            assert logprobs["tokens"][0] == tokenizer.token_text(ids[0])
            body = {**body, "max_tokens": 3, "return_token_ids": True}
            (more,) = (await client.post("/v1/completions", json=body)).json()["choices"]
            assert len(more["logprobs"]["tokens"]) == len(ids) + 3
            assert more["prompt_token_ids"] == ids
            assert len(more["token_ids"]) == 3
            body = {**body, "stream": True}
            chunks = [chunk["choices"][0] for chunk in sse((await client.post("/v1/completions", json=body)).text)]
            assert "".join(chunk["text"] for chunk in chunks) == more["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [item for chunk in chunks if chunk["logprobs"] for item in chunk["logprobs"][name]]
                assert joined == more["logprobs"][name]
            assert [t for chunk in chunks for t in chunk["token_ids"]] == more["token_ids"]

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [400]}, "prompt", "[0, 400)"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [1, 2**31]}, "prompt", "token id 2147483648"),
        ({"prompt": [1, 2**70, -1]}, "prompt", f"token id {2**70}"),
        ({"prompt": [5] * 200}, "prompt", "200 tokens"),
        ({"prompt": [5] * 100, "max_tokens": 101}, "max_tokens", "at most 100"),
        ({"prompt": ["a"] * 9}, "prompt", "max_queue=8"),
        ({"n": 9}, "n", "max_queue=8"),
        ({"logit_bias": {"400": 1}}, "logit_bias", "[0, 400)"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"stop_token_ids": [400]}, "stop_token_ids", "[0, 400)"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"presence_penalty": 3}, "presence_penalty", "2"),
        ({"stop": ""}, "stop", "empty string"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "20"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(
    engine: ScriptedEngine, tokenizer: Tokenizer, fields: dict[str, Any], param: str, words: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == param
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"

    run(scenario())
    assert engine.requests == []


def test_a_prompt_near_the_limit_gets_fewer_tokens_by_default(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 199})
            assert answer.status_code == 200

    run(scenario())


def test_paths_methods_and_bodies_get_errors_in_the_same_shape(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    json_type = {"Content-Type": "application/json"}

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, max_body="10KB") as client:
            url = "/v1/completions"
            answers = [
                (404, await client.get("/v1/nothing")),
                (404, await client.get("/nothing")),
                (405, await client.get(url)),
                (405, await client.post("/v1/models")),
                (413, await client.post(url, content=b"x" * 10_001, headers=json_type)),
                (413, await client.post(url, content=endless(), headers=json_type)),
                (415, await client.post(url, data={"model": "tiny"})),
                (415, await client.post(url, content=b"{}")),
                (400, await client.post(url, content=b"\xff", headers=json_type)),
                (400, await client.post(url, content=b"[" * 9000, headers=json_type)),
                (400, await client.post(url, content=b"", headers=json_type)),
            ]
        for status, answer in answers:
            assert answer.status_code == status, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answers[2][1].headers["allow"] == "POST"
        async with over_asgi(engine, tokenizer) as client:
            for path, near in (("/v1/v1/messages", "/v1/messages"), ("/chat/completions", "/v1/chat/completions")):
                message = (await client.post(path, json={})).json()["error"]["message"]
                assert message.endswith(f"; did you mean {near}?")
            answer = await client.post("/v1/chat/completions", json={"model": "tiny", "mesages": []})
            assert answer.json()["error"]["message"] == "mesages is not supported; did you mean 'messages'?"
            for name, value, near in (
                ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "shcema": {}}}, "schema"),
                ("stream_options", {"include_usgae": True}, "include_usage"),
                ("structured_outputs", {"chioce": ["a"]}, "choice"),
            ):
                answer = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": [], name: value})
                error = answer.json()["error"]
                assert error["message"] == f"{error['param']} is not supported; did you mean {near!r}?"
                assert error["param"].startswith(f"{name}.")

    run(scenario())


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_a_body_that_is_no_object_is_refused_with_an_example_of_its_endpoint(
    engine: ScriptedEngine, tokenizer: Tokenizer, path: str, field: str
) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            message = (await client.post(path, json=[])).json()["error"]["message"]
        assert field in json.loads(message.partition("such as ")[2])

    run(scenario())


def test_the_key_guards_the_api_and_status_only(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, api_key=_KEY) as client:
            for path in ("/v1/models", "/status"):
                for header in ({}, {"Authorization": "Bearer secre"}, {"Authorization": _KEY}):
                    assert (await client.get(path, headers=header)).status_code == 401
                assert (await client.get(path, headers={"Authorization": f"Bearer {_KEY}"})).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200

    run(scenario())


def test_health_status_and_metrics_tell_the_engine(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with over_asgi(engine, tokenizer) as client:
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 5})
            status = (await client.get("/status")).json()
            assert (status["model"], status["steps"], status["pages_total"]) == ("tiny", 7, 64)
            text = (await client.get("/metrics")).text
            for line in (
                'raycache_steps_total{model_name="tiny",replica="0"} 7.0',
                'raycache_pages{model_name="tiny",replica="0"} 64.0',
                'raycache_requests_finished_total{model_name="tiny",reason="stop",replica="0"} 3.0',
                'raycache_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
                'raycache_inter_token_latency_seconds_count{model_name="tiny"} 4.0',
                'raycache_request_generation_tokens_sum{model_name="tiny"} 5.0',
            ):
                assert line in text.splitlines()
            engine.refusal = EngineStoppedError("the engine is stopped")
            answer = await client.get("/health")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
            lines = (await client.get("/metrics")).text.splitlines()  # an engine that is away is what they are for
            assert 'raycache_ready{model_name="tiny"} 0.0' in lines
            assert 'raycache_steps_total{model_name="tiny",replica="0"} 7.0' in lines

    run(scenario())


def test_a_port_in_use_is_refused_before_anything_listens() -> None:
    first = bind(Config(port="auto"))
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use.*--port auto"):
        bind(Config(port=port))
    first.close()
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ConfigError, match="is in use"):
        bind(Config(port=listening.getsockname()[1]))
    with pytest.raises(ConfigError, match="--host"):
        bind(Config(host="203.0.113.7", port="auto"))
    with pytest.raises(ConfigError, match="not a valid address"):
        bind(Config(host="no such host", port="auto"))


def test_the_server_can_start_again_on_a_port_that_just_served(engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    async def serve_once(port: int | str) -> int:
        config = Config(port=port)
        app = build_app(engine, config=config, info=await engine.info(), tokenizer=tokenizer)
        stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(app, sock=bind(config), stop=stop, on_started=started.set_result, config=config)
        )
        endpoint = await started
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{endpoint}/health")).status_code == 200
            stop.set()
            await serving
        return int(endpoint.rsplit(":", 1)[1])

    async def scenario() -> None:
        port = await serve_once("auto")
        assert await serve_once(port) == port

    run(scenario())


def test_a_template_that_refuses_is_a_bad_request(engine: ScriptedEngine, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "strict.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")

    async def scenario() -> None:
        async with over_asgi(engine, tokenizer, chat_template=str(path)) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
            answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]

    run(scenario())
