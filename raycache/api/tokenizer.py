"""The tokenizer of a model directory: text to token ids and back, special tokens, chat templates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from raycache.api.template_files import read_templates
from raycache.config import Config
from raycache.errors import CheckpointError
from raycache.vocabulary.base import Vocabulary, named_tokens, read_settings
from raycache.vocabulary.files import open_vocabulary

_log = logging.getLogger(__name__)


class Tokenizer:
    """Tokenizer of a Hugging Face model directory.

    Args:
        model_dir: with tokenizer.json or one of the other files that `open_vocabulary` knows.
        is_optional: without such a file, the first 256 token ids are the bytes, and the others have no text.
    Attributes:
        description: file and kind, for people, such as "tokenizer.json (BPE)".
        vocab_size: token ids that it knows lie in [0, vocab_size), added tokens included.
        special_tokens: name -> text, such as "bos_token" -> "<s>"; the names that chat templates use.
        templates: the model's chat templates.
        response_template: what the model's files declare of its answers (formats/declared.py), or None.
        pieces: token id -> bytes.
        vocabulary: what all of it is read from.
    Raises:
        CheckpointError: a file is missing, damaged or of an unsupported kind.
    """

    def __init__(self, model_dir: str | Path, *, is_optional: bool = False) -> None:
        self._folder = folder = Path(model_dir)
        settings = read_settings(folder)
        self.vocabulary: Vocabulary = open_vocabulary(folder, settings, is_optional=is_optional)
        self.description = self.vocabulary.description
        self.pieces = self.vocabulary.pieces
        self.special_tokens = {**self.vocabulary.special_tokens, **named_tokens(settings)}
        self.response_template: object = settings.get("response_template")
        self.templates = read_templates(folder, settings, token_id=self.token_id)
        self.vocab_size = self.vocabulary.size
        named = map(self.token_id, self.special_tokens.values())
        self._special_ids = self.vocabulary.special_ids | {token_id for token_id in named if token_id is not None}

    @classmethod
    def of(cls, config: Config, *, vocab_size: int) -> Tokenizer:
        """The tokenizer of a service.

        Args:
            config: of the service. With random weights the tokenizer may be missing.
        Raises:
            CheckpointError: it is missing, cannot be read, or is that of another model.
        """
        tokenizer = cls(config.model, is_optional=config.dummy_weights)
        if not config.dummy_weights:
            tokenizer.check_fits(vocab_size)
        origin = config.chat_template or tokenizer.templates.origin
        _log.info("tokenizer: %s; chat template: %s", tokenizer.description, origin or "none")
        if tokenizer.templates.is_built_in and not config.chat_template:
            _log.warning("the model publishes no chat template; the one %s is used", origin)
        return tokenizer

    def check_fits(self, vocab_size: int) -> None:
        """Refuse a tokenizer whose texts have token ids that the model does not have.

        Special tokens beyond the model's vocabulary are fine, except those that begin and end texts: Gemma 3 has one
        for images. A model may have more ids than its tokenizer.

        Raises:
            CheckpointError: names such a token.
        """
        ends = {self.bos_id, self.eos_id}
        for token_id in range(vocab_size, self.vocab_size):
            if token_id in ends or (token_id not in self._special_ids and self.pieces[token_id]):
                raise CheckpointError(
                    f"the tokenizer {self._folder}/{self.description} does not fit the model: token {token_id} is "
                    f"{self.token_text(token_id)!r} and config.json has vocab_size={vocab_size}; use the tokenizer "
                    "that was published with the weights"
                )

    @property
    def bos_id(self) -> int | None:
        """Id of the token that opens a text, if the model has one."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, if the model has one."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """Id of a token given as it stands in the vocabulary, or None."""
        return self.vocabulary.token_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark such as <s> and not text."""
        return token_id in self._special_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Releases the interpreter lock, so a long text can be encoded in a thread.

        Args:
            text: without lone surrogates.
            add_special_tokens: put what the model expects around a text, such as <s>, as the tokenizer's file says.
                False for a rendered chat template, which writes them itself.
        """
        return self.vocabulary.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ill-formed UTF-8 gives U+FFFD, unknown ids give nothing."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        kept = [token_id for token_id in token_ids if token_id not in hidden and self.pieces[token_id]]
        if not kept:
            return ""
        joined = self.pieces.at_start(kept[0]) + b"".join(map(self.pieces.__getitem__, kept[1:]))
        spaces = len(joined) - len(joined.lstrip(b" "))
        return joined[min(spaces, self.pieces.strip_start) :].decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        r"""One token for people: its text, or such as "bytes:\xe2\x82" when it is a part of a character."""
        piece = self.pieces[token_id]
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
