"""GET /openapi.json: the OpenAPI description, generated from the schemas that validate requests.

It covers the endpoints for clients, GET /cache/achievable, /streams and /history; those for operators are described in
docs/security.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.http.streams import MAX_STREAMS
from raycache import __version__
from raycache.api.chat import ROLES
from raycache.api.defaults import Defaults
from raycache.api.messages_body import CountTokensBody, MessagesBody
from raycache.api.neutral import NEUTRAL
from raycache.api.responses_body import ResponsesBody
from raycache.api.schema import (
    IGNORED,
    MAX_CHOICES,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    StrictBody,
)
from raycache.api.tokenize_body import DetokenizeBody, TokenizeBody
from raycache.api.tools import MAX_TOOLS
from raycache.types import MAX_TOP_LOGPROBS, EngineInfo, StreamPhase

_ERRORS = {
    "400": "a field is invalid; `param` names it",
    "401": "the API key is missing or wrong",
    "403": "the API key lacks a right",
    "404": "no such model or path",
    "405": "the path does not support this method",
    "408": "the request exceeded its time limit, or arrived too slowly",
    "413": "the body is too large",
    "415": "the Content-Type is not application/json",
    "429": "too many requests are waiting, or running with this key; Retry-After says when to retry",
    "431": "the headers are too large",
    "500": "the request failed",
    "503": "the engine or the server cannot accept requests at the moment",
}
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_AMOUNT = {"type": "number", "minimum": 0}
_STREAMS_LIMIT = {
    "name": "limit",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_STREAMS},
    "description": "most streams to list",
}
_LOGPROBS = {"type": ["object", "null"]}
_FINISH = {"type": ["string", "null"]}


def openapi(info: EngineInfo, defaults: Defaults) -> dict[str, Any]:
    """Return the description, in OpenAPI 3.1, for the engine's model and limits."""
    model = info.model
    return {
        "openapi": "3.1.0",
        "info": {"title": "RayCache", "version": __version__, "description": f"Serves the model {model}."},
        "security": [{"key": []}, {"header": []}, {}],
        "paths": {
            "/v1/completions": {"post": _generation("Create completions.", CompletionBody, "Completion")},
            "/v1/chat/completions": {"post": _generation("Create a chat completion.", ChatBody, "ChatCompletion")},
            "/v1/messages": {"post": _messages("Create a message, as Anthropic's API does.", MessagesBody, "Message")},
            "/v1/messages/count_tokens": {
                "post": _messages("Count the tokens of a message's prompt.", CountTokensBody, "TokenCount")
            },
            "/v1/responses": {"post": _generation("Create a response.", ResponsesBody, "Response")},
            "/v1/models": {"get": _get("List the model.", "Models")},
            "/v1/models/{model}": {"get": _get("Show the model.", "Model", parameters=[_model_parameter(model)])},
            "/tokenize": {"post": _tokens("Return the token ids of a text or a conversation.", TokenizeBody, "Tokens")},
            "/detokenize": {"post": _tokens("Return the text of token ids.", DetokenizeBody, "Detokenized")},
            "/": {"get": _text("Name the model.", errors=())},
            "/version": {"get": _get("Return the version.", "Version")},
            "/ping": {"get": _text("The same as /health.", errors=("503",))},
            "/health": {"get": _text("Report whether the engine responds.", errors=("503",))},
            "/cache/achievable": {
                "get": _get("Compare what the cache reused with caches of other sizes.", "Achievable")
            },
            "/streams": {"get": _get("List the requests in progress.", "Streams", parameters=[_STREAMS_LIMIT])},
            "/history": {"get": _get("Return the last ten minutes of what /ui plots.", "History")},
            "/metrics": {"get": _text("Metrics in Prometheus' text format.", errors=("401", "403", "503"))},
        },
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _schemas(info, defaults),
        },
    }


def _generation(summary: str, kind: type[StrictBody], answer: str) -> dict[str, Any]:
    # Without a type: tools disagree on whether a schema here describes the whole text or each event.
    streamed = {"text/event-stream": {"schema": {"description": "Server-sent events."}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(kind.__name__)},
        "responses": {
            "200": {
                "description": "The response; with stream=true, its chunks as events.",
                "content": _json(answer) | streamed,
            },
            **_errors(list(_ERRORS)),
        },
    }


