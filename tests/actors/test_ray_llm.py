"""RayCache as the server class of Ray Serve LLM; the last test needs vLLM's or SGLang's request classes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pydantic
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from actors.cluster import Cluster
from actors.serve_llm import deployment_options
from launch.http.inside import post
from launch.ray_llm import RayCacheServer, body_of, config_of
from raycache.errors import ConfigError
from tests.actors.test_ingress import free_port


def llm_config(**changes: Any) -> Any:
    loading = {"model_id": "tiny", "model_source": "/models/tiny", "tokenizer_source": None}
    fields = {
        "engine_kwargs": {"cp": 2},
        "deployment_config": {},
        "runtime_env": None,
        "lora_config": None,
        "placement_group_config": None,
        "accelerator_type": None,
        **changes,
    }
    loading |= fields.pop("model_loading_config", {})
    return SimpleNamespace(model_loading_config=SimpleNamespace(**loading), model_id=loading["model_id"], **fields)


class Parsed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    messages: list[Any]
    model: str | None = None
    temperature: float = 0.7
    stream: bool = False


def test_engine_kwargs_are_settings() -> None:
    config = config_of(llm_config(engine_kwargs={"cp": 2, "page_size": 16}))
    assert (config.model, config.served_model_name, config.cp, config.page_size) == ("/models/tiny", "tiny", 2, 16)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"engine_kwargs": {"page_sise": 16}}, "engine_kwargs: unknown setting 'page_sise'.*page_size"),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "RayCache's setting is tp"),
        ({"engine_kwargs": {"model": "x"}}, "model_source of the LLMConfig"),
        ({"engine_kwargs": {"cp": 0}}, "engine_kwargs: .*cp"),
        ({"model_loading_config": {"tokenizer_source": "x"}}, "tokenizer_source"),
        ({"accelerator_type": "H100"}, "accelerator_type"),
        ({"lora_config": {"a": 1}}, "lora_config"),
    ],
)
def test_what_raycache_cannot_honour_is_an_error(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RayCacheServer.get_deployment_options(llm_config(**changes))


@pytest.mark.parametrize(
    "scaled", [{"num_replicas": 2}, {"num_replicas": "auto"}, {"autoscaling_config": {"max_replicas": 3}}]
)
def test_a_second_replica_of_serve_is_refused(scaled: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="would not share a cache"):
        deployment_options(llm_config(deployment_config=scaled))


def test_the_replica_of_serve_takes_no_cpu_and_has_the_runtime_env() -> None:
    options = deployment_options(
        llm_config(runtime_env={"env_vars": {"A": "1"}}, deployment_config={"num_replicas": 1})
    )
    assert options["ray_actor_options"] == {"num_cpus": 0, "runtime_env": {"env_vars": {"A": "1"}}}


def test_a_body_has_what_the_client_sent_and_no_defaults_of_others() -> None:
    sent = {"messages": [{"role": "user", "content": "hi"}], "return_cache_info": True}
    assert body_of(Parsed.model_validate(sent), model="tiny") == {**sent, "model": "tiny"}


def test_an_answer_is_streamed_and_ends_with_its_reader() -> None:
    ended = asyncio.Event()

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({"got": await request.json(), "key": request.headers["authorization"]}, status_code=418)

    async def endless() -> Any:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(endless())

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/stream", stream, methods=["POST"])])

    async def use() -> None:
        headers = {"Authorization": "Bearer k", "Content-Length": "999"}
        status, *parts = [part async for part in post(app, "/echo", body=b'{"a": 1}', headers=headers)]
        assert status == 418
        assert json.loads(b"".join(parts)) == {"got": {"a": 1}, "key": "Bearer k"}  # type: ignore[arg-type]
        answer = post(app, "/stream", body=b"{}", headers={})
        assert [await anext(answer), await anext(answer)] == [200, b"data: x\n\n"]
        await answer.aclose()
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(use())


def test_ray_serve_llm_serves_with_raycache(cluster: Cluster, model: Path) -> None:
    try:
        from ray.serve.llm import LLMConfig, build_openai_app
    except ImportError as error:
        pytest.skip(f"ray.serve.llm cannot be imported, it needs vLLM or SGLang: {error}")
    from ray import serve

    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": str(model)},
        engine_kwargs={"device": "cpu", "page_size": 16, "num_pages": 512, "api_key": "secret"},
        server_cls="launch.ray_llm:RayCacheServer",
    )
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_openai_app({"llm_configs": [config]}), name="llm")
        use_openai(f"http://127.0.0.1:{port}/v1")
    finally:
        serve.shutdown()


def use_openai(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0, timeout=120) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        plain: dict[str, Any] = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 8, "temperature": 0}
        first = client.completions.create(**plain)
        second = client.completions.create(**plain)
        assert second.choices[0].text == first.choices[0].text
        assert first.usage and first.usage.completion_tokens
        assert second.usage and second.usage.prompt_tokens_details
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 80
        streamed = client.completions.create(**plain, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == first.choices[0].text

        chat: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        chat["messages"] = [{"role": "system", "content": "y" * 100}, {"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(**chat)
        again = client.chat.completions.create(**chat)
        assert again.usage and again.usage.prompt_tokens_details
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 80
        events = client.chat.completions.create(**chat, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text == (whole.choices[0].message.content or "") == (again.choices[0].message.content or "")

        with pytest.raises(openai.BadRequestError, match="max_tokens|context"):
            client.completions.create(model="tiny", prompt=[5] * 4000, max_tokens=5)
        with pytest.raises(openai.APIStatusError) as refused:
            client.embeddings.create(model="tiny", input="x")
        assert refused.value.status_code == 501
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").completions.create(**plain)
