r"""The bytes that each token of a tokenizer.json stands for.

A tokenizer.json describes how tokens become text as a chain of decoders over the whole sequence. All chains in use for
language models act on each token alone, but for what happens at the very start of a text, so a token is a fixed byte
string and detokenising is joining bytes:

    ByteLevel                                     "Ġcaf" "Ã" "©"          -> b" caf" b"\xc3" b"\xa9"
    Replace "▁"->" ", ByteFallback, Fuse, Strip   "▁caf" "<0xC3>" "<0xA9>" -> b" caf" b"\xc3" b"\xa9"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from raycache.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class DecoderBytes:
    """`TokenBytes` of a tokenizer.json.

    Raises:
        CheckpointError: the tokenizer's decoder is of a kind that does not act on each token alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self._steps: list[Callable[[str], str]] = []
        self._to_bytes: Callable[[str], bytes] = _utf8
        self._first_drops = ""
        self.strip_start = 0
        if backend.decoder is None:  # without a decoder, tokens are words and are joined by spaces
            self._steps.append(lambda token: " " + token)
            self.strip_start = 1
            return
        self._read(json.loads(backend.decoder.__getstate__()))

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id, drop="")
        return found

    def at_start(self, token_id: int) -> bytes:
        return self._compute(token_id, drop=self._first_drops) if self._first_drops else self[token_id]

    def _compute(self, token_id: int, *, drop: str) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if drop:
            token = token.replace(drop, "")
        for step in self._steps:
            token = step(token)
        return self._to_bytes(token)

    def _read(self, decoder: Mapping[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": list(parts)}:
                for part in parts:
                    self._read(part)
            case {"type": "ByteLevel"}:
                self._to_bytes = _ByteLevel()
            case {"type": "ByteFallback"}:
                self._to_bytes = _byte_fallback
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._steps.append(lambda token: token.replace(old, new))
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._steps.append(lambda token: token.replace(mark, " "))
                self._first_drops = "" if decoder.get("prepend_scheme") == "never" else mark
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                self.strip_start = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise CheckpointError(
                    f"the decoder {json.dumps(decoder)} in tokenizer.json is not supported; supported are ByteLevel, "
                    "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip of leading spaces"
                )


class _ByteLevel:
    """Byte-level BPE: every byte is written as one printable character (GPT-2)."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = sorted(set(range(0x100)) - set(printable))
        self._byte_of = {chr(byte): byte for byte in printable}
        # The others are written as the characters from U+0100 on, in order.
        self._byte_of |= {chr(0x100 + position): byte for position, byte in enumerate(hidden)}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[char] for char in token])
        except KeyError:  # an added token is plain text
            return _utf8(token)


def _utf8(token: str) -> bytes:
    return token.encode("utf-8", errors="replace")


def _byte_fallback(token: str) -> bytes:
    found = _BYTE_TOKEN.match(token)
    return bytes([int(found[1], 16)]) if found else _utf8(token)
