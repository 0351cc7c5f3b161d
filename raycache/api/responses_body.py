"""Request bodies of /v1/responses, and the chats that they ask for.

Nothing is stored, so the whole conversation comes with each request, and what refers to an earlier response is refused.
Fields that change no output are ignored, known or not: clients of this API send many, and more with each version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

from raycache.api.field_names import renamed
from raycache.api.responses_items import flat_name, messages_of
from raycache.api.schema import ChatBody, StrictBody, parse_body
from raycache.api.tools import MAX_TOOLS
from raycache.errors import RequestError

MAX_DEPTH = 128
"""Of what the answer repeats: one that can be read but not written would fail when it is done."""
_INT32 = 2**31 - 1
_STATEFUL: dict[str, str] = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "prompt": "send its text as instructions",
    "store": "leave it out or send false",
    "background": "leave it out or send false",
}
"""Fields that need something stored here, and what to do instead."""
_ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
_PASSED_ON = (
    "cache_priority",
    "cache_salt",
    "cache_ttl_s",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "temperature",
    "thinking_token_budget",
    "timeout_s",
    "top_k",
    "top_p",
)
"""Fields that mean the same in a chat; most of them are beyond the API."""
CHAT_NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Fields of the chat -> what they are made from, where the names differ."""


def _check_input(value: object) -> str | list[dict[str, Any]]:
    match value:
        case str() if value:
            return value
        case list() if value and set(map(type, value)) == {dict}:
            return value
    raise PydanticCustomError("input", "must be a string or a list of items, and not empty")


_Input = PlainValidator(_check_input, json_schema_input_type=str | list[dict[str, Any]])


class ReasoningOptions(BaseModel):
    """How long to think. `summary` has no effect: the reasoning itself is shown."""

    model_config = ConfigDict(strict=True, extra="ignore")
    effort: str | None = None


class TextFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BaseModel):
    """How the answer is written. `verbosity` has no effect."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format: TextFormat | None = None


class ResponsesBody(StrictBody):
    """Body of /v1/responses."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    of_other_apis: ClassVar[Mapping[str, str]] = {
        "guided_json": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "structured_outputs": "text.format",
    }
    model: str
    input: Annotated[str | list[dict[str, Any]], _Input]
    instructions: str = ""
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field(default=[])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: Annotated[list[str], FailFast()] = Field(default=[])
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has the log-probabilities of its tokens."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in self.include


@dataclass(frozen=True)
class ResponsesRequest:
    """A checked request.

    Attributes:
        chat: what the model is asked.
        echo: fields of the answer that repeat the request.
        namespaces: name of a function as the model sees it -> its namespace and its name there.
        is_reasoning_sealed: reasoning items carry `encrypted_content`, for clients that send only that back.
        customs: names, as the model sees them, of custom tools: their only argument is a text, `input`.
        has_grammars: grammars of custom tools are shown to the model and not enforced.
        ignored_tools: types of tools that are not served.
    """

    chat: ChatBody
    echo: Mapping[str, Any]
    namespaces: Mapping[str, tuple[str, str]]
    is_reasoning_sealed: bool
    customs: frozenset[str]
    has_grammars: bool
    ignored_tools: tuple[str, ...]


def parse_responses(sent: Mapping[str, Any]) -> ResponsesRequest:
    """Check the body of a request.

    Raises:
        RequestError: a field is wrong, or needs something that is stored; names it.
    """
    for field, instead in _STATEFUL.items():
        if sent.get(field) not in (None, False):
            raise RequestError(f"{field} is not supported, nothing is stored here; {instead}", field=field)
    body = parse_body(ResponsesBody, sent)
    tools = _Tools.of(body.tools)
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of(body.input, instructions=body.instructions),
        "stream": body.stream,
        "max_tokens": body.max_output_tokens,
        "tools": tools.functions,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _response_format(body.text.format) if body.text and body.text.format else None,
        "logprobs": body.has_logprobs,
        "top_logprobs": body.top_logprobs,
        **{field: sent[field] for field in _PASSED_ON if field in sent},
    }
    try:
        parsed = parse_body(ChatBody, chat)
    except RequestError as error:
        raise renamed(error, CHAT_NAMES) from error
    return ResponsesRequest(
        chat=parsed,
        echo=_echo(body, sent),
        namespaces=tools.namespaces,
        is_reasoning_sealed="reasoning.encrypted_content" in body.include,
        customs=frozenset(tools.grammars),
        has_grammars=any(tools.grammars.values()),
        ignored_tools=tuple(sorted(tools.ignored)),
    )


