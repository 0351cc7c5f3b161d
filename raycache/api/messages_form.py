"""Answers of /v1/messages, whole and as the events of a stream.

message_start                               who answers, tokens of the prompt
  content_block_start, _delta ..., _stop    a block: thinking, text or tool_use; one after the other
message_delta, message_stop                 why it ended, tokens of the output
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from raycache.api.formats.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from raycache.api.output_text import TextDelta
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.types import FinishReason

_SIGNATURE = "cmF5Y2FjaGU="  # clients require one and send it back; there is nothing to sign

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(problem: Problem, *, request_id: str) -> dict[str, Any]:
    """An error in the shape of this API."""
    kind = _ERROR_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": request_id}


class MessagesForm:
    """Writes the answer of one generation, see `AnswerForm`.

    Args:
        generation: what was asked; it has one choice.
        kept_page_size: tokens of a cache page; 0: prompts are not kept.
    """

    names_events = True
    last_event = b""

    def __init__(self, generation: Generation, *, kept_page_size: int) -> None:
        (self._choice,) = generation.choices
        self._generation = generation
        self._kept_page_size = kept_page_size
        self._blocks = _Blocks()

    def whole(self, outputs: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """The message of a request without stream."""
        parts = merged(part for deltas in outputs for delta in deltas for part in delta.parts)
        blocks = _Blocks()
        events = [*(event for part in parts for event in blocks.feed(part)), *blocks.close()]
        return self._message(_content(events), usage=self._usage(), **self._end())

    def opening(self) -> Iterator[dict[str, Any]]:
        """message_start."""
        message = self._message([], usage=self._usage(), stop_reason=None, stop_sequence=None)
        yield {"type": "message_start", "message": message}

    def chunks(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """Events of the blocks that an increment begins, continues and ends."""
        for part in merged(delta.parts):
            yield from self._blocks.feed(part)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The end of the last block, message_delta and message_stop."""
        yield from self._blocks.close()
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failure(self, problem: Problem) -> dict[str, Any]:
        """The event `error`."""
        return error_body(problem, request_id=self._generation.generation_id)

    def _message(self, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {
            "id": "msg_" + self._generation.generation_id.rpartition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            **fields,
        }

    def _usage(self) -> dict[str, Any]:
        """Prompt tokens read from the cache, computed and kept there (whole pages), and the rest; output so far."""
        text, prompt_len = self._choice.text, len(self._choice.request.prompt)
        read, created = text.cached_tokens, self._choice.cache_written(self._kept_page_size)
        return {
            "input_tokens": prompt_len - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": text.num_tokens,
            "output_tokens_details": {"thinking_tokens": text.num_reasoning_tokens},
        }

    def _end(self) -> dict[str, str | None]:
        text = self._choice.text
        if text.stop_string:
            return {"stop_reason": "stop_sequence", "stop_sequence": text.stop_string}
        if text.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if text.num_calls else "end_turn", "stop_sequence": None}


class _Blocks:
    """Content blocks of one message: each part continues the open block, or ends it and begins the next.

    A block of white space alone is not shown: clients may not send one back.
    """

    def __init__(self) -> None:
        self._num_blocks = 0
        self._open = ""  # type of the open block
        self._is_shown = False
        self._blank = ""  # white space that the open block begins with

    def feed(self, part: Part) -> Iterator[dict[str, Any]]:
        """Events of the next part."""
        match part:
            case Reasoning(text):
                yield from self._text("thinking", text)
            case Content(text):
                yield from self._text("text", text)
            case ToolCallStart(_, call_id, name):
                yield from self.close()
                yield from self._begin("tool_use", {"id": call_id, "name": name, "input": {}})
            case ToolCallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Events that end the open block, if there is one."""
        if self._is_shown:
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open, self._is_shown, self._blank = "", False, ""

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self.close()
            self._open = kind
        if not self._is_shown:
            if not text.strip():
                self._blank += text
                return
            yield from self._begin(kind, {kind: "", **({"signature": ""} if kind == "thinking" else {})})
            text = self._blank + text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open, self._is_shown = kind, True
        self._num_blocks += 1
        block = {"type": kind, **fields}
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}


def _content(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client builds from their events."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        match event:
            case {"content_block": block}:
                blocks.append(dict(block))
                arguments = ""
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                arguments += text
                blocks[-1]["input"] = _input(arguments)
            case {"delta": delta}:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] += delta[name]
    return blocks


def _input(arguments: str) -> Any:
    """Arguments of a call, as far as they go: max_tokens may have cut them. What is no JSON object is kept as text."""
    try:
        found = from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
