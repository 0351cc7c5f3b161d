"""The end token that a tokenizer names, for checkpoints whose configs do not have it.

Chat models end their answers with a token such as <|im_end|>. Some name it in generation_config.json, some in
config.json and some as the tokenizer's `eos_token` only; whatever is named anywhere ends an output.
"""

from __future__ import annotations

from pathlib import Path

from raycache.vocabulary.base import named_tokens, read_added_tokens, read_json, read_settings


def end_token_id(folder: Path) -> int | None:
    """Id of the tokenizer's `eos_token`, or None where the files do not say.

    Reads tokenizer.json only if tokenizer_config.json has no ids.

    Raises:
        CheckpointError: a file is damaged.
    """
    settings = read_settings(folder)
    text = named_tokens(settings).get("eos_token")
    if text is None:
        return None
    for token_id, token in read_added_tokens(settings, folder).items():
        if token.text == text:
            return token_id
    entries = read_json(folder / "tokenizer.json").get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"content": str(content), "id": int(token_id)} if content == text:
                return token_id
    return None