def _messages(summary: str, kind: type[StrictBody], answer: str) -> dict[str, Any]:
    found = _generation(summary, kind, answer)
    responses = found["responses"] | {
        status: {"description": text, "content": _json("MessagesError")} for status, text in _ERRORS.items()
    }
    # These two can come before the path is known.
    anything = {"application/json": {"schema": {"type": "object"}}}
    return found | {
        "responses": responses | {s: {"description": _ERRORS[s], "content": anything} for s in ("408", "431")}
    }


def _tokens(summary: str, kind: type[StrictBody], answer: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _json(kind.__name__)},
        "responses": {
            "200": {"description": "The response.", "content": _json(answer)},
            **_errors([status for status in _ERRORS if status not in ("429", "500")]),
        },
    }


def _get(summary: str, answer: str, *, parameters: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    responses = {
        "200": {"description": "The response.", "content": _json(answer)},
        **_errors(
            (*(("400",) if "query" in {each["in"] for each in parameters} else ()), "401", "403", "404", "431", "503")
        ),
    }
    return {"summary": summary, "parameters": list(parameters), "responses": responses}


def _text(summary: str, *, errors: Sequence[str]) -> dict[str, Any]:
    found = {"description": "Plain text.", "content": {"text/plain": {"schema": _TEXT}}}
    return {"summary": summary, "responses": {"200": found, **_errors((*errors, "431"))}}


def _errors(statuses: Sequence[str]) -> dict[str, Any]:
    return {status: {"description": _ERRORS[status], "content": _json("Error")} for status in statuses}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _model_parameter(model: str) -> dict[str, Any]:
    return {"name": "model", "in": "path", "required": True, "schema": _TEXT, "example": model}


def _schemas(info: EngineInfo, defaults: Defaults) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for kind in (CompletionBody, ChatBody):
        found = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= found.pop("$defs", {})
        schemas[kind.__name__] = _as_accepted(found, info=info, defaults=defaults)
    completion = _object(index=_COUNT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_FINISH)
    chat = _object(index=_COUNT, message={"type": "object"}, logprobs=_LOGPROBS, finish_reason=_FINISH)
    card = _object(
        **dict.fromkeys(("id", "object", "owned_by", "excess_max_tokens"), _TEXT),
        created=_COUNT,
        max_model_len=_COUNT,
        default_sampling={"type": "object", "additionalProperties": {"type": "number"}},
        default_max_tokens={"type": ["integer", "null"]},
    )
    error = _object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    return schemas | {
        "Completion": _answer("text_completion", completion),
        "ChatCompletion": _answer("chat.completion", chat),
        "Model": card,
        **_token_schemas(info),
        **_message_schemas(info),
        **_response_schemas(info),
        "Achievable": _achievable_schema(),
        "Streams": _streams_schema(),
        "History": _history_schema(),
        "Version": _object(version=_TEXT),
        "Models": _object(object={"const": "list"}, data={"type": "array", "items": card}),
        "Error": _object(error={**error, "additionalProperties": False}),
    }


def _achievable_schema() -> dict[str, Any]:
    """Answer of /cache/achievable. Shares are those of all prompt tokens; without the right "admin", only `tenants`."""
    share = {"type": "number", "minimum": 0, "maximum": 1}
    error = {"type": "number", "minimum": 0, "description": "half of the 95 % interval"}
    lost = _object(cause=_TEXT, kind=_TEXT, tokens=_COUNT, share=share, error=error)
    sums = _object(
        **dict.fromkeys(("requests", "prompt_tokens", "cached_tokens"), _COUNT),
        **dict.fromkeys(("achieved", "achievable"), share),
        error=error,
        lost={"type": "array", "items": lost},
    )
    tier = _object(tokens=_COUNT, share=share, gain_if_doubled=share)
    found = _object(
        total=sums,
        tenants={"type": "object", "additionalProperties": sums},
        tiers={"type": "object", "additionalProperties": tier},
        curve={"type": "array", "items": _object(tokens=_COUNT, share=share)},
        sample=_object(pages=_COUNT, one_in={"type": "integer", "minimum": 1}),
    )
    return {**found, "required": ["tenants"]}


def _streams_schema() -> dict[str, Any]:
    """Answer of /streams."""
    tokens = {"type": "object", "additionalProperties": _COUNT}
    row = _object(
        **dict.fromkeys(("id", "tenant", "replica"), _TEXT),
        state={"enum": [*StreamPhase, None], "description": "null: the engine has not replied"},
        **dict.fromkeys(("age_s", "tokens_per_s"), _AMOUNT),
        **dict.fromkeys(("prompt_tokens", "computed_tokens", "output_tokens"), _COUNT),
        cached_by_tier=tokens,
    )
    return _object(model=_TEXT, streams={"type": "array", "items": row}, others=_COUNT)


def _history_schema() -> dict[str, Any]:
    """Answer of /history; without the right "admin", samples have only their age and `lost_tokens`."""
    tokens = {"type": "object", "additionalProperties": _COUNT}
    figures = dict.fromkeys(("steps", "running", "waiting", "prompt_tokens", "cached_tokens"), _COUNT)
    sample = {**_object(age_s=_AMOUNT, lost_tokens=tokens, **figures), "required": ["age_s", "lost_tokens"]}
    return _object(interval_s=_AMOUNT, samples={"type": "array", "items": sample})


def _message_schemas(info: EngineInfo) -> dict[str, Any]:
    """Bodies and answers of /v1/messages."""
    schemas: dict[str, Any] = {}
    roles, texts = {"enum": ["user", "assistant", "system"]}, _object(type={"const": "text"}, text=_TEXT)
    content = {"anyOf": [_TEXT, {"type": "array", "items": texts}]}
    tool = _object(name={"type": "string", "minLength": 1, "maxLength": 64}, input_schema={"type": "object"})
    limits = _demands(info)
    demands = {
        "model": limits["model"],
        "messages": {"items": _object(role=roles, content=content), "minItems": 1},
        "system": content,
        "tools": {"items": tool, "maxItems": MAX_TOOLS, "uniqueItems": True},
        "stop_sequences": {"items": _stop(), "maxItems": MAX_STOPS},
        "temperature": {"type": "number", **limits["temperature"]},
        "top_p": {"type": "number", **limits["top_p"]},
        "top_k": {"type": "integer", **limits["top_k"]},
        "cache_salt": limits["cache_salt"],
        "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "priority": {"minimum": -(2**31) + 1, "maximum": 2**31 - 1},
        "timeout_s": {"type": "number", "exclusiveMinimum": 0},
    }
    for kind in (CountTokensBody, MessagesBody):
        found = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= found.pop("$defs", {})
        fields = {
            name: (of if "type" in of else {}) | demands[name] if name in demands else of
            for name, of in found["properties"].items()
        }
        schemas[kind.__name__] = {**found, "properties": _nullable(fields, required=found["required"])}
    error = _object(type=_TEXT, message=_TEXT)
    usage = _object(
        input_tokens=_COUNT, cache_creation_input_tokens=_COUNT, cache_read_input_tokens=_COUNT, output_tokens=_COUNT
    )
    return schemas | {
        "Message": _object(
            id=_TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            model=_TEXT,
            content={"type": "array", "items": {"type": "object"}},
            stop_reason=_TEXT,
            stop_sequence={"type": ["string", "null"]},
            usage=usage,
        ),
        "TokenCount": _object(input_tokens=_COUNT),
        "MessagesError": _object(type={"const": "error"}, error=error, request_id=_TEXT),
    }


def _token_schemas(info: EngineInfo) -> dict[str, Any]:
    """Bodies and answers of /tokenize and /detokenize."""
    token = {"type": "integer", "minimum": 0, "maximum": info.vocab_size - 1}
    model, chat = {"enum": [info.model, None]}, _demands(info)["messages"]
    tokenize = {
        "model": model,
        "add_special_tokens": {"type": ["boolean", "null"]},
        "return_token_strs": {"type": ["boolean", "null"]},
    }
    of_prompt = {**_object(prompt=_TEXT), "additionalProperties": False}
    of_prompt["properties"] |= tokenize
    of_chat = {**_object(messages={"type": "array", **chat}), "additionalProperties": False}
    of_chat["properties"] |= tokenize | {
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "add_generation_prompt": {"type": ["boolean", "null"]},
        "continue_final_message": {"type": ["boolean", "null"]},
        "chat_template_kwargs": {"type": ["object", "null"]},
    }
    detokenize = {**_object(tokens={"type": "array", "items": token}), "additionalProperties": False}
    detokenize["properties"]["model"] = model
    strings = {"type": ["array", "null"], "items": _TEXT}
    return {
        "TokenizeBody": {"anyOf": [of_prompt, of_chat]},
        "DetokenizeBody": detokenize,
        "Tokens": _object(
            tokens={"type": "array", "items": token}, count=_COUNT, max_model_len=_COUNT, token_strs=strings
        ),
        "Detokenized": _object(prompt=_TEXT),
    }


def _response_schemas(info: EngineInfo) -> dict[str, Any]:
    """Body and answer of /v1/responses. Unknown fields are ignored; null is the same as absent."""
    body = ResponsesBody.model_json_schema(ref_template="#/components/schemas/{model}")
    nested, required = body.pop("$defs", {}), body["required"]
    fields = body["properties"]
    fields["model"] |= {"const": info.model}
    body["properties"] = {n: of if n in required else {"anyOf": [of, {"type": "null"}]} for n, of in fields.items()}
    usage = _object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT)
    answer = _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete"]},
        model=_TEXT,
        output={"type": "array", "items": _object(id=_TEXT, type=_TEXT)},
        usage=usage,
    )
    schemas: dict[str, Any] = nested | {"ResponsesBody": body, "Response": answer}
    return schemas


