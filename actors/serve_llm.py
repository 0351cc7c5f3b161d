"""What Ray Serve LLM expects of a server class: deployment options, and answers in its own classes.

Those classes come from vLLM or SGLang, which `ray.serve.llm` needs to be imported; here they are imported when the
first answer is built, so that the translation can be tested without either.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from raycache.errors import ConfigError

_REPLICAS = "Serve's replicas would not share a cache; set num_replicas to 1 and engine_kwargs {'replicas': N}"


def deployment_options(llm_config: Any) -> dict[str, Any]:
    """Options of the deployment; its replica computes nothing, and RayCache places the ranks itself.

    Args:
        llm_config: an `LLMConfig` of `ray.serve.llm`.
    Raises:
        ConfigError: more than one replica, or a placement group.
    """
    options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
    scaling = options.get("autoscaling_config") or {}
    most = scaling.get("max_replicas", 1) if isinstance(scaling, Mapping) else scaling.max_replicas
    if options.get("num_replicas") not in (None, 1) or most != 1:
        raise ConfigError(f"deployment_config starts more than one replica; {_REPLICAS}")
    if "placement_group_bundles" in options or "placement_group_strategy" in options:
        raise ConfigError("deployment_config has a placement group; place ranks with engine_kwargs {'placement': ...}")
    actor = options.setdefault("ray_actor_options", {})
    actor.setdefault("num_cpus", 0)
    if llm_config.runtime_env:
        actor["runtime_env"] = {**actor.get("runtime_env", {}), **llm_config.runtime_env}
    return options


def chat_response(body: Mapping[str, Any]) -> Any:
    """The answer of a chat, as the ingress of Ray Serve LLM takes it."""
    from ray.serve.llm.openai_api_models import ChatCompletionResponse

    return ChatCompletionResponse.model_validate(body)


def completion_response(body: Mapping[str, Any]) -> Any:
    """The answer of a completion, as the ingress of Ray Serve LLM takes it."""
    from ray.serve.llm.openai_api_models import CompletionResponse

    return CompletionResponse.model_validate(body)


def error_response(error: Mapping[str, Any], *, status: int) -> Any:
    """A refusal, as the ingress of Ray Serve LLM takes it.

    Args:
        error: `message`, `type` and `param` of an error of the OpenAI API; its `code` becomes the HTTP status.
    """
    from ray.serve.llm.openai_api_models import ErrorResponse

    named = {"message": error["message"], "type": error.get("type") or "error", "param": error.get("param")}
    return ErrorResponse.model_validate({"error": {**named, "code": status}})
