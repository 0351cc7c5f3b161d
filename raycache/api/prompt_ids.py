"""Reads a long prompt of token ids from a JSON body without making a Python integer of each.

The list is cut out of the body and read with numpy; the rest is parsed with a string in its place:

    {"model": "m", "prompt": [15, 2048, 7], "n": 1}   ->   {"model": "m", "prompt": "3f9c...", "n": 1}

The result is that of `parse_json`, but for the type of the list. Whatever is not the usual form goes to `parse_json`,
which also says what is wrong with it: another place of the list, other numbers, other white space.
"""

from __future__ import annotations

import re
import uuid
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from raycache.api.schema import parse_json

_LEAST_BYTES = 16 * 1024  # shorter lists are read as fast by the parser
_LIST = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*\[')
_LONGEST = 8  # digits, which fit in an unsigned integer of 64 bits
_PIECE_BYTES = 64 * 1024  # read at a time: its arrays stay in the caches, and their memory is reused


def parse_completion_json(body: bytes) -> dict[str, Any]:
    """Read the body of a request of /v1/completions; a long list of token ids as `prompt` becomes an `array("i")`.

    Raises:
        RequestError: as `parse_json` does.
    """
    found = _LIST.search(body) if len(body) >= _LEAST_BYTES else None
    if found is None:
        return parse_json(body)
    start, end = found.end(), body.find(b"]", found.end())
    if end - start < _LEAST_BYTES or (ids := read_ids(body, start, end)) is None:
        return parse_json(body)
    stand_in = uuid.uuid4().hex  # unpredictable, so that it cannot be in the body
    try:
        values = from_json(b'%b"%b"%b' % (body[: start - 1], stand_in.encode(), body[end + 1 :]), allow_inf_nan=False)
    except ValueError:
        return parse_json(body)
    # It is elsewhere if the list was in another object, in a key with a quotation mark, or one of several.
    if not isinstance(values, dict) or values.get("prompt") != stand_in:
        return parse_json(body)
    return {**values, "prompt": ids}


def read_ids(body: bytes, start: int, end: int) -> array[int] | None:
    """Numbers of at most 8 digits in body[start:end], separated all by a comma or all by a comma and a space.

    Returns:
        The numbers as an `array("i")`, or None if there is anything else, such as a sign, leading zeros, or nothing.
    """
    separator = b", " if body.find(b", ", start, start + _LONGEST + 2) >= 0 else b","
    ids, lead = array("i"), separator
    while start < end or lead:  # piece by piece, each with the separators before its numbers
        stop = body.find(b",", start + _PIECE_BYTES, end)
        stop = end if stop < 0 else stop
        is_usual = stop - start < 2 * _PIECE_BYTES  # commas are near; otherwise the arrays could become large
        piece = _read_piece(lead + body[start:stop], gap=len(separator)) if is_usual else None
        if piece is None:
            return None
        ids.frombytes(piece.tobytes())
        start, lead = stop, b""
    return ids


def _read_piece(text: bytes, *, gap: int) -> NDArray[np.int32] | None:
    """Numbers with a comma, or a comma and a space, before each: `gap` bytes; None as in `read_ids`."""
    padded = b"0" * _LONGEST + text + b","  # so that each number has a comma behind it and 8 bytes before its end
    chars = np.frombuffer(padded, np.uint8)
    commas = np.flatnonzero(chars == ord(","))
    before, ends = commas[:-1], commas[1:]
    num_digits = np.count_nonzero(chars - np.uint8(ord("0")) <= 9)
    is_spaced = gap == 1 or bool((chars[before + 1] == ord(" ")).all())
    if not is_spaced or num_digits + gap * len(ends) + 1 != len(chars):
        return None
    lens = ends - before
    lens -= gap
    if lens.min() < 1 or lens.max() > _LONGEST:
        return None
    windows = np.ndarray(len(chars) - 7, "<u8", padded, strides=(1,))  # 8 bytes from each; the first one is the lowest
    words = windows[ends - _LONGEST]
    num_before = (8 * (_LONGEST - lens)).view(np.uint64)  # bits of what stands before the number
    words >>= num_before
    if ((words.astype(np.uint8) == ord("0")) & (lens > 1)).any():
        return None
    words <<= num_before
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
