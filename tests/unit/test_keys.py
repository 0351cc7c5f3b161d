"""Content keys: chains, coordinates, boxes and the longest stored prefix."""

import hashlib
import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.cache.keys import (
    KEY_BYTES,
    Identity,
    PageChain,
    digests_in,
    longest_stored,
    object_keys,
    page_chain,
    row_format,
    stored_boxes,
)
from raycache.memory.box import Box, cover
from raycache.memory.component import CacheFormat, kv, latent

BF16 = CacheFormat("bfloat16")
MODEL = Identity("llama-8b:1f00", page_size=4)


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def chain(tokens: list[int], identity: Identity = MODEL) -> list[bytes]:
    return PageChain(identity).digests(packed(tokens))


def test_a_digest_is_sha256_of_the_one_before_and_the_page() -> None:
    expected, digest = [], MODEL.seed()
    for first in range(0, 12, 4):
        digest = hashlib.sha256(digest + packed(list(range(first, first + 4)))).digest()
        expected.append(digest)
    assert chain(list(range(14))) == expected


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_that_grows_equals_one_computed_at_once(tokens: list[int], cuts: list[int]) -> None:
    growing = PageChain(MODEL)
    for cut in sorted(cuts):
        growing.digests(bytearray(packed(tokens[:cut])))
    known = chain(tokens[: min(cuts, default=0)])
    assert growing.digests(packed(tokens)) == chain(tokens)
    assert PageChain(MODEL, known=known).digests(packed(tokens)) == chain(tokens)


@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=24), at=st.integers(0, 23), by=st.integers(1, 9))
def test_a_changed_token_changes_its_page_and_all_after_it(tokens: list[int], at: int, by: int) -> None:
    at %= len(tokens)
    changed = [token + by * (i == at) for i, token in enumerate(tokens)]
    for page, (before, after) in enumerate(zip(chain(tokens), chain(changed), strict=True)):
        assert (before == after) == (page < at // 4)


@given(tokens=st.lists(st.integers(0, 9), max_size=24), at=st.integers(0, 3), by=st.integers(1, 9))
def test_digests_come_with_a_prompt_of_the_same_identity_and_last_page(tokens: list[int], at: int, by: int) -> None:
    whole = len(tokens) // 4 * 4
    sent = page_chain(MODEL, packed(tokens))
    assert sent == b"".join([MODEL.seed(), *chain(tokens)])

    def taken(of: list[int], sent: bytes = sent, identity: Identity = MODEL) -> bytes:
        return digests_in(sent, packed(of), seed=identity.seed(), page_size=4)

    assert taken(tokens) == taken(tokens[:whole]) == b"".join(chain(tokens))
    assert not taken(tokens, identity=Identity(MODEL.weights, page_size=4, salt="a"))
    assert not taken(tokens, b"") and not taken(tokens, sent[:-1]) and not taken([*tokens, 1, 2, 3, 4])
    if whole:
        other = [token + by * (i == whole - 4 + at) for i, token in enumerate(tokens)]
        assert not taken(other) and not taken(tokens[: whole - 1])


def test_no_two_identities_share_a_digest() -> None:
    identities = [
        MODEL,
        Identity("llama-8b:1f01", page_size=4),
        Identity("llama-8b:1f00", page_size=8),
        Identity("llama-8b:1f00", page_size=4, adapter="a"),
        Identity("llama-8b:1f00", page_size=4, salt="a"),
        Identity("llama-8b:1f00", page_size=4, adapter="a", salt="a"),
        Identity("llama-8b:1f00", page_size=4, salt="aa"),
        Identity("llama-8b:1f00a", page_size=4, salt="a"),
    ]
    digests = [digest for identity in identities for digest in chain(list(range(16)), identity)]
    assert len(set(digests)) == len(digests) == 4 * len(identities) - 2


def test_keys_tell_rows_and_boxes_apart_and_nothing_else() -> None:
    digests = chain(list(range(8)))
    rows = [
        row_format(kv("full", [0, 1], heads=4, dim=8, fmt=BF16)),
        row_format(kv("full", [0, 1], heads=4, dim=8, fmt=CacheFormat("float16"))),
        row_format(kv("full", [0, 1], heads=4, dim=16, fmt=BF16)),
        row_format(kv("full", [0, 1], heads=4, dim=8, fmt=BF16, window=7)),
        row_format(kv("draft", [0, 1], heads=4, dim=8, fmt=BF16)),
        row_format(latent([0, 1], rank=128, rope_dim=8, fmt=BF16)),
        row_format(latent([0, 1], rank=128, rope_dim=8, fmt=CacheFormat("bfloat16", has_fp8_latent=True))),
    ]
    assert rows[0] == row_format(kv("full", [3, 7], heads=4, dim=8, fmt=BF16))
    boxes = [Box(0, 2, 0, 4, 0, 4), Box(0, 1, 0, 4, 0, 4), Box(0, 2, 0, 2, 0, 4), Box(0, 2, 0, 4, 0, 2)]
    keys = [key for row in rows for box in boxes for key in object_keys(digests, rows=row, box=box)]
    assert len(set(keys)) == len(rows) * len(boxes) * 2
    assert {len(key) for key in keys} == {KEY_BYTES}
    suffixes = [key[-24:] for key in keys]
    assert set(stored_boxes(suffixes, rows=rows[0], whole=boxes[0])) == set(boxes)
    assert stored_boxes(suffixes, rows=rows[0], whole=boxes[0])[0] == boxes[0]


def test_suffixes_that_are_none_of_ours_name_no_boxes() -> None:
    whole, rows = Box(0, 2, 0, 4, 0, 4), row_format(kv("full", [0, 1], heads=4, dim=8, fmt=BF16))
    right = rows + whole.packed()
    beyond, empty = Box(0, 65535, 0, 4, 0, 4).packed(), bytes(12)
    suffixes = [b"", rows, right + b"x", right[1:], bytes(12) + whole.packed(), rows + beyond, rows + empty]
    assert stored_boxes(suffixes, rows=rows, whole=whole) == []
    assert stored_boxes([*suffixes, right], rows=rows, whole=whole) == [whole]


def test_a_box_without_anything_in_it_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Box(0, 0, 0, 4, 0, 1)


def pieces(shape: tuple[int, int, int], parts: tuple[int, int, int]) -> list[Box]:
    """`shape` cut into equal parts along layers, tokens and heads."""
    cuts = [[(n * i // p, n * (i + 1) // p) for i in range(p)] for n, p in zip(shape, parts, strict=True)]
    return [Box(*itertools.chain(*bounds)) for bounds in itertools.product(*cuts)]


SPLITS = st.sampled_from(list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4))))


@given(written=SPLITS, read=SPLITS, seed=st.integers(0, 2**16))
def test_what_one_split_wrote_fills_the_boxes_of_any_other(
    written: tuple[int, int, int], read: tuple[int, int, int], seed: int
) -> None:
    shape = (6, 8, 4)
    page = np.random.default_rng(seed).integers(0, 1 << 30, shape)
    whole = Box(0, 6, 0, 8, 0, 4)
    stored = {box: page[box.within(whole)].copy() for box in pieces(shape, written)}
    for wanted in pieces(shape, read):
        filled = np.full(wanted.shape, -1)
        for box, part in cover(wanted, stored):
            assert (filled[part.within(wanted)] == -1).all()  # nothing is fetched twice
            filled[part.within(wanted)] = stored[box][part.within(box)]
        np.testing.assert_array_equal(filled, page[wanted.within(whole)])


@given(written=SPLITS, lost=st.integers(0, 1000))
def test_a_box_with_a_hole_is_not_filled(written: tuple[int, int, int], lost: int) -> None:
    stored = pieces((6, 8, 4), written)
    hole = stored.pop(lost % len(stored))
    assert cover(Box(0, 6, 0, 8, 0, 4), stored) == []
    assert all(cover(box, stored) == [(box, box)] for box in stored)
    assert cover(hole, stored) == []


@given(num_pages=st.integers(0, 3000), stored=st.integers(0, 3000))
def test_the_longest_stored_prefix_is_found_in_few_questions(num_pages: int, stored: int) -> None:
    asked: list[int] = []

    def has(pages: list[int]) -> list[bool]:
        assert all(0 <= page < num_pages for page in pages)
        asked.append(len(pages))
        return [page < stored for page in pages]

    assert longest_stored(num_pages, has) == min(num_pages, stored)
    assert len(asked) <= 1 + 4
    assert sum(asked) <= 12 + 4 * 7
