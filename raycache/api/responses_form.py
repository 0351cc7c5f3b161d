"""Answers of /v1/responses, whole and as events of a stream.

The output is a list of items, one after another: reasoning, message, calls of functions and custom tools.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from pydantic_core import from_json

from raycache.api.completions_form import chat_logprob
from raycache.api.formats.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from raycache.api.output_text import LogprobEntry, TextDelta
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.api.responses_body import ResponsesRequest
from raycache.api.responses_items import encode_reasoning
from raycache.api.tokenizer import Tokenizer
from raycache.types import FinishReason

_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"
_Event = tuple[str, dict[str, Any]]
"""Its type without "response.", and its fields without what all events have."""


class ResponsesForm:
    """Writes the answer of one generation, see `AnswerForm`.

    Args:
        asked: the request.
        generation: of the request's chat.
        tokenizer: for the text of tokens beside their log-probabilities.
        kept_page_size: tokens of a cache page; 0: prompts are not kept.
    """

    names_events = True
    last_event = b""

    def __init__(
        self, asked: ResponsesRequest, generation: Generation, *, tokenizer: Tokenizer, kept_page_size: int
    ) -> None:
        self._asked = asked
        self._generation = generation
        self._tokenizer = tokenizer
        self._kept_page_size = kept_page_size
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not been written
        self._number = generation.generation_id.rpartition("-")[2]
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._finish_reason: FinishReason | None = None

    def whole(self, outputs: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """The answer of a request without stream.

        Args:
            outputs: what the only choice gave.
        """
        for delta in outputs[0]:
            for _ in self._written(delta):
                pass
        return self._response(self._status)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events that come before the first item."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, {"response": self._response(_IN_PROGRESS)})

    def chunks(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """Events of one increment; none if it shows nothing."""
        yield from self._written(delta)

    def closing(self) -> Iterator[dict[str, Any]]:
        """The event with the whole answer."""
        yield self._event(self._status, {"response": self._response(self._status)})

    def failure(self, problem: Problem) -> dict[str, Any]:
        """The event that ends a stream which has failed."""
        code = {"queue_full": "rate_limit_exceeded", "context_length_exceeded": problem.code}.get(problem.code or "")
        error = {"code": code or "server_error", "message": problem.message}
        return self._event("failed", {"response": self._response("failed") | {"error": error}})

    @property
    def _status(self) -> str:
        return _INCOMPLETE if self._finish_reason is FinishReason.LENGTH else _COMPLETED

    def _written(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        entries = delta.entries[:-1] if delta.finish_reason is FinishReason.STOP else delta.entries  # the end mark
        done = 0
        for end, parts in _by_tokens(delta):
            self._note(entries[done:end])
            for part in merged(parts):
                yield from self._write(part)
            self._logprobs, done = [], end
        self._note(entries[done:])
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            yield from self._close(self._status)

    def _note(self, entries: Sequence[LogprobEntry]) -> None:
        self._logprobs += [chat_logprob(entry.logprob, self._tokenizer) for entry in entries if entry.logprob]

    def _write(self, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case ToolCallStart(_, call_id, flat):
                namespace, name = self._asked.namespaces.get(flat, ("", flat))
                is_custom = flat in self._asked.customs
                item_id = self._next_id("ctc" if is_custom else "fc")
                kind = _CustomCall if is_custom else _Call
                yield from self._begin(kind(item_id, call_id, name=name, namespace=namespace))
            case ToolCallArguments(_, text):
                assert isinstance(self._open, _Call | _CustomCall), "arguments follow the start of their call"
                yield from self._of_open(self._open.add(text))
            case Reasoning(text):
                item = yield from self._text(is_reasoning=True)
                yield from self._of_open([item.add(text)])
            case Content(text):
                item = yield from self._text(is_reasoning=False)
                yield from self._of_open([item.add(text, _of_text(self._logprobs, text))])

    def _text(self, *, is_reasoning: bool) -> Generator[dict[str, Any], None, _Text]:
        """The item that a piece of text belongs to, a new one if another is open."""
        if isinstance(self._open, _Text) and self._open.is_reasoning is is_reasoning:
            return self._open
        sealed = self._asked.is_reasoning_sealed
        item = _Text(self._next_id("rs" if is_reasoning else "msg"), is_reasoning=is_reasoning, is_sealed=sealed)
        yield from self._begin(item)
        return item

    def _begin(self, item: _Item) -> Iterator[dict[str, Any]]:
        yield from self._close(_COMPLETED)
        self._open = item
        yield self._event("output_item.added", {"output_index": len(self._output), "item": item.shown(_IN_PROGRESS)})
        yield from self._of_open(item.begin())

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        yield from self._of_open(self._open.end())
        item = self._open.shown(status)
        yield self._event("output_item.done", {"output_index": len(self._output), "item": item})
        self._output.append(item)
        self._open = None

    def _of_open(self, events: Iterable[_Event]) -> Iterator[dict[str, Any]]:
        assert self._open is not None
        place = {"item_id": self._open.item_id, "output_index": len(self._output)}
        for kind, fields in events:
            yield self._event(kind, {**place, **fields})

    def _next_id(self, kind: str) -> str:
        return f"{kind}_{self._number}{len(self._output) + (self._open is not None):02x}"

    def _event(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        generation = self._generation
        sampling = generation.choices[0].request.sampling
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": generation.created,
            "completed_at": int(time.time()) if status == _COMPLETED else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
            "max_tool_calls": None,
            "model": generation.model,
            "output": list(self._output),
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == _IN_PROGRESS else self._usage(),
            **self._asked.echo,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._generation.choices[0]
        text, prompt_len = choice.text, len(choice.request.prompt)
        return {
            "input_tokens": prompt_len,
            "input_tokens_details": {
                "cached_tokens": text.cached_tokens,
                "cache_write_tokens": choice.cache_written(self._kept_page_size),
            },
            "output_tokens": text.num_tokens,
            "output_tokens_details": {"reasoning_tokens": text.num_reasoning_tokens},
            "total_tokens": prompt_len + text.num_tokens,
        }


def _by_tokens(delta: TextDelta) -> Iterator[tuple[int, list[Part]]]:
    """Parts of an increment that came together, and how many of its tokens had come by then. All came together where
    nobody asks for the log-probabilities of each."""
    if delta.parts and not delta.entries:
        yield len(delta.token_ids), list(delta.parts)
        return
    for end, some in groupby(zip(delta.ends, delta.parts, strict=True), key=itemgetter(0)):
        yield end, [part for _, part in some]


def _of_text(logprobs: Sequence[dict[str, Any]], text: str) -> Sequence[dict[str, Any]]:
    """The log-probabilities of a text's tokens: the shortest end of the list in which the text is.

    What stands before may belong to a mark, which is in no part of the answer.
    """
    wanted, found = text.encode("utf-8"), b""
    for start in reversed(range(len(logprobs))):
        found = bytes(logprobs[start]["bytes"]) + found
        if wanted in found:
            return logprobs[start:]
    return logprobs


class _Item(Protocol):
    """An item of the output, while it is written."""

    item_id: str

    def begin(self) -> list[_Event]:
        """Events behind that of the new item."""
        ...

    def end(self) -> list[_Event]:
        """Events before that of the whole item."""
        ...

    def shown(self, status: str) -> dict[str, Any]:
        """The item; without text while it is in progress."""
        ...


class _Text:
    """Text in the only part of an item's content: reasoning, or a message.

    Args:
        is_reasoning: otherwise a message.
        is_sealed: show reasoning as `encrypted_content` too.
    """

    def __init__(self, item_id: str, *, is_reasoning: bool, is_sealed: bool = False) -> None:
        self.item_id = item_id
        self.is_reasoning = is_reasoning
        self._is_sealed = is_sealed
        self._kind = "reasoning_text" if is_reasoning else "output_text"
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[_Event]:
        """The beginning of the part."""
        return [("content_part.added", {"content_index": 0, "part": self._part()})]

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> _Event:
        """A piece of the text, with the log-probabilities of its tokens."""
        self._text += text
        self._logprobs += logprobs
        return f"{self._kind}.delta", {"content_index": 0, "delta": text, **self._shown_logprobs(logprobs)}

    def end(self) -> list[_Event]:
        """The whole text, and the part with it."""
        return [
            (f"{self._kind}.done", {"content_index": 0, "text": self._text, **self._shown_logprobs(self._logprobs)}),
            ("content_part.done", {"content_index": 0, "part": self._part()}),
        ]

    def shown(self, status: str) -> dict[str, Any]:
        """The item."""
        is_done = status != _IN_PROGRESS
        content = [self._part()] if is_done else []
        if not self.is_reasoning:
            return {
                "type": "message",
                "id": self.item_id,
                "status": status,
                "role": "assistant",
                "content": content,
            }
        return {
            "type": "reasoning",
            "id": self.item_id,
            "status": status,
            "summary": [],
            "content": content,
            "encrypted_content": encode_reasoning(self._text) if self._is_sealed and is_done else None,
        }

    def _part(self) -> dict[str, Any]:
        extra: dict[str, Any] = {} if self.is_reasoning else {"annotations": []}
        return {"type": self._kind, "text": self._text, **extra, **self._shown_logprobs(self._logprobs)}

    def _shown_logprobs(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {} if self.is_reasoning else {"logprobs": list(logprobs)}


class _Call:
    """A function call.

    Args:
        namespace: of the function, or "".
    """

    def __init__(self, item_id: str, call_id: str, *, name: str, namespace: str) -> None:
        self.item_id = item_id
        self._call_id = call_id
        self._name = name
        self._namespace = {"namespace": namespace} if namespace else {}
        self._arguments = ""

    def begin(self) -> list[_Event]:
        """Nothing more."""
        return []

    def add(self, text: str) -> list[_Event]:
        """A piece of the arguments."""
        self._arguments += text
        return [("function_call_arguments.delta", {"delta": text})]

    def end(self) -> list[_Event]:
        """The whole arguments."""
        return [("function_call_arguments.done", {"name": self._name, "arguments": self._arguments})]

    def shown(self, status: str) -> dict[str, Any]:
        """The item."""
        return {
            "type": "function_call",
            "id": self.item_id,
            "status": status,
            "call_id": self._call_id,
            **self._namespace,
            "name": self._name,
            "arguments": "" if status == _IN_PROGRESS else self._arguments,
        }


class _CustomCall:
    """A call of a custom tool, whose only argument is a text.

    Args:
        namespace: of the tool, or "".
    """

    def __init__(self, item_id: str, call_id: str, *, name: str, namespace: str) -> None:
        self.item_id = item_id
        self._call_id = call_id
        self._name = name
        self._namespace = {"namespace": namespace} if namespace else {}
        self._arguments: list[str] = []

    def begin(self) -> list[_Event]:
        """Nothing more."""
        return []

    def add(self, text: str) -> list[_Event]:
        """Nothing yet: the text stands in JSON."""
        self._arguments.append(text)
        return []

    def end(self) -> list[_Event]:
        """The whole text."""
        text = self._input()
        return [("custom_tool_call_input.delta", {"delta": text}), ("custom_tool_call_input.done", {"input": text})]

    def shown(self, status: str) -> dict[str, Any]:
        """The item."""
        return {
            "type": "custom_tool_call",
            "id": self.item_id,
            "status": status,
            "call_id": self._call_id,
            **self._namespace,
            "name": self._name,
            "input": "" if status == _IN_PROGRESS else self._input(),
        }

    def _input(self) -> str:
        """The text, which max_tokens may have cut. Arguments of another form are the text themselves."""
        arguments = "".join(self._arguments)
        try:
            found = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
        except ValueError:
            return arguments
        match found:
            case {"input": str(text)}:
                return text
        return arguments
