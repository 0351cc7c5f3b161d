"""Digests of the prefixes of prompts: enough to say that a prompt was seen after its tokens have been given up.

Prefixes end at fixed lengths, each at most half longer than the one before, so there are few of a long prompt:

    512 1024 1536 2048 3072 4096 6144 8192 12288 ...

Nothing is hashed here: the digests of pages come with prompts, made where those were tokenised
(raycache/cache/keys.py), and depend on the cache salt. Their first 8 bytes lie in a table of fixed size. Each has one
place in it, where the last one stays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple

BLOCK = 512
"""Tokens, at least, of the shortest prefix."""
_DIGEST_WORDS = 4
_PLACE_BYTES = 16
_MOST_BLOCKS = 4096
_FINE = 4
"""Blocks up to which each ends a prefix; then every second one, behind twice as many every fourth, ..."""


class Prefix(NamedTuple):
    """The beginning of a prompt.

    Attributes:
        length: its tokens; 0: none was seen.
        seen_s: when it was.
    """

    length: int
    seen_s: float


NOT_SEEN = Prefix(0, 0.0)


class SeenPrefixes:
    """When prefixes were seen last.

    Args:
        max_bytes: of the table.
        page_size: tokens of a page.
    """

    def __init__(self, max_bytes: int, *, page_size: int) -> None:
        places = 1 << max(1, max_bytes // _PLACE_BYTES).bit_length() - 1
        self._table = array("Q", bytes(_PLACE_BYTES * places))  # digest, milliseconds, digest, ...
        self._mask = 2 * places - 2
        block = -(-BLOCK // page_size)
        self._ends = [end * block * page_size for end in _ends()]
        self._words = [end * block * _DIGEST_WORDS for end in _ends()]  # where their digests begin in a chain

    def add(self, chain: bytes, *, prompt_len: int, now: float, known: int, behind: int) -> Prefix:
        """Find the longest prefix that was seen, then note those of this prompt.

        Args:
            chain: `GenerateRequest.page_chain` of the prompt: a seed, then the digests of its pages.
            now: seconds.
            known: tokens of the prompt that are in the history; prefixes up to there are neither looked for nor noted.
            behind: only prefixes with more tokens are looked for.
        """
        ends, table, now_ms = self._ends, self._table, int(1000 * now)
        first, stop = bisect_right(ends, known), bisect_right(ends, prompt_len)
        if first >= stop:
            return NOT_SEEN
        digests, seen, words, mask = memoryview(chain).cast("Q"), NOT_SEEN, self._words, self._mask
        for index in range(first, stop):
            digest = digests[words[index]]
            place = digest & mask
            if table[place] != digest:
                table[place] = digest
            elif ends[index] > behind:
                seen = Prefix(ends[index], table[place + 1] / 1000)
            table[place + 1] = now_ms
        return seen


def _ends() -> list[int]:
    """Blocks of the prefixes that are noted."""
    ends, step = list(range(1, _FINE + 1)), 2
    while ends[-1] < _MOST_BLOCKS:
        ends += range(ends[-1] + step, 2 * ends[-1] + 1, step)
        step *= 2
    return ends
