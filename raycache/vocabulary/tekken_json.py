"""tekken.json: the vocabulary of Mistral's newer models, byte pairs after a block of special tokens.

    id 0 ... S-1    special tokens; those that the file does not name are `<SPECIAL_ID>`
    id S ... V-1    the first V - S entries of `vocab`, by their rank

S is `default_num_special_tokens` and V `default_vocab_size`; further entries of `vocab` are not in use. Source: the
package mistral-common, whose format this is.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raycache.errors import CheckpointError
from raycache.vocabulary.base import AddedToken, TokenBytes, read_json
from raycache.vocabulary.byte_pairs import BytePairs

FILE = "tekken.json"

_EARLY = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files up to version 7, which may leave them out."""


class TekkenJson:
    """Vocabulary of a tekken.json; see `Vocabulary`.

    Args:
        folder: with the file.
    Raises:
        CheckpointError: it is damaged.
    """

    json_text = ""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        values = read_json(path)
        try:
            config = values["config"]
            added = _special_tokens(values, config["default_num_special_tokens"])
            ranks = _ranks(values["vocab"], first=len(added), size=config["default_vocab_size"])
            self._pairs = BytePairs(path.name, pattern=config["pattern"], ranks=ranks, added=added)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged or of a newer format ({error!r}); download it again") from error
        self.description = f"{FILE} (tiktoken BPE)"
        self.size = self._pairs.size
        self.pieces: TokenBytes = self._pairs.pieces
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.is_special)
        self.special_tokens: Mapping[str, str] = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        }
        self._bos = self.token_id("<s>")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode with <s> before the text."""
        ids = self._pairs.encode(text)
        return [self._bos, *ids] if add_special_tokens and self._bos is not None else ids

    def token_id(self, token: str) -> int | None:
        return self._pairs.token_id(token)


def _special_tokens(values: Mapping[str, Any], count: int) -> dict[int, AddedToken]:
    found = {token_id: AddedToken(f"<SPECIAL_{token_id}>") for token_id in range(count)}
    entries = values.get("special_tokens")
    if entries is None:
        named = {token_id: AddedToken(text) for token_id, text in enumerate(_EARLY)}
    else:
        named = {entry["rank"]: AddedToken(entry["token_str"], is_special=entry["is_control"]) for entry in entries}
    if not named.keys() <= found.keys():
        raise ValueError(f"special tokens have ranks up to {max(named)}, their number is {count}")
    return found | named


def _ranks(entries: list[Mapping[str, Any]], *, first: int, size: int) -> dict[bytes, int]:
    used = sorted(entries, key=lambda entry: int(entry["rank"]))[: size - first]
    ranks = {base64.b64decode(entry["token_bytes"], validate=True): first + entry["rank"] for entry in used}
    if [*ranks.values()] != [*range(first, size)] or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{len(ranks)} tokens for the ids from {first} to {size - 1}, or not all bytes among them")
    return ranks
