"""tiktoken.model: the vocabulary of Kimi and Moonlight, a line per token.

    IQ== 0          the token's bytes in base64, and its id, which is also its rank

The vendor's code beside the file, which is not run here, adds what the file does not say: the regular expression, and
256 special tokens after the last rank, named in tokenizer_config.json or `<|reserved_token_ID|>`. Sources:
tokenization_kimi.py of Kimi-K2 and Kimi-Linear, tokenization_moonshot.py of Moonlight.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raycache.errors import CheckpointError
from raycache.vocabulary.base import AddedToken, TokenBytes, read_added_tokens, read_file
from raycache.vocabulary.byte_pairs import BytePairs

FILE = "tiktoken.model"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""What is encoded apart: runs of Chinese characters, words with a contraction, three digits, punctuation, space."""

_NUM_RESERVED = 256
_TOKENIZER_CLASS = "TikTokenTokenizer"


class TiktokenModel:
    """Vocabulary of a tiktoken.model; see `Vocabulary`.

    Args:
        folder: with the file.
        settings: of its tokenizer_config.json.
    Raises:
        CheckpointError: a file is damaged, or of a vendor whose regular expression is not known.
    """

    json_text = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        path = folder / FILE
        owner = settings.get("tokenizer_class", _TOKENIZER_CLASS)
        if owner != _TOKENIZER_CLASS:
            raise CheckpointError(
                f"{path} is of tokenizer_class {owner!r}, which is not supported beside {FILE}; only "
                f"{_TOKENIZER_CLASS} (Kimi, Moonlight) is; a tokenizer.json would be read instead"
            )
        ranks = _read_ranks(path)
        first = len(ranks)
        added = {i: AddedToken(f"<|reserved_token_{i}|>") for i in range(first, first + _NUM_RESERVED)}
        added |= read_added_tokens(settings, folder)
        self._pairs = BytePairs(path.name, pattern=PATTERN, ranks=ranks, added=added)
        self.description = f"{FILE} (tiktoken BPE)"
        self.size = self._pairs.size
        self.pieces: TokenBytes = self._pairs.pieces
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.is_special)
        self.special_tokens: Mapping[str, str] = {"bos_token": "[BOS]", "eos_token": "[EOS]"}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode without adding special tokens."""
        return self._pairs.encode(text)

    def token_id(self, token: str) -> int | None:
        return self._pairs.token_id(token)


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged in line {number} ({error}); lines are base64 and a rank; download it again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(
            f"{path} has {len(ranks)} tokens, which must have the ranks from 0 on, and the 256 bytes must be among "
            "them; download it again"
        )
    return ranks
