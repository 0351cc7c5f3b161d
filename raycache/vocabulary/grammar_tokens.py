"""A vocabulary as llguidance needs it, to tell which tokens a grammar allows next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from raycache.vocabulary.base import Vocabulary

_FENCE = "\x02"
"""A character that no token but its own begins or ends with."""
_NUM_TRIED = 1000
_LONGEST_PLAIN = 32
_LIMITS = LLParserLimits(
    max_items_in_row=10_100, initial_lexer_fuel=200_000, max_grammar_size=60_000, verbose_errors=False
)
"""Bound the time to compile to a few tenths of a second, whoever wrote the grammar, and admit a choice of 10,000 texts.
Symbols have numbers of 16 bits."""


def grammar_tokens(vocabulary: Vocabulary, *, num_logits: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Build the table of all tokens; takes a second of CPU time, in which other threads run.

    Where a grammar leaves no choice of text, its mask holds only the token that the tokenizer would take, so the table
    must encode texts as the tokenizer does.

    Args:
        num_logits: rows of the model's logits, which may be more or less than the vocabulary has tokens.
        eos_token_ids: tokens that end an output, at least one; those beyond the logits are ignored.
    """
    eos = [token_id for token_id in eos_token_ids if token_id < num_logits]
    if vocabulary.json_text and vocabulary.size <= num_logits:
        try:
            table = LLTokenizer(vocabulary.json_text, n_vocab=num_logits, eos_token=eos)
        except ValueError:
            table = None  # a kind of tokenizer.json that llguidance does not read
        if table is not None and _agrees(table, vocabulary):
            return table
    fence = vocabulary.encode(_FENCE, add_special_tokens=False)
    tokens = token_pieces(vocabulary, num_logits=num_logits)
    special_ids = [token_id for token_id in vocabulary.special_ids if token_id < num_logits]

    def encode(text: str) -> list[int]:
        return vocabulary.encode(_FENCE + text, add_special_tokens=False)[len(fence) :]

    return LLTokenizer(cast(TokenizerWrapper, _Tokens(tokens, special_ids, encode)), eos_token=eos)


def plain_table(tokens: Sequence[bytes], *, special_ids: Collection[int], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """A table that needs no tokenizer. It tells whether a grammar compiles; its masks may differ from those of
    `grammar_tokens` where a grammar leaves no choice of text.

    Args:
        tokens: bytes of every token.
        eos_token_ids: at least one.
    """
    return LLTokenizer(cast(TokenizerWrapper, _Tokens(tokens, special_ids)), eos_token=list(eos_token_ids))


def token_pieces(vocabulary: Vocabulary, *, num_logits: int) -> list[bytes]:
    """Bytes of every token, empty for those that the vocabulary does not know."""
    return [vocabulary.pieces[token_id] for token_id in range(num_logits)]


def compiled(grammar: str, table: LLTokenizer) -> LLMatcher:
    """A matcher at the start of a grammar; a grammar that is wrong or too large gives one that is in error."""
    return LLMatcher(table, grammar, log_level=0, limits=_LIMITS)


def without_excerpt(message: str) -> str:
    """An error of llguidance in one line, without the excerpt of the grammar, which may be long."""
    kept = message.split("\n   1 |")[0].split("\n<state>")[0].split("\n")
    return "; ".join(line.strip() for line in kept if line.strip())[:1000]


def _agrees(table: LLTokenizer, vocabulary: Vocabulary) -> bool:
    """Whether tokens stand for the same bytes, of those that are tried."""
    tried = (i for i in range(0, vocabulary.size, 1 + vocabulary.size // _NUM_TRIED) if i not in vocabulary.special_ids)
    pieces = ((token_id, vocabulary.pieces[token_id]) for token_id in tried)
    # The byte 0xff is in no text, and llguidance's own mark of special tokens.
    return all(table.decode_bytes([token_id]) == piece for token_id, piece in pieces if piece and piece[0] != 0xFF)


class _Tokens:
    """The tokens one by one; the names of the attributes are llguidance's.

    Args:
        tokens: bytes of every token.
        encode: token ids of a text in the middle of another one; None: the longest tokens, from left to right.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Collection[int], encode: Callable[[str], list[int]] | None = None
    ) -> None:
        self.eos_token_id = self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        special = set(special_ids)
        self._ids = {piece: i for i, piece in enumerate(tokens) if piece and i not in special}
        longest = max(map(len, self._ids), default=0)
        self._longest = longest if encode else min(longest, _LONGEST_PLAIN)
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text in the middle of another one."""
        content = text.encode() if isinstance(text, str) else bytes(text)
        if self._encode is None:
            return self._longest_first(content)
        try:
            ids = self._encode(content.decode())
        except UnicodeDecodeError:
            ids = []
        is_right = all(i < len(self.tokens) for i in ids) and b"".join(map(self.tokens.__getitem__, ids)) == content
        return ids if is_right else self._longest_first(content)

    def _longest_first(self, content: bytes) -> list[int]:
        """Bytes that no token has are left out; no grammar can be followed there."""
        ids, begin = [], 0
        while begin < len(content):
            ends = range(min(begin + self._longest, len(content)), begin, -1)
            stop = next((stop for stop in ends if content[begin:stop] in self._ids), 0)
            if stop:
                ids.append(self._ids[content[begin:stop]])
            begin = max(stop, begin + 1)
        return ids
