"""Byte-pair encoding as OpenAI's tiktoken does it, for the checkpoints whose vocabulary has tiktoken's form.

    text -> added tokens | runs of bounded length -> a regular expression's matches -> merges by rank

Long texts are cut first, where the vendors cut them: tiktoken's regular expressions overflow their stack on runs of
hundreds of thousands of characters, and these cuts are part of the ids that a model was trained and is tested with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import tiktoken

from raycache.vocabulary.added_tokens import AddedTokens
from raycache.vocabulary.base import AddedToken, ByteTable

MAX_CHARS = 400_000
"""Characters that are encoded in one go."""
MAX_RUN_CHARS = 25_000
"""Characters without a change between white space and other characters that are encoded in one go."""

_RUNS = re.compile(r"\s+|\S+")


class BytePairs:
    """Text to token ids.

    Args:
        name: of the vocabulary, for tiktoken.
        pattern: regular expression, in tiktoken's dialect, whose matches are encoded one by one.
        ranks: bytes of a token -> its id; pairs with the lowest id are merged first.
        added: token id -> token.
    Attributes:
        pieces: token id -> bytes.
        size: token ids lie in [0, size).
    """

    def __init__(self, name: str, *, pattern: str, ranks: Mapping[bytes, int], added: Mapping[int, AddedToken]) -> None:
        self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
        self._ranks = ranks
        self._added = AddedTokens(added)
        self._added_ids = {token.text: token_id for token_id, token in added.items()}
        table = {token_id: piece for piece, token_id in ranks.items()}
        table |= {token_id: token.text.encode() for token_id, token in added.items()}
        self.pieces = ByteTable(table)
        self.size = max(table) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids; tiktoken releases the interpreter lock."""
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                for run in bounded_runs(part):
                    ids += self._encoding.encode_ordinary(run)
        return ids

    def token_id(self, token: str) -> int | None:
        """Id of an added token, or of one that has this text."""
        return self._added_ids.get(token, self._ranks.get(token.encode(errors="replace")))


def bounded_runs(text: str) -> Iterator[str]:
    """Cut a text so that no part is longer than `MAX_CHARS`, and no run in it longer than `MAX_RUN_CHARS`."""
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    for begin in range(0, len(text), MAX_CHARS):
        part = text[begin : begin + MAX_CHARS]
        start = 0
        for run in _RUNS.finditer(part):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield part[start:cut]
                start = cut
        yield part[start:]
