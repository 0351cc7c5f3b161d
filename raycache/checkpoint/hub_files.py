"""Files of a repository to download: configuration, tokenizer, and the safetensors files listed in the index.

Pickled weights, other formats, Python files and copies of the weights in subfolders are never downloaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from raycache.checkpoint.tensor_files import INDEX, SINGLE, read_index, why_no_weights
from raycache.errors import CheckpointError

_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
)


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Attributes:
        name: path in the repository.
        size: bytes; None if unknown.
        digest: SHA-256 of the content, or its git blob SHA-1, in hex; "" if unknown.
    """

    name: str
    size: int | None = None
    digest: str = ""

    def is_at(self, path: Path) -> bool:
        """Whether there is a file of this size at a path."""
        return path.is_file() and self.size in (None, path.stat().st_size)

    def has_content_of(self, path: Path) -> bool:
        """Whether the file at a path has this content, if the digest is known."""
        if not self.digest:
            return self.is_at(path)
        with path.open("rb") as file:
            if len(self.digest) == hashlib.sha256().digest_size * 2:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.digest
            blob = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
            return hashlib.file_digest(file, lambda: blob).hexdigest() == self.digest


def descriptions(names: Iterable[str]) -> list[str]:
    """The configuration and tokenizer files of a repository."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in _DESCRIPTIONS))


def weight_names(folder: Path, names: Iterable[str], *, model: str) -> list[str]:
    """The safetensors files of a repository that hold its weights.

    Args:
        folder: with its index, if it has one.
        names: of all its files.
        model: its name, for messages.
    Raises:
        CheckpointError: it has none, or its index is damaged.
    """
    known = set(names)
    if SINGLE in known:
        return [SINGLE]
    if INDEX not in known:
        raise CheckpointError(why_no_weights(model, sorted(known)))
    named = sorted(set(read_index(folder / INDEX).values()))
    if wrong := [name for name in named if not name.endswith(".safetensors") or name not in known]:
        raise CheckpointError(f"the {INDEX} of {model} lists {wrong[0]}, which is not one of its safetensors files")
    return named
