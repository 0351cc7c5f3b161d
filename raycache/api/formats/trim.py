"""White space between reasoning, content and calls, which belongs to the format and not to the text."""

from __future__ import annotations

from collections.abc import Iterator

from raycache.api.formats.parts import Content, Part, Reasoning, ToolCallStart

_Text = type[Content] | type[Reasoning]


class Trim:
    """Drops line ends around reasoning and calls, and content that is nothing but white space beside them.

    Everything else stays as it is: an output without reasoning and calls is not touched.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # white space that is kept if text of its kind follows
        self._held_kind: _Text = Content
        self._last: type[Part] | None = None  # kind of what came before the held space
        self._has_content = self._has_reasoned = False

    def push(self, part: Part) -> Iterator[Part]:
        """The part, without the white space that is not text."""
        match part:
            case Content(text) | Reasoning(text):
                if type(part) is not self._held_kind:
                    yield from self._between()
                    self._held_kind = type(part)
                self._has_reasoned = self._has_reasoned or type(part) is Reasoning
                yield from self._text(text, type(part))
            case ToolCallStart():
                yield from self._between()
                self._last = ToolCallStart
                yield part
            case _:
                yield part

    def finish(self) -> Iterator[Part]:
        """What was held back, at the end."""
        is_content = self._last is Content or (self._last is None and not self._has_reasoned)
        if self._held and self._held_kind is Content and is_content:
            yield Content("".join(self._held))

    def _between(self) -> Iterator[Part]:
        """The space before another kind of part: behind content only line ends go, behind others all."""
        rest, self._held = "".join(self._held).rstrip("\n"), []
        if rest and self._last is Content is self._held_kind:
            yield Content(rest)

    def _text(self, text: str, kind: _Text) -> Iterator[Part]:
        bare = text.rstrip()
        if bare:
            whole = "".join(self._held) + bare
            self._held = []
            yield kind(whole.lstrip("\n") if self._drops_lead(kind) else whole)
            self._last = kind
            self._has_content = self._has_content or kind is Content
        self._held.append(text[len(bare) :])

    def _drops_lead(self, kind: _Text) -> bool:
        if kind is Reasoning:
            return self._last is not Reasoning
        return not self._has_content and (self._has_reasoned or self._last is not None)
