"""A chat model as its API sees it: what it is asked in, and how its answers are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from raycache.api.chat import ChatTemplate
from raycache.api.constraint import mark
from raycache.api.formats.chat_format import ChatFormat
from raycache.api.formats.effort import accepted_efforts, nearest_effort
from raycache.api.formats.find import find_format, ignores_tools
from raycache.api.formats.history import find_history
from raycache.api.formats.parts import PartsParser
from raycache.api.schema import ChatBody
from raycache.api.tokenizer import Tokenizer
from raycache.api.tools import ToolChoice
from raycache.errors import RequestError

_TAIL_CHARS = 256
"""End of a prompt that says whether the answer begins inside of the reasoning."""


class ChatModel:
    """Template and format of a model.

    Args:
        template: its chat template.
        tokenizer: its tokenizer.
    Attributes:
        format: how it writes reasoning and tool calls.
        history: how earlier turns are brought into the form that the template shows.
        shown: special tokens that are parts of the format's marks.
        bounds_reasoning: whether the reasoning can be held to a number of tokens.
    """

    def __init__(self, template: ChatTemplate, *, tokenizer: Tokenizer) -> None:
        self.template = template
        self.format: ChatFormat = find_format(template, tokenizer=tokenizer)
        self.history = find_history(template, ids=self.format.ids)
        ids = map(tokenizer.token_id, self.format.marks)
        self.shown = frozenset(token_id for token_id in ids if token_id is not None)
        reasoning = self.format.reasoning
        self.bounds_reasoning = reasoning is not None and mark(reasoning.close, tokenizer).startswith("<[")
        self._ignores_tools = not template.sources or ignores_tools(template)
        self._efforts = accepted_efforts(template)

    def prompt(self, body: ChatBody, choice: ToolChoice) -> str:
        """The text of a conversation.

        Raises:
            RequestError: the template refuses the messages, or does not show tools.
        """
        if choice.tools and self._ignores_tools:
            raise RequestError(
                "the model's chat template does not show tools, so the model would not know of them; leave tools "
                "out, or start the server with --chat-template FILE for a template that does",
                field="tools",
            )
        opens_answer = body.add_generation_prompt
        return self.template.render(
            body.messages,
            tools=body.tools if choice.tools else None,
            add_generation_prompt=not body.continue_final_message if opens_answer is None else opens_answer,
            continue_final_message=body.continue_final_message,
            variables=self._variables(body),
            adapt=self.history.adapted,
        )

    def parser(self, body: ChatBody, choice: ToolChoice, prompt: str) -> Callable[[], PartsParser]:
        """Makes a parser for each answer to a prompt."""
        calls = sum(len(message.get("tool_calls") or ()) for message in body.messages)
        return partial(
            self.format.parser,
            prompt_tail=prompt[-_TAIL_CHARS:],
            tools={tool.name: tool.parameters for tool in choice.tools},
            num_earlier_calls=calls,
        )

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """Variables of the template. Families name the switch for reasoning differently, and ignore unknown names."""
        variables = dict(body.chat_template_kwargs)
        match body.reasoning_effort:
            case None:
                return variables
            case "none":
                return {"enable_thinking": False, "thinking": False} | variables
            case effort:
                return {"reasoning_effort": nearest_effort(effort, self._efforts)} | variables
