"""Body of /v1/messages, and the chat that it asks for.

What changes the prompt or the output is checked. Unknown fields are ignored: clients of this API send whatever is new,
and expect servers that do not know it to go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

from raycache.api.field_names import renamed
from raycache.api.schema import ChatBody, StrictBody, parse_body
from raycache.errors import RequestError

MAX_TOKENS = 2**31 - 1
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_SYSTEM = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
_ERROR = "Error: "  # begins the result of a tool that failed; chat templates have no other mark for it

# Fields of our own, as in /v1/chat/completions, and those of the same name there.
_SAME_FIELDS = frozenset(
    {"cache_salt", "cache_priority", "cache_ttl_s", "max_tokens", "priority", "seed", "stream", "timeout_s"}
    | {"temperature", "top_p", "top_k"}
)
_CHAT_NAMES: Mapping[str, str] = {
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class MessagesToolChoice(_Part):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesThinking(_Part):
    """Whether the model thinks first."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)


class MessagesFormat(_Part):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class MessagesOutput(_Part):
    """How much to think, and the form of the answer."""

    effort: str | None = None
    format: MessagesFormat | None = None


class CountTokensBody(StrictBody):
    """Body of /v1/messages/count_tokens: what the prompt is made from."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    model: str
    messages: Annotated[list[dict[str, Any]], FailFast()]
    system: Annotated[str | list[Any], _SYSTEM] = ""
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field(default=[])
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutput | None = None
    output_format: MessagesFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})


class MessagesBody(CountTokensBody):
    """Body of /v1/messages."""

    of_other_apis: ClassVar[Mapping[str, str]] = {
        "guided_json": "output_config.format",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "structured_outputs": "output_config.format",
    }
    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], FailFast()] = Field(default=[])
    cache_control: dict[str, Any] | None = None

    cache_salt: str = ""
    cache_priority: int = 0
    cache_ttl_s: float = 0.0
    priority: int = 0
    seed: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Conversation:
    """What a body asks for.

    Attributes:
        chat: the same as a body of /v1/chat/completions.
        ignored: types of tools and content blocks that were left out, since only their maker's servers know them.
        names: fields of the chat -> what they are made from, where the names differ.
    """

    chat: ChatBody
    ignored: frozenset[str]
    names: Mapping[str, str]


def conversation(body: CountTokensBody, *, has_priorities: bool) -> Conversation:
    """Convert a checked body.

    Args:
        body: of either endpoint.
        has_priorities: the cache evicts by priority; then a prompt with cache_control marks is kept longer than others.
    Raises:
        RequestError: a message or a tool is malformed or not supported; names the field.
    """
    messages = _Messages()
    if body.system:
        messages.add_system(body.system, "system")
    for index, message in enumerate(body.messages):
        messages.add(message, f"messages[{index}]")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools) if _is_custom(tool)]
    ignored = {str(tool["type"]) for tool in body.tools if not _is_custom(tool)}
    values: dict[str, Any] = {
        "model": body.model,
        "messages": messages.done(),
        "tools": tools,
        "continue_final_message": messages.is_open,
        **_choice(body.tool_choice if tools else None),
        **_thinking(body),
    }
    if output_format := (body.output_config and body.output_config.format) or body.output_format:
        schema = {"name": "answer", "schema": output_format.json_schema, "strict": True}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        values |= _generation(body)
        if has_priorities and not body.cache_priority and (ttl_s := max(_ttls(body), default=0.0)):
            values |= {"cache_priority": 1, "cache_ttl_s": ttl_s}
    has_own_format = body.output_config and body.output_config.format
    names = _CHAT_NAMES if has_own_format else {**_CHAT_NAMES, "response_format": "output_format"}
    try:
        chat = parse_body(ChatBody, values)
    except RequestError as error:
        raise renamed(error, names) from error
    return Conversation(chat, frozenset(ignored | messages.ignored), names)


def _generation(body: MessagesBody) -> dict[str, Any]:
    return {"stop": body.stop_sequences} | body.model_dump(include=set(_SAME_FIELDS), exclude_unset=True)


def _choice(choice: MessagesToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is required", field="tool_choice.name")
        wanted = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    """Templates call the switch enable_thinking or thinking; without the field it stays at their default."""
    values: dict[str, Any] = {"reasoning_effort": body.output_config and body.output_config.effort}
    variables = {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
        values["thinking_token_budget"] = body.thinking.budget_tokens if thinks else None
    return values | {"chat_template_kwargs": variables | body.chat_template_kwargs}


def _is_custom(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    match tool:
        case {"name": str(name), "input_schema": dict(schema)}:
            function: dict[str, Any] = {"name": name, "parameters": schema}
        case _:
            raise RequestError(f"{where} must have a name and an input_schema", field=where)
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _ttls(body: MessagesBody) -> Iterator[float]:
    """How long each cache_control mark asks for."""
    contents = [body.system, *(message.get("content") for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    inner = [block.get("content") for block in blocks if isinstance(block, dict)]
    blocks += [block for content in inner if isinstance(content, list) for block in content]
    marks = [body.cache_control, *(one.get("cache_control") for one in [*body.tools, *blocks] if isinstance(one, dict))]
    for mark in marks:
        if isinstance(mark, dict):
            yield _TTL_S.get(str(mark.get("ttl")), _TTL_S["5m"])


class _Messages:
    """Collects the messages of the chat.

    Attributes:
        ignored: types of blocks that were left out.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self.ignored: set[str] = set()

    @property
    def is_open(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def done(self) -> list[dict[str, Any]]:
        """All messages so far."""
        return self._messages

    def add(self, message: Mapping[str, Any], where: str) -> None:
        """Add a message of this API, as one or several of the chat.

        Raises:
            RequestError: it is malformed or not supported.
        """
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str | list):
            raise RequestError(f"{where}.content must be a string or a list of blocks", field=f"{where}.content")
        match role:
            case "system":
                self.add_system(content, f"{where}.content")
            case "user":
                self._add_user(_blocks(content, f"{where}.content"), f"{where}.content")
            case "assistant":
                self._add_assistant(_blocks(content, f"{where}.content"), f"{where}.content")
            case _:
                raise RequestError(f"{where}.role must be 'user', 'assistant' or 'system'", field=f"{where}.role")

    def add_system(self, content: str | list[Any], where: str) -> None:
        """Add a system message; its blocks are text."""
        blocks = _blocks(content, where)
        if texts := [text for index, block in enumerate(blocks) for text in self._texts(block, f"{where}[{index}]")]:
            self._messages.append({"role": "system", "content": _content(texts)})

    def _add_user(self, blocks: list[dict[str, Any]], where: str) -> None:
        """Results of tools come first, each a message of its own. Neighbouring messages of the user are one."""
        texts: list[str] = []
        for index, block in enumerate(blocks):
            if block["type"] == "tool_result":
                self._messages.append(self._result(block, f"{where}[{index}]"))
            else:
                texts += self._texts(block, f"{where}[{index}]")
        if blocks and not texts:
            return
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "user":
            if isinstance(last["content"], str):
                last["content"] = _parts([last["content"]])
            last["content"] += _parts(texts)
        else:
            self._messages.append({"role": "user", "content": _content(texts)})

    def _result(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call_id, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(call_id, str):
            raise RequestError(f"{where}.tool_use_id must be a string", field=f"{where}.tool_use_id")
        blocks = _blocks("" if content is None else content, f"{where}.content")
        texts = [text for index, inner in enumerate(blocks) for text in self._texts(inner, f"{where}.content[{index}]")]
        mark = _ERROR if block.get("is_error") is True else ""
        return {"role": "tool", "tool_call_id": call_id, "content": mark + "\n".join(texts)}

    def _add_assistant(self, blocks: list[dict[str, Any]], where: str) -> None:
        content, reasoning, calls = "", "", []
        for index, block in enumerate(blocks):
            match block:
                case {"type": "thinking", "thinking": str(text)}:
                    reasoning += text
                case {"type": "redacted_thinking"}:
                    pass
                case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                    calls.append(
                        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                    )
                case {"type": "tool_use" | "thinking" as kind}:
                    raise RequestError(f"{where}[{index}] is not a valid {kind} block", field=f"{where}[{index}]")
                case _:
                    content += "".join(self._texts(block, f"{where}[{index}]"))
        message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        self._messages.append(message | ({"tool_calls": calls} if calls else {}))

    def _texts(self, block: Mapping[str, Any], where: str) -> Iterator[str]:
        """Text of a block; several for a document of several."""
        match block:
            case {"type": "text", "text": str(text)}:
                yield text
            case {"type": "document", "source": {"type": "text", "data": str(text)}}:
                yield text
            case {"type": "document", "source": {"type": "content", "content": str() | list() as content}}:
                yield from self._inner_texts(content, f"{where}.source.content")
            case {"type": "search_result", "content": list(content)}:
                yield from self._inner_texts(content, f"{where}.content")
            case {"type": "image" | "document" as kind}:
                raise RequestError(f"{where} is of type {kind!r}; only text is supported", field=where)
            case {"type": "text" | "search_result" as kind}:
                raise RequestError(f"{where} is not a valid {kind} block", field=where)
            case {"type": str(kind)}:
                self.ignored.add(kind)

    def _inner_texts(self, content: str | list[Any], where: str) -> Iterator[str]:
        for index, block in enumerate(_blocks(content, where)):
            if block["type"] != "text" or not isinstance(block.get("text"), str):
                raise RequestError(f"{where}[{index}] must be a text block", field=f"{where}[{index}]")
            yield block["text"]


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of blocks", field=where)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{where}[{index}] must be an object with a type", field=f"{where}[{index}]")
    return content


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return _parts(texts) if len(texts) > 1 else "".join(texts)


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
