"""Draft tokens whose truth a test knows."""

from __future__ import annotations

import numpy as np


class KnownTexts:
    """Drafts what texts say that it knows, now and then wrongly, and fewer tokens than it may.

    Args:
        texts: token ids; can be added to.
        vocab: of the wrong draft tokens.
    """

    def __init__(self, texts: list[list[int]], *, vocab: int) -> None:
        self.texts = texts
        self._vocab = vocab

    def draft(self, tokens: bytes | bytearray, most: int) -> bytes:
        """See Drafter."""
        known = np.frombuffer(bytes(tokens), np.int32).tolist()
        random = np.random.default_rng(known)
        follows = [text[len(known) :] for text in self.texts if text[: len(known)] == known]
        drafted = [*(follows[-1] if follows else ()), *random.integers(0, self._vocab, most).tolist()]
        drafted = drafted[: int(random.integers(0, most + 1))]
        if drafted and random.random() < 0.5:
            drafted[int(random.integers(len(drafted)))] = int(random.integers(0, self._vocab))
        return np.asarray(drafted, np.int32).tobytes()
