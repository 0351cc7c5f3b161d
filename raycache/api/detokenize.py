"""Incremental detokenisation: token ids come one by one, text goes out as soon as its characters are complete.

Tokens are byte strings (token_bytes.py), so the state is that of a UTF-8 decoder and a token costs the same however
long the text is. The pieces joined are `Tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from raycache.api.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class Detokenizer:
    """Text of one growing sequence of tokens.

    Args:
        tokenizer: whose tokens they are.
        prompt: tokens before the first one that is pushed. They give no text, but the output may finish a character
            that they began, and a space after them is kept where it would be dropped at the start of a text.
        skip_special_tokens: marks such as <s> give no text.
        shown: special tokens that give their text all the same, such as <tool_call>.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skips_special = skip_special_tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_start = True
        self._spaces_to_strip = self._pieces.strip_start
        context = self._last_tokens(prompt)
        if context:
            self._is_start, self._spaces_to_strip = False, 0
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Add one token; returns the characters that are complete with it, perhaps none."""
        if self._is_hidden(token_id):
            return ""
        piece = self._pieces[token_id]
        if self._is_start and piece:
            piece, self._is_start = self._pieces.at_start(token_id), False
        return self._decoder.decode(self._strip(piece) if self._spaces_to_strip else piece)

    def finish(self) -> str:
        """End the text: U+FFFD if a character was left incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _is_hidden(self, token_id: int) -> bool:
        return self._skips_special and token_id not in self._shown and self._tokenizer.is_special(token_id)

    def _strip(self, piece: bytes) -> bytes:
        spaces = min(self._spaces_to_strip, len(piece) - len(piece.lstrip(b" ")))
        self._spaces_to_strip = self._spaces_to_strip - spaces if spaces == len(piece) else 0
        return piece[spaces:]

    def _last_tokens(self, prompt: Sequence[int]) -> list[int]:
        # As many tokens with text as the longest character has bytes: a character that the prompt leaves incomplete
        # begins in them.
        found: list[int] = []
        for token_id in reversed(prompt):
            if not self._is_hidden(token_id) and self._pieces[token_id]:
                found.append(token_id)
                if len(found) == _LONGEST_CHARACTER:
                    break
        return found[::-1]
