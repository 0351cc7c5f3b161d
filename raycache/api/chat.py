"""Chat templates: messages to the text that a chat model was trained on.

Templates come with the model and messages from clients, so rendering runs in Jinja's immutable sandbox, under a bound
of time and size. The environment offers what templates on the Hugging Face hub expect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raycache.api.tokenizer import Tokenizer
from raycache.errors import ConfigError, RequestError
from raycache.spelling import did_you_mean

MAX_RENDERED_CHARS = 64 * 2**20
MAX_RENDER_S = 10.0

# What a template can raise on messages that it was not made for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLE_CHARS = 64  # of an unknown role, to find one like it
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CUT_HERE = "\x02cut here\x03"  # stands for the end of the message that is continued; does not occur in text


class ChatTemplate:
    """The chat template of a model.

    Args:
        sources: name -> Jinja source; with "tool_use" that one is taken when a request has tools. Empty when the model
            has none: every request is then refused.
        special_tokens: name -> text, such as "bos_token" -> "<s>"; variables of the template.
        origin: file of the sources, for people, or empty.
    Attributes:
        sources: as given.
    Raises:
        ConfigError: a source is not a Jinja template.
    """

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str], origin: str = "") -> None:
        self.sources, self.origin = dict(sources), origin
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, tokenizer: Tokenizer, *, path: str = "") -> ChatTemplate:
        """The model's own template, or the one in the file `path` instead.

        Raises:
            ConfigError: the file cannot be read, or is not a template.
        """
        sources, origin = tokenizer.templates.sources, tokenizer.templates.origin
        if path:
            try:
                sources, origin = {"default": Path(path).read_text(encoding="utf-8")}, path
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"chat_template={path!r} cannot be read: {error}") from error
        return cls(sources, special_tokens=tokenizer.special_tokens, origin=origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        adapt: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
    ) -> str:
        """Text of the prompt, special tokens included; encode it without adding others.

        Args:
            messages: of the OpenAI API; content is a string or a list of text parts.
            tools: of the OpenAI API.
            add_generation_prompt: end with what opens the assistant's answer.
            continue_final_message: the last message is left open, for the model to continue it.
            variables: more variables for the template, such as enable_thinking.
            adapt: brings the checked messages into the form that the template shows.
        Raises:
            RequestError: the messages are malformed, a role is unknown, the template refuses them, or there is none.
        """
        template = self._choose(has_tools=bool(tools))
        chat = plain_messages(messages)
        for index, message in enumerate(chat):
            self._check_role(message["role"], f"messages[{index}].role")
        chat = adapt(chat)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message needs add_generation_prompt=false", field="continue_final_message"
                )
            _mark_end(chat[-1])
        for name in variables or {}:
            if name in _RESERVED or name in self._special_tokens:
                raise RequestError(f"chat_template_kwargs must not set {name!r}", field="chat_template_kwargs")
        text = _render(
            template,
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": chat,
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut(text) if continue_final_message else text

    def _check_role(self, role: str, where: str) -> None:
        """Refuse a role that neither the OpenAI API has nor the template mentions: most templates show any."""
        if role in ROLES or any(f"'{role}'" in source or f'"{role}"' in source for source in self.sources.values()):
            return
        role = role[:_ROLE_CHARS]
        hint = did_you_mean(role, ROLES)
        raise RequestError(f"{where} must be one of {', '.join(ROLES)}, got {role!r}{hint}", field=where)

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE",
                field="messages",
            )
        return self._templates["default"]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and bring them into the form that templates expect.

    Text parts are joined by newlines; the arguments of tool calls become objects.

    Raises:
        RequestError: there is none, or one is malformed.
    """
    if not messages:
        raise RequestError("messages must not be empty", field="messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", field=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a string such as 'user'", field=f"{where}.role")
    plain = {**message, "content": _plain_content(message, f"{where}.content")}
    # Templates ask whether a field is defined; clients send null for those that are not.
    plain = {name: value for name, value in plain.items() if value is not None}
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return plain


def _plain_content(message: Mapping[str, Any], where: str) -> str:
    match message.get("content"):
        case str(text):
            return text
        case None | [] if message["role"] == "assistant" and message.get("tool_calls"):
            return ""  # templates add it to other text, or write "None"
        case list(parts) if parts:
            return "\n".join(_text_of(part, f"{where}[{index}]") for index, part in enumerate(parts))
    raise RequestError(f"{where} must be a string or a list of text parts", field=where)


def _text_of(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise RequestError(f"{where} is of type {kind!r}; only text is supported", field=where)
    raise RequestError(f'{where} must be of the form {{"type": "text", "text": "..."}}', field=where)


def _plain_tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", field=where)
    plain = []
    for index, call in enumerate(calls):
        match call:
            case {"function": {"name": str(), "arguments": str(arguments)} as function}:
                parsed = _parse_arguments(arguments)
                plain.append({**call, "function": {**function, "arguments": parsed}})
            case {"function": {"name": str(), "arguments": dict()}}:
                plain.append(dict(call))
            case _:
                raise RequestError(
                    f"{where}[{index}] must have function.name and function.arguments", field=f"{where}[{index}]"
                )
    return plain


def _parse_arguments(text: str) -> dict[str, Any]:
    """Arguments of an earlier call. A model may have written them badly; the conversation goes on with their text."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _mark_end(message: dict[str, Any]) -> None:
    if not message.get("content"):
        raise RequestError("continue_final_message needs a last message with content", field="continue_final_message")
    message["content"] += _CUT_HERE


def _cut(text: str) -> str:
    mark = text.rfind(_CUT_HERE)
    if mark < 0:
        raise RequestError(
            "the chat template does not show the content of the last message; it cannot be continued",
            field="continue_final_message",
        )
    return text[:mark]


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    deadline = time.monotonic() + MAX_RENDER_S
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise RequestError(
                    f"the chat template renders more than {MAX_RENDERED_CHARS} characters", field="messages"
                )
            if time.monotonic() > deadline:
                raise RequestError(f"the chat template takes more than {MAX_RENDER_S:.0f} s", field="messages")
    except RequestError:
        raise
    except _TEMPLATE_ERRORS as error:
        raise RequestError(f"the chat template refuses these messages: {error}", field="messages") from error
    return "".join(pieces)


def _compile(environment: ImmutableSandboxedEnvironment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the chat template {name!r} is not a Jinja template: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what a model is trained on; for serving, it is its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the tag by its body."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes < > & ' as escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
