"""Answers of /v1/completions and /v1/chat/completions, whole and as chunks of a stream.

Plain dictionaries: they are built once per token and stream, and a validated model would cost more than the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from raycache.api.formats.parts import Content, Message, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from raycache.api.output_text import LogprobEntry, TextDelta
from raycache.api.prepare import Choice, Generation
from raycache.api.problem import Problem
from raycache.api.schema import ChatBody
from raycache.api.tokenizer import Tokenizer
from raycache.types import TIERS, FinishReason, TokenLogprob

_LEAST_LOGPROB = -9999.0  # JSON has no infinity

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: dict[str, Any]) -> bytes:
    """One answer or chunk as bytes."""
    return _encode(value).encode("utf-8")


def usage_of(generation: Generation) -> dict[str, Any]:
    """Tokens of a generation. A prompt counts once, however many choices are made for it."""
    firsts = [choice for choice in generation.choices if choice.is_first]
    prompt_tokens = sum(len(choice.request.prompt) for choice in firsts)
    completion_tokens = sum(choice.text.num_tokens for choice in generation.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.text.cached_tokens for choice in firsts),
            # Beyond the OpenAI API: where they came from, and which component's missing rows kept more from reuse.
            "cached_tokens_by_tier": {tier: sum(c.text.cached_by_tier.get(tier, 0) for c in firsts) for tier in TIERS},
            **({"cut_by": cut_by} if (cut_by := next(filter(None, (c.text.cut_by for c in firsts)), "")) else {}),
        },
        **({"completion_tokens_details": details} if (details := _output_details(generation)) else {}),
    }


def _output_details(generation: Generation) -> dict[str, int]:
    """Reasoning tokens, and what became of draft tokens at the output, if there were any."""
    reasoning = sum(choice.text.num_reasoning_tokens for choice in generation.choices)
    drafted = sum(choice.text.drafted_tokens for choice in generation.choices)
    accepted = sum(choice.text.accepted_tokens for choice in generation.choices)
    details = {"reasoning_tokens": reasoning} if reasoning else {}
    if drafted:
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return details


def cache_info(generation: Generation) -> dict[str, Any]:
    """What came from the cache, why no more did, and which repairs changed a chat; of several prompts a list."""
    infos = [
        {
            "cached_by_tier": {tier: choice.text.cached_by_tier.get(tier, 0) for tier in TIERS},
            "miss": choice.text.miss.value,
            "cut_by": choice.text.cut_by,
            **_divergence(choice),
        }
        for choice in generation.choices
        if choice.is_first
    ]
    repairs = {"repairs": list(generation.repairs)} if generation.repairs else {}
    return infos[0] | repairs if len(infos) == 1 else {"prompts": infos}


def _divergence(choice: Choice) -> dict[str, Any]:
    found = choice.text.comparison and choice.text.comparison.finding
    return {"divergence": found.facts()} if found else {}


class CompletionsForm:
    """Writes the answer of one generation, see `AnswerForm`.

    Args:
        generation: what was asked.
        tokenizer: for the text of tokens beside their log-probabilities.
    """

    names_events = False
    last_event = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation, *, tokenizer: Tokenizer) -> None:
        body = generation.body
        self._generation = generation
        self._tokenizer = tokenizer
        self._is_chat = isinstance(body, ChatBody)
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._kind = "chat.completion" if self._is_chat else "text_completion"

    def whole(self, outputs: Sequence[Sequence[TextDelta]]) -> dict[str, Any]:
        """The answer of a request without stream.

        Args:
            outputs: for each choice, all that its request gave.
        """
        choices = [
            self._whole_choice(choice, _join(deltas))
            for choice, deltas in zip(self._generation.choices, outputs, strict=True)
        ]
        return {
            **self._head(self._kind),
            "choices": choices,
            "usage": usage_of(self._generation),
            **self._cache_info(),
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks that come before the first token: in a chat, the role of each choice."""
        if self._is_chat:
            for choice in self._generation.choices:
                yield self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}})

    def chunks(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> Iterator[dict[str, Any]]:
        """Chunks of one increment of a choice; none if it shows nothing."""
        finish_reason = _finish_reason(choice, delta)
        extras = self._extras(choice, delta, is_first=is_first)
        logprobs = self._logprobs(delta.entries) if delta.entries else None
        has_extras = bool(logprobs or (delta.token_ids and extras) or (is_first and extras))
        if not self._is_chat:
            if delta.text or has_extras or finish_reason:
                yield self._chunk(choice.index, {"text": delta.text, **extras}, finish_reason, logprobs)
            return
        parts = [_delta(part) for part in merged(self._shown(delta.parts))] or ([{"content": ""}] if has_extras else [])
        for number, part in enumerate(parts):
            shown = extras if number == 0 else {}
            yield self._chunk(choice.index, {"delta": part, **shown}, None, logprobs if number == 0 else None)
        if finish_reason:
            yield self._chunk(choice.index, {"delta": {}}, finish_reason)

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        """All parts, or without the reasoning if the request wants none."""
        body = self._generation.body
        if isinstance(body, ChatBody) and not body.include_reasoning:
            return [part for part in parts if not isinstance(part, Reasoning)]
        return parts

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunk behind the last choice, if include_usage or return_cache_info asks for one."""
        usage = {"usage": usage_of(self._generation)} if self._generation.body.include_usage else {}
        if extra := usage | self._cache_info():
            yield {**self._head(self._chunk_kind), "choices": [], **extra}

    def failure(self, problem: Problem) -> dict[str, Any]:
        """The error, as in an answer with its status."""
        return problem.body

    def _cache_info(self) -> dict[str, Any]:
        return {"raycache": cache_info(self._generation)} if self._generation.body.return_cache_info else {}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else self._kind

    def _head(self, kind: str) -> dict[str, Any]:
        generation = self._generation
        return {
            "id": generation.generation_id,
            "object": kind,
            "created": generation.created,
            "model": generation.model,
        }

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(self._chunk_kind), "choices": [choice]}
        if self._generation.body.include_usage:
            chunk["usage"] = usage_of(self._generation) if self._generation.body.has_continuous_usage else None
        return chunk

    def _whole_choice(self, choice: Choice, delta: TextDelta) -> dict[str, Any]:
        return {
            "index": choice.index,
            **({"message": _message(self._shown(delta.parts))} if self._is_chat else {"text": delta.text}),
            "logprobs": self._logprobs(delta.entries) if self._with_logprobs else None,
            "finish_reason": _finish_reason(choice, delta),
            **self._extras(choice, delta, is_first=True),
        }

    def _extras(self, choice: Choice, delta: TextDelta, *, is_first: bool) -> dict[str, Any]:
        """Fields beyond the OpenAI API, only if asked for."""
        extras: dict[str, Any] = {}
        if self._generation.body.return_token_ids:
            extras["token_ids"] = delta.token_ids
            if is_first:
                extras["prompt_token_ids"] = list(choice.request.prompt)
        if self._generation.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            extras["prompt_logprobs"] = [
                None if found is None else {"token_id": found.token_id, **chat_logprob(found, self._tokenizer)}
                for found in delta.prompt_logprobs
            ]
        return extras

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        if self._is_chat:
            return {"content": [chat_logprob(entry.logprob, self._tokenizer) for entry in entries if entry.logprob]}
        name = self._tokenizer.token_text
        return {
            "tokens": [name(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob and _finite(entry.logprob.logprob) for entry in entries],
            "top_logprobs": [entry.logprob and self._alternatives(entry.logprob) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _alternatives(self, found: TokenLogprob) -> dict[str, float]:
        """Text -> log-probability of the most likely tokens and the chosen one."""
        name = self._tokenizer.token_text
        alternatives = {name(token_id): _finite(logprob) for token_id, logprob in reversed(found.top)}
        alternatives = dict(reversed(alternatives.items()))
        alternatives[name(found.token_id)] = _finite(found.logprob)
        return alternatives


def chat_logprob(found: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token of a chat with its log-probability, and the most likely ones at its place."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.pieces[token_id]
        return {"token": tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(piece)}

    top = [entry(token_id, logprob) for token_id, logprob in found.top]
    return {**entry(found.token_id, found.logprob), "top_logprobs": top}


def _finish_reason(choice: Choice, delta: TextDelta) -> str | None:
    if delta.finish_reason is FinishReason.STOP and choice.text.num_calls:
        return "tool_calls"
    return None if delta.finish_reason is None else delta.finish_reason.value


def _delta(part: Part) -> dict[str, Any]:
    """A part as a stream of the chat API shows it."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case Content(text):
            return {"content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    message = Message.of(parts)
    shown: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        shown |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return shown


def _join(deltas: Sequence[TextDelta]) -> TextDelta:
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        entries=tuple(entry for delta in deltas for entry in delta.entries),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        finish_reason=deltas[-1].finish_reason,
        parts=tuple(part for delta in deltas for part in delta.parts),
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if math.isfinite(logprob) else _LEAST_LOGPROB