def _echo(body: ResponsesBody, sent: Mapping[str, Any]) -> dict[str, Any]:
    text = sent.get("text") or {}
    echo = {
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_logprobs": body.top_logprobs or 0,
        "metadata": {},
        "user": None,
        **{field: sent[field] for field in _ECHOED if sent.get(field) is not None},
    }
    for field, value in echo.items():
        if _is_deeper(value, MAX_DEPTH):
            raise RequestError(f"{field} is nested more than {MAX_DEPTH} deep", field=field)
    return echo


def _is_deeper(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [item for one in level for item in _items(one)]
        if not level:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
    return ()


_OF_FUNCTIONS = ("description", "parameters", "strict")
_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class _Tools:
    """Tools as a chat has them.

    Attributes:
        namespaces, ignored: as in ResponsesRequest.
        grammars: name of a custom tool as the model sees it -> its grammar, or "".
    """

    functions: list[dict[str, Any]]
    namespaces: dict[str, tuple[str, str]]
    grammars: dict[str, str]
    ignored: set[str]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> _Tools:
        """Functions as they are, custom tools as functions of a text, those of namespaces under one name, no others.

        Raises:
            RequestError: one is malformed; names it.
        """
        found = cls([], {}, {}, set())
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools must have at most {MAX_TOOLS} tools, got {len(tools)}", field="tools")
        for index, tool in enumerate(tools):
            where = f"tools[{index}]"
            match tool:
                case {"type": "namespace", "name": str(namespace), "tools": list(members)} if namespace:
                    for number, member in enumerate(members):
                        found._add(member, namespace, f"{where}.tools[{number}]")
                case {"type": "namespace"}:
                    raise RequestError(f"{where} must have a name and tools", field=where)
                case _:
                    found._add(tool, "", where)
        return found

    def _add(self, tool: object, namespace: str, where: str) -> None:
        match tool:
            case {"type": "function", "name": str(name), **rest} if name:
                fields = {field: rest[field] for field in _OF_FUNCTIONS if rest.get(field) is not None}
                self._add_function(namespace, name, fields)
            case {"type": "custom", "name": str(name), **rest} if name:
                grammar = _grammar(rest.get("format"), where)
                told = [text for text in (rest.get("description"), grammar) if isinstance(text, str) and text]
                flat = self._add_function(namespace, name, {"description": "\n\n".join(told), "parameters": _INPUT})
                self.grammars[flat] = grammar
            case {"type": str(kind)} if kind not in ("function", "custom"):
                self.ignored.add(kind[:64])
            case {"type": "custom"}:
                raise RequestError(f'{where} must be of the form {{"type": "custom", "name": "..."}}', field=where)
            case _:
                form = '{"type": "function", "name": "...", "parameters": {}}'
                raise RequestError(f"{where} must be of the form {form}", field=where)

    def _add_function(self, namespace: str, name: str, fields: dict[str, Any]) -> str:
        flat = flat_name(namespace, name)
        self.functions.append({"type": "function", "function": {"name": flat, **fields}})
        if namespace:
            self.namespaces[flat] = (namespace, name)
        return flat


def _grammar(wanted: object, where: str) -> str:
    """What a custom tool's `format` says about its input, for the model; "" for nothing."""
    match wanted:
        case None | {"type": "text"}:
            return ""
        case {"type": "grammar", "syntax": "lark" | "regex" as syntax, "definition": str(definition)}:
            kind = "Lark grammar" if syntax == "lark" else "regular expression"
            return f"The input must match this {kind}:\n{definition}"
    forms = '{"type": "text"} or {"type": "grammar", "syntax": "lark", "definition": "..."}'
    raise RequestError(f"{where}.format must be of the form {forms}", field=f"{where}.format")


def _tool_choice(wanted: str | dict[str, Any]) -> str | dict[str, Any]:
    """The same choice in the form of a chat, which checks it."""
    if isinstance(wanted, str):
        return wanted
    match wanted:
        case {"type": "function" | "custom", "name": str()}:
            return _named(wanted)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            kinds = ("function", "custom")
            functions = [_named(tool) for tool in tools if isinstance(tool, dict) and tool.get("type") in kinds]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
        case {"type": str(kind)}:
            raise RequestError(
                f"tool_choice is of type {kind[:64]!r}; use 'none', 'auto', 'required', a function or allowed_tools",
                field="tool_choice",
            )
    return wanted


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    name, namespace = tool.get("name"), tool.get("namespace") or ""
    if not isinstance(name, str) or not isinstance(namespace, str):
        raise RequestError("tool_choice must name functions by strings", field="tool_choice")
    return {"type": "function", "function": {"name": flat_name(namespace, name)}}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None:
        raise RequestError("text.format.schema is required", field="text.format.schema")
    schema = {"name": wanted.name, "schema": wanted.json_schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
