"""The grammar that an answer has to follow: reasoning first, then what the request asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from raycache.api import constraint
from raycache.api.chat_model import ChatModel
from raycache.api.schema import ChatBody, GenerationBody
from raycache.api.tokenizer import Tokenizer
from raycache.api.tools import ToolChoice
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


def chat_grammar(
    body: ChatBody, choice: ToolChoice, *, model: ChatModel, prompt: str, tokenizer: Tokenizer
) -> tuple[str, str]:
    """The grammar of an answer in a chat, and the field that asks for it; "" for none.

    Args:
        prompt: the rendered conversation; its end says whether reasoning is open.
    Raises:
        RequestError: the request asks for something that cannot be enforced; names the field.
    """
    grammar, field = output_grammar(body, tokenizer)
    if choice.is_required or any(tool.is_strict for tool in choice.tools):
        raise RequestError("this version does not enforce tool calls", field="tool_choice")
    budget, marks = body.thinking_token_budget, model.format.reasoning
    if marks is None or (budget is None and not grammar):
        return grammar, field
    is_open = model.format.is_reasoning_open(prompt)
    if not is_open and prompt.rstrip().endswith(marks.close.rstrip()):
        return grammar, field  # the template has closed it: there is none
    wrapped = constraint.after_reasoning(
        grammar or constraint.free_text(model.shown),
        marks.close,
        open_mark="" if is_open else marks.open,
        tokenizer=tokenizer,
        budget=budget,
    )
    return wrapped, field or "thinking_token_budget"


def _schema(value: Mapping[str, Any] | str, field: str) -> Mapping[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field}.json is not JSON: {error}", field=field) from error
    if not isinstance(schema, dict):
        raise RequestError(f"{field}.json must be a JSON schema, an object", field=field)
    return schema
