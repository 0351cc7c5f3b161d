"""Reads a long prompt of token ids from a JSON body, while it arrives, without making a Python integer of each.

The list is cut out of the body and read with numpy; the rest is parsed with a string in its place:

    {"model": "m", "prompt": [15, 2048, 7], "n": 1}   ->   {"model": "m", "prompt": "3f9c...", "n": 1}

The result is that of `parse_json`, but for the type of the list. Whatever is not the usual form goes to `parse_json`,
which also says what is wrong with it: another place of the list, other numbers, other white space.
"""

from __future__ import annotations

import re
import uuid
from array import array
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from raycache.api.schema import parse_json

PIECE_BYTES = 64 * 1024
"""Read at a time, up to half more: its arrays stay in the caches, and their memory is reused."""
_LEAST_BYTES = 16 * 1024  # shorter lists are read as fast by the parser
_LIST = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*\[')
_LONGEST = 7  # digits, which fit in an unsigned integer of 64 bits with the byte before them
_ZERO = np.uint8(ord("0"))


class _At(Enum):
    """Where in the body the next part begins."""

    HEAD = "before the list"
    IDS = "within the list"
    TAIL = "behind the list"
    OTHER = "the body is left to the parser"


class CompletionReader:
    """Reads the body of a request of /v1/completions; a long list of token ids as `prompt` becomes an `array("i")`.

    reader = CompletionReader()
    for part in parts:
        reader.feed(part)
    values = reader.values()

    Attributes:
        num_bytes: received so far.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = _At.HEAD
        self._head = b""  # of the body, before the list
        self._tail: list[bytes] = []  # behind it
        self._unread = b""  # of the list
        self._separator = b""  # of its numbers
        self._ids = array("i")
        self.num_bytes = 0

    @property
    def num_text_bytes(self) -> int:
        """Bytes that are left to the parser."""
        if self._at is not _At.TAIL:
            return self.num_bytes
        return len(self._head) + sum(map(len, self._tail))

    def feed(self, part: bytes) -> None:
        """Take the next part of the body, of any size; a large one is read in pieces of `PIECE_BYTES`."""
        self._parts.append(part)
        self.num_bytes += len(part)
        if self._at is _At.HEAD:
            if (found := _LIST.search(part)) is None:  # one that is divided between parts is left to the parser
                return
            self._head = b"".join((*self._parts[:-1], part[: found.end() - 1]))
            self._at, part = _At.IDS, part[found.end() :]
        if self._at is _At.IDS:
            self._feed_ids(part)
        elif self._at is _At.TAIL:
            self._tail.append(part)

    def values(self) -> dict[str, Any]:
        """The fields of the whole body.

        Raises:
            RequestError: as `parse_json` does.
        """
        if self._at is _At.TAIL:
            stand_in = uuid.uuid4().hex  # unpredictable, so that it cannot be in the body
            try:
                rest = b'%b"%b"%b' % (self._head, stand_in.encode(), b"".join(self._tail))
                values = from_json(rest, allow_inf_nan=False)
            except ValueError:
                values = None
            # It is elsewhere if the list was in another object, in a key with a quotation mark, or one of several.
            if isinstance(values, dict) and values.get("prompt") == stand_in:
                return {**values, "prompt": self._ids}
        return parse_json(b"".join(self._parts), example='{"model": "...", "prompt": "..."}')

    def _feed_ids(self, part: bytes) -> None:
        """Read the numbers that are complete, once they are many enough or the list ends."""
        text = self._unread + part
        end = text.find(b"]")
        if end < 0 and len(text) < _LEAST_BYTES:
            self._unread = text
            return
        if not self._separator:  # these are the first ones
            if 0 <= end < _LEAST_BYTES:
                self._at = _At.OTHER
                return
            self._separator = b", " if text.find(b", ", 0, _LONGEST + 2) >= 0 else b","
            text = self._separator + text
            end = text.find(b"]")
        stop = end if end >= 0 else text.rfind(b",")
        if not self._read(text, stop):
            self._at = _At.OTHER
        elif end >= 0:
            self._at, self._unread, self._tail = _At.TAIL, b"", [text[end + 1 :]]
        else:
            self._unread = text[stop:]

    def _read(self, text: bytes, stop: int) -> bool:
        """Read the numbers in text[:stop], each with the separator before it; False if there is anything else."""
        start = 0
        while start < stop:
            is_last = stop - start <= PIECE_BYTES + PIECE_BYTES // 2
            end = stop if is_last else text.find(b",", start + PIECE_BYTES, stop)
            end = stop if end < 0 else end
            is_usual = end - start <= 2 * PIECE_BYTES  # commas are near; otherwise the arrays could become large
            if not is_usual or (ids := _read_piece(text[start:end], self._separator)) is None:
                return False
            self._ids.frombytes(ids.tobytes())
            start = end
        return stop > 0


def _read_piece(text: bytes, separator: bytes) -> NDArray[np.int32] | None:
    """Numbers of at most `_LONGEST` digits with the separator, a comma or a comma and a space, before each.

    Returns:
        None if there is anything else, such as a sign, leading zeros, or nothing.
    """
    gap = len(separator)
    padded = text + b"," + bytes(_LONGEST)  # a comma behind each number, and 8 bytes from where each begins
    chars = np.frombuffer(padded, np.uint8)
    commas = np.flatnonzero(chars == ord(","))
    before, ends = commas[:-1], commas[1:]
    num_digits = np.count_nonzero(chars - _ZERO <= 9)
    lens = ends - before
    lens -= gap
    if num_digits + gap * len(lens) != len(text) or not len(lens) or lens.min() < 1 or lens.max() > _LONGEST:
        return None
    # The last byte of the separator and 7 bytes from the number on, the first one lowest.
    words = np.ndarray(len(text) + 1, "<u8", padded, strides=(1,))[before + (gap - 1)]
    if (words.astype(np.uint8) != separator[-1]).any():
        return None
    words >>= np.uint64(8)
    if ((words.astype(np.uint8) == _ZERO) & (lens > 1)).any():
        return None
    words <<= (8 * (8 - lens)).view(np.uint64)  # what stands behind the number is shifted out
    return _decimal(words)


def _decimal(words: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The numbers whose 8 digits are the bytes of each word, the first one lowest; a byte of 0 is a leading zero.

    Neighbours are joined in three steps: to two digits, then to four, then to eight. Changes `words`.
    """
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    words *= np.uint64(10 * 2**8 + 1)
    words >>= np.uint64(8)
    words &= np.uint64(0x00FF00FF00FF00FF)
    words *= np.uint64(100 * 2**16 + 1)
    words >>= np.uint64(16)
    words &= np.uint64(0x0000FFFF0000FFFF)
    words *= np.uint64(10_000 * 2**32 + 1)
    words >>= np.uint64(32)
    return words.astype(np.int32)
