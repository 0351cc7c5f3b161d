"""The grammar that an answer has to follow: reasoning first, then what the request asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import from_json

from raycache.api import constraint
from raycache.api.chat_model import ChatModel
from raycache.api.formats import harmony
from raycache.api.formats.chat_format import ChatFormat
from raycache.api.json_schemas import checked_schema
from raycache.api.schema import ChatBody, GenerationBody
from raycache.api.tokenizer import Tokenizer
from raycache.api.tools import Tool, ToolChoice
from raycache.errors import RequestError


def output_grammar(body: GenerationBody, tokenizer: Tokenizer) -> tuple[str, str]:
    """The grammar of a request's output, without reasoning and tools, and the field that asks for it; "" for none.

    Raises:
        RequestError: it asks for something that cannot be enforced; names the field.
    """
    form = body.output_form()
    if form is None:
        return "", ""
    name, value = form
    field = "response_format" if isinstance(body, ChatBody) and not body.structured_outputs else "structured_outputs"
    makers: dict[str, Callable[[], str]] = {
        "json": lambda: constraint.json_schema(_schema(value, field), field=field),
        "json_object": constraint.json_object,
        "regex": lambda: constraint.regex(value),
        "choice": lambda: constraint.choice(value),
        "grammar": lambda: constraint.lark(value),
    }
    return constraint.at_start(makers[name](), tokenizer), field


@dataclass(frozen=True)
class _Answer:
    """The answer to one prompt of a chat.

    Attributes:
        chat: how the model writes it.
        prompt: the rendered conversation.
    """

    chat: ChatFormat
    prompt: str
    tokenizer: Tokenizer

    def calls(self, choice: ToolChoice, *, is_required: bool, has_reasoning: bool) -> str:
        """A grammar for answers with valid calls."""
        chat = self.chat if has_reasoning else replace(self.chat, reasoning=None)
        words = constraint.TokenizerWords(self.tokenizer, field="tools")
        tools = {tool.name: _parameters(tool) for tool in choice.tools}
        return chat.grammar(
            tools, words=words, prompt_tail=self.prompt, is_required=is_required, is_parallel=choice.is_parallel
        )

    def content(self, grammar: str) -> str:
        """The grammar of the content, between what the model writes around it."""
        if self.chat.has_channels:
            return constraint.framed(grammar, harmony.final_message(self._mark), "")
        if not self.chat.frames:
            return grammar
        before, close, end = self.chat.frames
        opening = "" if self.prompt.endswith(before) else f"({self._mark(before)})?"
        return constraint.framed(grammar, opening, f"({self._mark(close)} ({self._mark(end)})?)?")

    def after_reasoning(self, grammar: str, budget: int | None) -> str:
        """The grammar behind the reasoning, if the answer has any."""
        marks = self.chat.reasoning
        if marks is None:
            return grammar
        is_open = self.chat.is_reasoning_open(self.prompt)
        if not is_open and self.prompt.rstrip().endswith(marks.close.rstrip()):
            return grammar
        opening = "" if is_open else marks.open
        return constraint.after_reasoning(
            grammar, marks.close, tokenizer=self.tokenizer, open_mark=opening, budget=budget
        )

    def _mark(self, text: str) -> str:
        return constraint.mark(text, self.tokenizer)


def chat_grammar(
    body: ChatBody, choice: ToolChoice, *, model: ChatModel, prompt: str, tokenizer: Tokenizer
) -> tuple[str, str]:
    """The grammar of an answer in a chat, and the field that asks for it; "" for none.

    Args:
        prompt: the rendered conversation; its end says whether reasoning is open.
    Raises:
        RequestError: the request asks for something that cannot be enforced; names the field.
    """
    form, field = output_grammar(body, tokenizer)
    budget = body.thinking_token_budget
    answer = _Answer(model.format, prompt, tokenizer)
    is_enforced = choice.is_required or any(tool.is_strict for tool in choice.tools)
    if is_enforced and not model.format.has_calls:
        raise RequestError(
            "tool calls can be neither required nor strict: the format in which this model writes them is unknown, see "
            "`raycache doctor`",
            field="tool_choice",
        )
    if budget is not None and model.format.has_channels:
        raise RequestError("the length of this model's reasoning cannot be limited", field="thinking_token_budget")
    if choice.tools and model.format.has_calls and (form or is_enforced or not choice.is_parallel):
        _check_form(body)
        if not form and budget is None:
            return answer.calls(choice, is_required=choice.is_required, has_reasoning=True), "tools"
        calls = answer.calls(choice, is_required=choice.is_required or bool(form), has_reasoning=False)
        grammar = constraint.either(calls, answer.content(form)) if form else calls
        return answer.after_reasoning(grammar, budget), field or "tools"
    if form:
        return answer.after_reasoning(answer.content(form), budget), field
    if budget is None or model.format.reasoning is None:
        return "", ""
    return answer.after_reasoning(constraint.free_text(model.shown), budget), "thinking_token_budget"


def _check_form(body: ChatBody) -> None:
    """Refuse a form whose grammar cannot be joined with that of calls."""
    if (form := body.output_form()) and form[0] not in ("json", "json_object", "choice"):
        raise RequestError(f"structured_outputs.{form[0]} and tools exclude each other", field="structured_outputs")


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """Schema of a tool's arguments; any object where it cannot be enforced and need not be."""
    try:
        return checked_schema(tool.parameters, field="tools")
    except RequestError:
        if tool.is_strict:
            raise
        return {"type": "object"}


def _schema(value: Mapping[str, Any] | str, field: str) -> Mapping[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        schema = from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"{field}.json is not JSON: {error}", field=field) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{field}.json must be a JSON schema, an object", field=field)
    return schema
