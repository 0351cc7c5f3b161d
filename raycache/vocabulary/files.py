"""Which file of a model directory holds its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raycache.errors import CheckpointError
from raycache.vocabulary import sentencepiece_model, tekken_json, tiktoken_model, tokenizer_json
from raycache.vocabulary.base import Vocabulary
from raycache.vocabulary.sentencepiece_model import SentencePieceModel
from raycache.vocabulary.tekken_json import TekkenJson
from raycache.vocabulary.tiktoken_model import TiktokenModel
from raycache.vocabulary.tokenizer_json import TokenizerJson


def open_vocabulary(folder: Path, settings: Mapping[str, Any], *, is_optional: bool) -> Vocabulary:
    """Read the vocabulary of a model: tokenizer.json before the vendors' own files, which say less.

    Args:
        folder: of the model.
        settings: of its tokenizer_config.json.
        is_optional: without any file, one token per byte.
    Raises:
        CheckpointError: there is none, or it is damaged or of an unsupported kind.
    """
    if (folder / tokenizer_json.FILE).is_file():
        return TokenizerJson.load(folder)
    if (folder / tiktoken_model.FILE).is_file():
        return TiktokenModel(folder, settings)
    if (folder / tekken_json.FILE).is_file():
        return TekkenJson(folder)
    if (folder / sentencepiece_model.FILE).is_file():
        return SentencePieceModel(folder, settings)
    if is_optional:
        return TokenizerJson.plain_bytes()
    raise CheckpointError(
        f"{folder} has no tokenizer: expected {tokenizer_json.FILE}, {tiktoken_model.FILE}, {tekken_json.FILE} or "
        f"{sentencepiece_model.FILE}; download it with the model, or make {tokenizer_json.FILE} with "
        "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )
