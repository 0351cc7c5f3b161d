"""Texts of tokens: of short pieces by reading them, of long ones by their length only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raycache.divergence.seen import Tokens

_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes that do not begin a character in UTF-8."""


class TokenText:
    """The vocabulary of a tokenizer.

    Args:
        piece: token id -> bytes.
        size: token ids lie in [0, size); those beyond have no text.
        is_special: whether a token is a mark and not text.
    """

    def __init__(self, piece: Callable[[int], bytes], *, size: int, is_special: Callable[[int], bool]) -> None:
        self._piece, self._size = piece, size
        lengths = (len(piece(token_id).translate(None, _CONTINUATION)) for token_id in range(size))
        self._num_chars = np.fromiter(lengths, dtype=np.int32, count=size)
        lines = (piece(token_id).count(b"\n") for token_id in range(size))
        self._num_lines = np.fromiter(lines, dtype=np.int32, count=size)
        self._is_special = np.fromiter(map(is_special, range(size)), dtype=bool, count=size)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, marks included."""
        return b"".join(map(self._piece, tokens.tolist())).decode("utf-8", errors="replace")

    def num_chars(self, tokens: Tokens) -> int:
        """Characters of the text, without decoding it."""
        return int(self._num_chars[self._known(tokens)].sum())

    def num_lines(self, tokens: Tokens) -> int:
        """Line ends in the text."""
        return int(self._num_lines[self._known(tokens)].sum())

    def num_tokens(self, tokens: Tokens, num_chars: int) -> int:
        """Tokens at the beginning that hold `num_chars` characters."""
        return int(np.searchsorted(np.cumsum(self._num_chars[self._known(tokens)]), num_chars))

    def num_special(self, tokens: Tokens) -> int:
        """Marks among tokens."""
        return int(self._is_special[self._known(tokens)].sum())

    def _known(self, tokens: Tokens) -> Tokens:
        return tokens if self._size > 0 and int(tokens.max(initial=0)) < self._size else tokens[tokens < self._size]
