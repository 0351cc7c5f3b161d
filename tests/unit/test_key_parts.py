"""How the keys of rows are divided into parts for programs of decode attention."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raycache.attention.key_parts import Division

BLOCK = 64


def spans(division: Division, lens: list[int], begins: list[int] | None = None) -> list[list[range]]:
    """Keys of each row's parts, as kernels find them."""
    given = np.array(lens, np.int32)
    firsts, rows = division.parts(given, None if begins is None else np.array(begins, np.int32))
    assert firsts.dtype == rows.dtype == np.int32 and len(rows) == division.most
    found: list[list[range]] = [[] for _ in lens]
    for part, row in enumerate(rows.tolist() if lens else []):
        begin, length, count = (begins or [0] * len(lens))[row], lens[row], int(firsts[row + 1] - firsts[row])
        part_len = math.ceil(math.ceil((length - begin) / division.block) / count) * division.block
        start = begin + (part - int(firsts[row])) * part_len
        span = range(start, max(min(start + part_len, length), start))
        if part < firsts[-1]:
            found[row].append(span)
        else:
            assert not span, "a part behind the last one has keys"
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_key_is_in_one_part(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lens = (2 ** generator.uniform(0, 15, generator.integers(1, 70))).astype(int) - 1
    begins = (lens * generator.uniform(0, 1, len(lens))).astype(int) if seed % 2 else np.zeros_like(lens)
    division = Division(len(lens) + int(generator.integers(1, 100)), int(generator.integers(1, 70)), BLOCK)
    found = spans(division, lens.tolist(), begins.tolist())
    for parts, begin, length in zip(found, begins.tolist(), lens.tolist(), strict=True):
        assert 1 <= len(parts) <= division.most_per_row
        assert [key for part in parts for key in part] == list(range(begin, length))


def test_rows_of_one_length_are_whole_where_they_are_as_many_as_programs() -> None:
    assert all(len(parts) == 1 for parts in spans(Division(64 + 66, 64, BLOCK), [1043] * 64))
    assert all(len(parts) == 4 for parts in spans(Division(16 + 66, 64, BLOCK), [1043] * 16))


def test_a_long_row_among_short_ones_is_divided() -> None:
    """No part is longer than if all keys were divided evenly, but for a block."""
    lens = [32_000, *[500] * 63]
    found = spans(Division(64 + 66, 64, BLOCK), lens)
    longest = max(len(part) for parts in found for part in parts)
    assert longest <= sum(lens) / 66 + 2 * BLOCK
    assert [len(parts) for parts in found[1:]] == [1] * 63


def test_no_row_and_rows_without_keys() -> None:
    assert spans(Division(4, 64, BLOCK), []) == []
    assert spans(Division(4, 64, BLOCK), [0, 0, 5]) == [[range(0)], [range(0)], [range(5)]]
