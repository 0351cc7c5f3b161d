"""What chat models of each family write: two calls at once, one with nested arguments and one without any.

The texts are those that the families' chat templates give for `CALLS` in an earlier turn, without the mark that ends
the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "opts": {
                "type": "object",
                "properties": {
                    "units": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = {"city": "Zürich", "days": 3, "opts": {"units": "C", "tags": ["a", "b"]}}
CALLS = [("get_weather", WEATHER), ("now", {})]
JSON = '{"city": "Zürich", "days": 3, "opts": {"units": "C", "tags": ["a", "b"]}}'
CONTENT, THOUGHTS = "Let me look.", "I need weather."


@dataclass(frozen=True)
class Output:
    """One output.

    Attributes:
        family: name of the format.
        prompt_tail: end of the rendered prompt.
        reasoning, content: in it.
        calls: in it.
        ids: that the family's text gives, if any.
    """

    family: str
    text: str
    prompt_tail: str = ""
    reasoning: str = ""
    content: str = CONTENT
    calls: tuple[tuple[str, Any], ...] = tuple(CALLS)
    ids: tuple[str, ...] = ()


_HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)

OUTPUTS = {
    "hermes": Output("hermes", _HERMES, content=""),
    "hermes, content": Output("hermes", f"{CONTENT}\n{_HERMES}"),
    "hermes, thoughts": Output(
        "hermes", f"<think>\n{THOUGHTS}\n</think>\n\n{CONTENT}\n{_HERMES}", "<|im_start|>assistant\n", THOUGHTS
    ),
    "hermes, thoughts opened": Output(
        "hermes", f"{THOUGHTS}\n</think>\n\n{_HERMES}", "<|im_start|>assistant\n<think>\n", THOUGHTS, content=""
    ),
    "hermes, thoughts closed": Output(
        "hermes", f"{CONTENT}\n{_HERMES}", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
}
