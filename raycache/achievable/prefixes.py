"""Identities of page prefixes: a 64-bit hash of each whole page and all tokens before it.

    page[i]   = sum of (token + 1) * key of its place in the page    a float product: exact below 2 ** 53
    prefix[i] = mix(start + sum of page[j] * key[j] for j <= i)      start: from the salt

Equal for equal prefixes within one process and unpredictable outside it, since the keys are drawn at random. It is made
for statistics: a thousand tokens take about a microsecond, and two prefixes that differ in one page only are taken for
the same one with a probability of 2 ** -29 (pages of 16 tokens). What is cached is found by other keys (cache/keys.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raycache.types import packed

Hashes = NDArray[np.uint64]
Tokens = NDArray[np.int32]
_EXACT_BITS, _TOKEN_BITS = 53, 20
_SHIFT, _FACTOR = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)
_FIRST_PAGES = 1024


_DIGEST_BYTES = 32


class Prefixes(NamedTuple):
    """The page prefixes of one sequence. A tuple, as there is one for each request.

    Attributes:
        hashes: one per whole page.
        end: what a continuation needs, for the source that made them.
    """

    hashes: Hashes
    end: np.uint64 | bytes


class PrefixSource(Protocol):
    """Identifies the page prefixes of sequences."""

    def of(self, prompt: Sequence[int] | Tokens, *, salt: str, chain: bytes) -> Prefixes:
        """Those of a prompt.

        Args:
            salt: equal prefixes under different salts differ.
            chain: its `GenerateRequest.page_chain`.
        """
        ...

    def extended(self, before: Prefixes, tokens: Sequence[int]) -> Prefixes:
        """Add the whole pages of the tokens that follow those of `before`."""
        ...


class ChainedDigests:
    """Takes what identifies the pages in the tiers: digests that were made where the prompt was tokenised.

    Args:
        extend: makes the digests of the whole pages of packed tokens, given the digest of the page before them.
    """

    def __init__(self, extend: Callable[[bytes, bytes], bytes]) -> None:
        self._extend = extend

    def of(self, prompt: Sequence[int] | Tokens, *, salt: str, chain: bytes) -> Prefixes:
        assert chain, "the prompt has no chain of digests"
        return Prefixes(_first_words(chain, first=1), chain[-_DIGEST_BYTES:])

    def extended(self, before: Prefixes, tokens: Sequence[int]) -> Prefixes:
        assert isinstance(before.end, bytes), "not made here"
        digests = self._extend(before.end, packed(tokens))
        if not digests:
            return before
        return Prefixes(np.concatenate((before.hashes, _first_words(digests))), digests[-_DIGEST_BYTES:])


def _first_words(digests: bytes, *, first: int = 0) -> Hashes:
    """The first 8 bytes of each digest from the one numbered `first`."""
    return np.frombuffer(digests, np.uint64)[first * _DIGEST_BYTES // 8 :: _DIGEST_BYTES // 8]


class PrefixHasher:
    """Hashes prefixes of one page size, where nobody else has.

    Args:
        seed: of the keys; None: unpredictable.
    """

    def __init__(self, page_size: int, *, seed: int | None = None) -> None:
        assert page_size > 0, "no pages"
        self.page_size = page_size
        self._draw = np.random.default_rng(seed)
        key_bits = _EXACT_BITS - _TOKEN_BITS - (page_size - 1).bit_length()
        self._in_page = self._draw.integers(1, 2**key_bits, page_size).astype(np.float64)
        self._of_ones = np.uint64(self._in_page.sum())
        self._of_page = np.empty(0, np.uint64)
        self._numbers = np.empty(0, np.float64)

    def of(self, prompt: Sequence[int] | Tokens, *, salt: str = "", chain: bytes = b"") -> Prefixes:
        return self.extended(Prefixes(np.empty(0, np.uint64), np.uint64(hash(salt) % 2**64)), prompt)

    def extended(self, before: Prefixes, tokens: Sequence[int] | Tokens) -> Prefixes:
        assert isinstance(before.end, np.uint64), "not made here"
        size, first = self.page_size, len(before.hashes)
        array = np.asarray(tokens, dtype=np.int32)
        num_pages = len(array) // size
        if num_pages == 0:
            return before
        numbers, keys = self._room(num_pages, first)
        numbers[:] = array[: num_pages * size]
        sums: Hashes = (numbers.reshape(num_pages, size) @ self._in_page).astype(np.uint64)
        sums += self._of_ones  # so that no page counts nothing
        sums *= keys
        sums[:1] += before.end
        np.cumsum(sums, out=sums)
        hashes = sums >> _SHIFT
        hashes ^= sums
        hashes *= _FACTOR
        end: np.uint64 = sums[-1]
        return Prefixes(np.concatenate((before.hashes, hashes)) if first else hashes, end)

    def _room(self, num_pages: int, first: int) -> tuple[NDArray[np.float64], Hashes]:
        """A buffer for the tokens of some pages, and the keys of these pages."""
        if num_pages * self.page_size > len(self._numbers):
            self._numbers = np.empty(max(num_pages, _FIRST_PAGES) * self.page_size)
        if (end := first + num_pages) > len(self._of_page):
            more = self._draw.integers(0, 2**63, max(end, _FIRST_PAGES), dtype=np.uint64)
            self._of_page = np.concatenate((self._of_page, 2 * more + np.uint64(1)))
        return self._numbers[: num_pages * self.page_size], self._of_page[first:end]
