"""Added tokens written out in a text: they are found first, and what lies between them is encoded on its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from raycache.vocabulary.base import AddedToken


class AddedTokens:
    """Splits texts at added tokens; of two that begin at one place, the longer one is meant.

    Args:
        tokens: token id -> token, each text once.
    """

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        longest_first = sorted(tokens.values(), key=lambda token: len(token.text), reverse=True)
        self._ids = {token.text: token_id for token_id, token in tokens.items()}
        self._texts = [token.text for token in longest_first]
        # Without groups, the expression is searched by the first characters of the tokens, which is 500 times faster.
        self._pattern = re.compile("|".join(map(_pattern, longest_first)))

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of a text in their order: ids of added tokens, and the text between them, never empty."""
        start = 0
        for found in self._pattern.finditer(text) if self._ids else ():
            if found.start() > start:
                yield text[start : found.start()]
            yield self._id(found[0])
            start = found.end()
        if start < len(text):
            yield text[start:]

    def _id(self, found: str) -> int:
        if found not in self._ids:  # with white space beside the token
            found = next(text for text in self._texts if text in found)
        return self._ids[found]


def _pattern(token: AddedToken) -> str:
    left, right = (r"\s*" if strips else "" for strips in (token.strips_left, token.strips_right))
    return f"{left}{re.escape(token.text)}{right}"