def _as_accepted(schema: dict[str, Any], *, info: EngineInfo, defaults: Defaults) -> dict[str, Any]:
    """Complete the schema of a body by what the server accepts.

    Null is the same as absent, ignored fields are allowed, and the limits of SamplingParams, model and engine apply.
    """
    demands = _demands(info)
    for name, value in defaults.sampling.items():
        demands[name] |= {"default": value}
    fields = {name: found | demands.get(name, {}) for name, found in schema["properties"].items()}
    fields = _nullable(fields, required=schema.get("required", ()))
    neutral = {name: {"enum": [*values, None]} for name, values in NEUTRAL.items() if name not in fields}
    return {**schema, "properties": fields | neutral | {name: {} for name in sorted(IGNORED)}}


def _nullable(fields: dict[str, dict[str, Any]], *, required: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The schemas of fields, with null for those that can be left out."""
    return {name: found if name in required else {"anyOf": [found, {"type": "null"}]} for name, found in fields.items()}


def _demands(info: EngineInfo) -> dict[str, dict[str, Any]]:
    """Constraints that types.SamplingParams and api/prepare.py check besides the types of fields."""
    token = {"type": "integer", "minimum": 0, "maximum": info.vocab_size - 1}
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "items": token, "minItems": 1, "maxItems": info.max_model_len - 1}
    message = {
        "type": "object",
        "properties": {"role": {"enum": [*ROLES]}, "content": _TEXT},
        "required": ["role", "content"],
    }
    logprobs = {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}
    return {
        "model": {"const": info.model},
        "prompt": {"anyOf": [text, ids, _several(text), _several(ids)]},
        "messages": {"items": message, "minItems": 1},
        "n": {"maximum": min(MAX_CHOICES, info.max_queue)},
        "temperature": {"minimum": 0, "maximum": 100},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": 2**31 - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"minimum": 0.01, "maximum": 100},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "logit_bias": {
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "stop": {"anyOf": [_stop(), {"type": "array", "items": _stop(), "maxItems": MAX_STOPS}]},
        "stop_token_ids": {"items": token},
        "prompt_logprobs": {"anyOf": [{"type": "integer", **logprobs}, {"type": "null"}]},
        "best_of": {"anyOf": [{"type": "null"}], "description": "must equal n, its default"},
        "suffix": {"const": ""},
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object"}]},
        "cache_salt": {"maxLength": MAX_SALT_CHARS},
    }


def _several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def _stop() -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    usage = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    choices = {"type": "array", "items": choice, "minItems": 1}
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices, usage=usage)


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with required fields; others are allowed."""
    return {"type": "object", "properties": fields, "required": list(fields)}
