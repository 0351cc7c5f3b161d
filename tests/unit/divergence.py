"""A history of prompts over a small tokenizer and chat template, and an engine's cache that never evicts beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raycache.api.chat import ChatTemplate
from raycache.api.tokenizer import Tokenizer
from raycache.divergence.finding import Finding
from raycache.divergence.history import PromptHistory
from raycache.divergence.place import Asked
from raycache.divergence.text import TokenText
from raycache.types import Miss, RequestOutput
from tests.oracle import tiny_tokenizers

PAGE = 16

TEMPLATE = Path(__file__).parents[1] / "agents" / "chat.jinja"


class Client:
    """Sends chats and gives what was found of each."""

    def __init__(self, folder: Path, *, template: str = "", max_bytes: int = 2**22) -> None:
        self.tokenizer = Tokenizer(tiny_tokenizers.byte_level(folder))
        vocabulary = self.tokenizer.vocabulary
        self.text = TokenText(vocabulary.pieces.__getitem__, size=vocabulary.size, is_special=self.tokenizer.is_special)
        self.now = 0.0
        self.history = PromptHistory(self.text, page_size=PAGE, max_bytes=max_bytes, clock=lambda: self.now)
        source = template or TEMPLATE.read_text(encoding="utf-8")
        self.template = ChatTemplate({"default": source}, special_tokens=self.tokenizer.special_tokens)
        self.cached: list[tuple[str, list[int]]] = []

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answer: str = "",
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Finding | None:
        text = self.template.render(messages, tools=tools, variables=variables)
        return self.send(text, asked=Asked(messages, tools, text), answer=answer, **options)

    def send(
        self,
        prompt: str | list[int],
        *,
        asked: Asked | None = None,
        answer: str = "",
        salt: str = "",
        tenant: str = "",
        **options: Any,
    ) -> Finding | None:
        """Send a prompt; `cached` and `miss` are the engine's, by default whole pages of the longest known prefix."""
        tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
        if asked is None:
            asked = Asked(text=prompt if isinstance(prompt, str) else "")
        known = max((shared(tokens, one) for other, one in self.cached if other == salt), default=0)
        cached = options.pop("cached", min(known, len(tokens) - 1) // PAGE * PAGE)
        miss, cut_by = options.pop("miss", Miss.NEVER_SEEN), options.pop("cut_by", "")
        output = self.encode(answer) or [0]
        options.setdefault("is_wanted", True)
        with self.history.begin(tokens, salt=salt, tenant=tenant, asked=asked, **options) as watch:
            self.now += 1
            for index, token in enumerate(output):
                first = {"cached_tokens": cached, "miss": miss, "cut_by": cut_by} if index == 0 else {}
                watch.take(RequestOutput("r", (token,), **first))
        self.cached.append((salt, [*tokens, *output]))
        return watch.finding

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that two sequences share, found the slow way."""
    length = min(len(one), len(other))
    unequal = np.flatnonzero(np.array(one[:length]) != np.array(other[:length]))
    return int(unequal[0]) if len(unequal) else length


def tool(name: str, **parameters: str) -> dict[str, Any]:
    """A function that a model may call; its parameters' types."""
    properties = {key: {"type": kind, "description": f"The {key} that {name} uses"} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name} for the user.", "parameters": schema},
    }


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    """A call in a message of the assistant."""
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
