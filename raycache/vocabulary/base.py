"""What every form of tokenizer offers, and what tokenizer_config.json says beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raycache.errors import CheckpointError

SETTINGS = "tokenizer_config.json"
"""What is said about a tokenizer beside its vocabulary."""

_LFS_POINTER = b"version https://git-lfs"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenBytes(Protocol):
    """Token id -> the bytes that the token stands for.

    Attributes:
        strip_start: leading spaces that are dropped from the start of a text.
    """

    strip_start: int

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token inside a text; empty for an id that the vocabulary does not know."""
        ...

    def at_start(self, token_id: int) -> bytes:
        """Bytes of a token that opens a text, before `strip_start` is applied."""
        ...


class Vocabulary(Protocol):
    """One tokenizer.

    Attributes:
        description: file and kind, for people, such as "tokenizer.json (BPE)".
        size: token ids lie in [0, size).
        pieces: token id -> bytes.
        special_ids: tokens that are marks such as <s> and not text.
        special_tokens: name -> text, such as "bos_token" -> "<s>", where tokenizer_config.json says nothing else.
        json_text: contents of tokenizer.json, or "" for another form.
    """

    description: str
    size: int
    pieces: TokenBytes
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]

    @property
    def json_text(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: without lone surrogates. Special tokens that are written out in it become their ids.
            add_special_tokens: put what the model expects around a text, such as <s>.
        """
        ...

    def token_id(self, token: str) -> int | None:
        """Id of a token given as it stands in the vocabulary, or None."""
        ...


class ByteTable:
    """`TokenBytes` that do not depend on where in a text a token stands.

    Args:
        table: token id -> bytes.
        strip_start: see `TokenBytes`.
    """

    def __init__(self, table: Mapping[int, bytes], *, strip_start: int = 0) -> None:
        self._table = table
        self.strip_start = strip_start

    def __getitem__(self, token_id: int) -> bytes:
        return self._table.get(token_id, b"")

    def at_start(self, token_id: int) -> bytes:
        return self[token_id]


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before anything else is.

    Attributes:
        text: as it is written.
        is_special: a mark and not text.
        strips_left, strips_right: white space beside it belongs to it.
    """

    text: str
    is_special: bool = True
    strips_left: bool = False
    strips_right: bool = False


def read_added_tokens(settings: Mapping[str, Any], folder: Path) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of a tokenizer_config.json; empty where it has none.

    Args:
        settings: the parsed file.
        folder: that it lies in, for messages.
    Raises:
        CheckpointError: an entry is malformed.
    """
    entries = settings.get("added_tokens_decoder") or {}
    found = {}
    try:
        for token_id, entry in entries.items():
            if not isinstance(entry["content"], str) or not entry["content"] or int(token_id) < 0:
                raise ValueError(f"entry {token_id} is {entry!r}")
            found[int(token_id)] = AddedToken(
                entry["content"],
                is_special=bool(entry.get("special", False)),
                strips_left=bool(entry.get("lstrip", False)),
                strips_right=bool(entry.get("rstrip", False)),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / SETTINGS} has a damaged added_tokens_decoder ({error!r}); download it again"
        ) from error
    return found


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens in a tokenizer_config.json, such as "bos_token" -> "<s>"."""
    found = {}
    for name in _NAMED:
        match settings.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
    return found


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the tokens that older directories name in special_tokens_map.json only.

    Raises:
        CheckpointError: a file is damaged.
    """
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / SETTINGS)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file.

    Raises:
        CheckpointError: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def read_file(path: Path) -> bytes:
    """All bytes of a vocabulary file.

    Raises:
        CheckpointError: it cannot be read, or stands for a file that git-lfs has not fetched.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if content.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file; run `git lfs pull` in {path.parent}")
    return content
