"""Token ids to make prompts of."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def plain_token_ids(model: str) -> list[int]:
    """All ids of a model's vocabulary but those of added and special tokens."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    added = set(tokenizer.get_added_tokens_decoder())
    return [token for token in range(tokenizer.get_vocab_size(with_added_tokens=False)) if token not in added]
