"""tokenizer.model: a SentencePiece model, of checkpoints that are older than tokenizer.json or come without it.

The model itself says how text is normalised and whether it gets a space in front. Around it stands what Hugging Face's
tokenizers add and tokenizer_config.json sets: special tokens are found in the text before SentencePiece sees it,
`add_bos_token` and `add_eos_token` put them around it, and only the beginning of a text gets the space, unless `legacy`
asks for one after every special token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from raycache.errors import CheckpointError
from raycache.vocabulary.added_tokens import AddedTokens
from raycache.vocabulary.base import AddedToken, ByteTable, TokenBytes, read_added_tokens, read_file, read_json

FILE = "tokenizer.model"

_SPACE = "▁"
# A serialised message that is appended to another one replaces its fields. ModelProto.normalizer_spec is field 3, and
# NormalizerSpec.add_dummy_prefix, which puts a space in front of a text, is field 3 of it.
_WITHOUT_PREFIX, _WITH_PREFIX = b"\x1a\x02\x18\x00", b"\x1a\x02\x18\x01"


class SentencePieceModel:
    """Vocabulary of a tokenizer.model; see `Vocabulary`.

    Args:
        folder: with the file.
        settings: of its tokenizer_config.json.
    Raises:
        CheckpointError: a file is damaged or of another kind.
    """

    json_text = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        path = folder / FILE
        content = read_file(path)
        model = _load(content, path)
        adds_prefix = settings.get("add_prefix_space")
        if not isinstance(adds_prefix, bool):
            adds_prefix = model.normalize("x").startswith(_SPACE)
        self._inner = _load(content + _WITHOUT_PREFIX, path)
        self._first = _load(content + _WITH_PREFIX, path) if adds_prefix else self._inner
        if settings.get("legacy") is True:
            self._inner = self._first
        added = _added_tokens(model, folder, settings)
        self._added = AddedTokens(added)
        self._ids = _piece_ids(model) | {token.text: token_id for token_id, token in added.items()}
        self.description = f"{FILE} (SentencePiece)"
        self.size = max(model.get_piece_size(), max(added, default=-1) + 1)
        self.pieces: TokenBytes = ByteTable(_bytes(model, added), strip_start=int(adds_prefix))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.is_special)
        named = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
        self.special_tokens: Mapping[str, str] = {
            name: model.id_to_piece(token_id) for name, token_id in named.items() if token_id >= 0
        }
        self._before = [model.bos_id()] if settings.get("add_bos_token", True) and model.bos_id() >= 0 else []
        self._after = [model.eos_id()] if settings.get("add_eos_token", False) and model.eos_id() >= 0 else []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode texts; SentencePiece releases the interpreter lock."""
        ids: list[int] = []
        model = self._first
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += model.encode(part)
            model = self._inner
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)


def _load(content: bytes, path: Path) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is damaged or no SentencePiece model ({error}); download it again, or make a tokenizer.json with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from error


def _added_tokens(model: SentencePieceProcessor, folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The model's own marks, and what the files beside it add; added_tokens.json is the older form."""
    marks = (i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i))
    found = {token_id: AddedToken(model.id_to_piece(token_id)) for token_id in marks}
    for text, token_id in read_json(folder / "added_tokens.json").items():
        if type(token_id) is not int or token_id < 0 or not text:
            raise CheckpointError(
                f"{folder / 'added_tokens.json'}: {text!r} has the id {token_id!r}; download it again"
            )
        found[token_id] = AddedToken(text, is_special=False)
    return found | read_added_tokens(settings, folder)


def _piece_ids(model: SentencePieceProcessor) -> dict[str, int]:
    return {model.id_to_piece(token_id): token_id for token_id in range(model.get_piece_size())}


def _bytes(model: SentencePieceProcessor, added: Mapping[int, AddedToken]) -> dict[int, bytes]:
    table = {}
    for token_id in range(model.get_piece_size()):
        piece = model.id_to_piece(token_id)
        is_byte = model.is_byte(token_id)
        table[token_id] = bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(_SPACE, " ").encode()
    return table | {token_id: token.text.encode() for token_id, token in added.items()}
