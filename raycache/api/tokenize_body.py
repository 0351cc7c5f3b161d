"""Request bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast

from raycache.api.schema import ChatBody, StrictBody, parse_body
from raycache.errors import RequestError

_CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeBody(StrictBody):
    """Body of /tokenize: a prompt, or messages with the fields of a chat that shape their prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def check(self) -> None:
        given = [name for name in _CHAT_FIELDS if getattr(self, name) is not None]
        if self.prompt is not None and given:
            raise RequestError(f"{given[0]} does not go with prompt; leave one of them out", field=given[0])
        if self.prompt is None and self.messages is None:
            raise RequestError("prompt is required, or messages", field="prompt")

    def chat(self, *, model: str) -> ChatBody:
        """The messages as the body of a chat.

        Raises:
            RequestError: a field is wrong; names it.
        """
        fields = {name: getattr(self, name) for name in (*_CHAT_FIELDS, "add_special_tokens")}
        return parse_body(ChatBody, {"model": model, **fields})


class DetokenizeBody(StrictBody):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
