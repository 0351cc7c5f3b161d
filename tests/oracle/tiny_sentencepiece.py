"""Small SentencePiece models, trained here, in the directories of models that have no tokenizer.json."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from tests.oracle.tiny_kimi import TEXTS

LLAMA: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "add_eos_token": False,
    "legacy": False,
}


def write(folder: Path, *, settings: dict[str, Any] | None = None, **training: Any) -> bytes:
    """Train as Llama and Mistral do but for what `training` says, and write the files; returns the model's."""
    given: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.98,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        "num_threads": 1,
        **training,
    }
    written = io.BytesIO()
    SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 2), model_writer=written, **given)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA if settings is None else settings))
    return written.getvalue()
