"""What is asked, and what a server answered: tokens, log-probabilities and usage, from either API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNSHOWN = "�"
"""Tokens that are part of a character share this text, so it names none of them."""


@dataclass(frozen=True)
class Question:
    """A prompt, as text or as a conversation.

    Attributes:
        topic: unique text, sent first, so that two questions share no prefix unless they share a topic.
        text: the prompt, or with `messages` the system message.
        messages: the conversation after the system message; empty: the prompt is `text`.
        tools: of the chat API.
        output_tokens: most tokens of the answer.
    """

    topic: str
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int = 16

    @property
    def is_chat(self) -> bool:
        """Whether only the chat API can take it."""
        return bool(self.messages or self.tools)


@dataclass(frozen=True)
class Token:
    """A generated token.

    Attributes:
        text: as the server shows it.
        logprob: natural logarithm; None: the server gives none.
        top: text -> log-probability of the most likely tokens, the generated one included.
    """

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A server's answer to one question.

    Attributes:
        number: of the request, counted from 1.
        text: whole, also where tokens are not shown.
        tokens: empty if the server shows none.
        prompt_tokens: None: not told.
        cached_tokens: None: not told.
        drafted_tokens: draft tokens, accepted or not.
        seconds: from sending to the last byte.
    """

    number: int
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    drafted_tokens: int
    seconds: float


def read_answer(value: Mapping[str, Any], *, number: int, seconds: float) -> Answer:
    """Read the JSON of /v1/completions or /v1/chat/completions.

    Raises:
        ValueError: it is neither.
    """
    try:
        choice = value["choices"][0]
        text = choice["text"] if "text" in choice else _message_text(choice["message"])
        tokens = _tokens(choice.get("logprobs") or {})
        usage = value.get("usage") or {}
        prompt = usage.get("prompt_tokens_details") or {}
        output = usage.get("completion_tokens_details") or {}
        drafted = sum(output.get(f"{fate}_prediction_tokens") or 0 for fate in ("accepted", "rejected"))
    except (LookupError, TypeError, AttributeError) as cause:
        raise ValueError(f"this is no answer of the OpenAI API: {str(value)[:200]}") from cause
    cached = prompt.get("cached_tokens")
    return Answer(number, text, tokens, usage.get("prompt_tokens"), cached, drafted, seconds)


def _message_text(message: Mapping[str, Any]) -> str:
    """Everything that the model wrote: reasoning, content and calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts = [message.get("reasoning_content"), message.get("content")]
    parts += [f"{call.get('name')}{call.get('arguments')}" for call in calls]
    return "".join(part for part in parts if part)


def _tokens(logprobs: Mapping[str, Any]) -> tuple[Token, ...]:
    if "content" in logprobs:
        return tuple(_chat_token(entry) for entry in logprobs["content"] or ())
    texts: Sequence[str] = logprobs.get("tokens") or ()
    each = logprobs.get("token_logprobs") or [None] * len(texts)
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    return tuple(_token(*found) for found in zip(texts, each, tops, strict=True))


def _chat_token(entry: Mapping[str, Any]) -> Token:
    return _token(
        _name(entry), entry["logprob"], {_name(one): one["logprob"] for one in entry.get("top_logprobs") or ()}
    )


def _token(text: str, logprob: float | None, top: Mapping[str, float] | None) -> Token:
    shown = {name: value for name, value in (top or {}).items() if _UNSHOWN not in name and value is not None}
    if logprob is not None:
        shown[text] = logprob
    return Token(text, logprob, shown)


def _name(entry: Mapping[str, Any]) -> str:
    """Of a token of the chat API: its bytes where its text shows none."""
    text = str(entry["token"])
    return "bytes:" + bytes(entry["bytes"]).hex() if _UNSHOWN in text and entry.get("bytes") else text
