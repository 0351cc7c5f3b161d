"""Small conversations that show what a chat template does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from raycache.errors import RequestError

Message = dict[str, Any]
Adapt = Callable[[list[Message]], list[Message]]

NAME = "find_marigold"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Finds it.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}
QUESTION = {"role": "user", "content": "Where?"}


class Template(Protocol):
    """A chat template, as far as it is needed here."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Name -> Jinja source."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        adapt: Adapt = list,
    ) -> str:
        """Text of a prompt; raises RequestError where the template refuses. `adapt` changes the checked messages."""
        ...


def with_calls(*places: str) -> list[Message]:
    """A question and calls with these arguments, with their results."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": NAME, "arguments": {"place": place}}}
        for index, place in enumerate(places)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": NAME, "content": "Done."} for call in calls]
    return [dict(QUESTION), {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def rendered(template: Template, messages: Sequence[Mapping[str, Any]], *, adapt: Adapt = list) -> str:
    """The prompt with a tool and with reasoning, or "" if the template refuses it."""
    try:
        return template.render(
            messages, tools=[TOOL], variables={"enable_thinking": True, "thinking": True}, adapt=adapt
        )
    except RequestError:
        return ""
