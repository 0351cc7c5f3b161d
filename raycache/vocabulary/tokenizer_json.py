"""tokenizer.json: the form of Hugging Face's tokenizers, which most checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers

from raycache.errors import CheckpointError
from raycache.vocabulary.base import TokenBytes, read_file
from raycache.vocabulary.decoders import DecoderBytes

FILE = "tokenizer.json"


class TokenizerJson:
    """Vocabulary of a tokenizer.json; see `Vocabulary`.

    Args:
        backend: the tokenizer.
        description: see `Vocabulary`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, description: str) -> None:
        self._backend = backend
        self.description = description
        self.pieces: TokenBytes = DecoderBytes(backend)
        # The count is not the bound when ids have gaps.
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens: Mapping[str, str] = {}

    @classmethod
    def load(cls, folder: Path) -> TokenizerJson:
        """Read the file.

        Raises:
            CheckpointError: it is damaged, or its decoder is of an unsupported kind.
        """
        path = folder / FILE
        try:
            backend = tokenizers.Tokenizer.from_buffer(read_file(path))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged or of a newer format ({error}); download it again") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, description=f"{FILE} ({type(backend.model).__name__})")

    @classmethod
    def plain_bytes(cls) -> TokenizerJson:
        """One token per byte, for models without a tokenizer."""
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.models.BPE(vocab={letter: token_id for token_id, letter in enumerate(alphabet)}, merges=[])
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return cls(backend, description="none (one token per byte)")

    @property
    def json_text(self) -> str:
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found
