"""RayCache as the server class of Ray Serve LLM.

LLMConfig(
    model_loading_config={"model_id": "smollm2", "model_source": "/models/smollm2"},
    engine_kwargs={"cp": 2, "host_memory": "1GiB"},                                    settings
    server_cls="launch.ray_llm:RayCacheServer",
)

RAYCACHE_API_KEY and RAYCACHE_STORAGE in the environment (`runtime_env`) work as for `raycache launch`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp

from actors.hub import HubClient
from actors.ingress import Engines
from actors.serve_llm import chat_response, completion_response, deployment_options, error_response
from launch.environment import api_key, storage
from launch.http.inside import post
from launch.ray_serve import build
from raycache.checkpoint.hub_models import pinned
from raycache.config import Config
from raycache.errors import ConfigError

_ELSEWHERE = {"model": "model_loading_config.model_source", "served_model_name": "model_loading_config.model_id"}
_OF_VLLM = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "replicas",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "enable_prefix_caching": "prefix_cache",
    "block_size": "page_size",
}


class RayCacheServer(Engines):
    """Serves one model; `LLMConfig.server_cls` of Ray Serve LLM.

    Args:
        llm_config: an `LLMConfig`; see `config_of`.
    """

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._llm_config = llm_config
        config = pinned(config_of(llm_config))
        await super().__init__(config)
        self._app = build(HubClient(self._hub), config, self._info)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Called where the application is built, so a mistake in the configuration is an error there.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        config_of(llm_config)
        return deployment_options(llm_config)

    async def start(self) -> None:
        """The constructor has started the engines."""

    async def llm_config(self) -> Any:
        """The `LLMConfig`."""
        return self._llm_config

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve when clients reach this deployment without Ray's ingress (direct streaming)."""
        return self._app

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream as text, or one `ChatCompletionResponse`; or one `ErrorResponse`."""
        async with aclosing(self._ask("/v1/chat/completions", request, raw_request_info, chat_response)) as answers:
            async for part in answers:
                yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream as text, or one `CompletionResponse`; or one `ErrorResponse`."""
        async with aclosing(self._ask("/v1/completions", request, raw_request_info, completion_response)) as answers:
            async for part in answers:
                yield part

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a refusal."""
        yield _refusal("embeddings")

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a refusal."""
        yield _refusal("scores")

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a refusal."""
        yield _refusal("transcriptions")

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a refusal."""
        yield _refusal("tokenize through Ray Serve LLM")

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield a refusal."""
        yield _refusal("detokenize through Ray Serve LLM")

    async def _ask(
        self, path: str, request: Any, raw_request_info: Any, whole: Callable[[Mapping[str, Any]], Any]
    ) -> AsyncGenerator[Any, None]:
        body = body_of(request, model=self._llm_config.model_id)
        headers = raw_request_info.headers if raw_request_info is not None else {}
        sent = json.dumps(body).encode()
        async with aclosing(post(self._app, path, body=sent, headers=headers)) as parts:
            status = await anext(parts)
            assert isinstance(status, int)
            if status == 200 and body.get("stream"):
                async for part in parts:
                    assert isinstance(part, bytes)
                    yield part.decode()  # whole events
                return
            found = json.loads(b"".join([part async for part in parts if isinstance(part, bytes)]))
            yield whole(found) if status == 200 else error_response(found["error"], status=status)


def config_of(llm_config: Any) -> Config:
    """Convert an `LLMConfig`: its `engine_kwargs` are settings, its model is `model_loading_config`.

    Raises:
        ConfigError: a setting is unknown or invalid, or a part of the `LLMConfig` has no effect here.
    """
    loading, settings = llm_config.model_loading_config, dict(llm_config.engine_kwargs)
    source = loading.model_source or loading.model_id
    if not isinstance(source, str):
        raise ConfigError("model_source must be a directory or a Hub name; RayCache does not mirror buckets")
    unused = {
        "model_loading_config.tokenizer_source": loading.tokenizer_source,
        "lora_config": llm_config.lora_config,
        "placement_group_config": llm_config.placement_group_config,
        "accelerator_type": llm_config.accelerator_type,
    }
    if given := [name for name, value in unused.items() if value]:
        raise ConfigError(f"RayCache does not use {' and '.join(given)}; omit it, engine_kwargs has the settings")
    for name in settings:
        if name in _ELSEWHERE:
            raise ConfigError(f"engine_kwargs: {name} is {_ELSEWHERE[name]} of the LLMConfig")
        if name in _OF_VLLM:
            raise ConfigError(f"engine_kwargs: {name} is vLLM's; RayCache's setting is {_OF_VLLM[name]}")
    values = {name: text for name, text in {"api_key": api_key(), "storage": storage()}.items() if text}
    fixed = {"model": source, "served_model_name": loading.model_id, "ingress": "serve"}
    try:
        return Config.from_mapping({**values, **settings, **fixed})
    except ConfigError as error:
        raise ConfigError(f"engine_kwargs: {error}") from error


def body_of(request: Any, *, model: str) -> dict[str, Any]:
    """The JSON body that a client has sent, of the model that Ray's ingress has parsed it into.

    Fields that the client left out are left out here, so that RayCache's defaults hold and not vLLM's.

    Args:
        request: a pydantic model, such as `ChatCompletionRequest`.
        model: for a request without one.
    """
    body: dict[str, Any] = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {**body, "model": body.get("model") or model}


def _refusal(what: str) -> Any:
    return error_response({"message": f"RayCache has no {what}", "type": "not_implemented"}, status=501)
