"""tiktoken.model (Kimi, Moonlight): ids, special tokens, long texts, and files that are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycache.api.chat import ChatTemplate
from raycache.api.detokenize import Detokenizer
from raycache.api.tokenizer import Tokenizer
from raycache.errors import CheckpointError
from raycache.vocabulary.byte_pairs import MAX_RUN_CHARS, bounded_runs
from raycache.vocabulary.tiktoken_model import PATTERN
from tests.oracle import tiny_kimi

_TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("aBé's'T 中文東ー한ñ\u0301🎉👩‍👧\u200d\n\r\t  12٣\u3000。ǅʰ々〇"),
    ),
    max_size=40,
).filter(lambda text: not any(added in text for added in (*tiny_kimi.SPECIAL.values(), *tiny_kimi.PLAIN.values())))
"""Without added tokens; Hypothesis draws strings of imported modules as well."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    tiny_kimi.write(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    return tiny_kimi.write(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@settings(max_examples=400, deadline=None)
@given(text=_TEXT)
@example("中文English混合")
@example("it'S \u017f'\u017f   x\n\n  y  ")
def test_ids_are_those_of_a_slow_encoder(tokenizer: Tokenizer, ranks: dict[bytes, int], text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == tiny_kimi.encode(text, ranks)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", tiny_kimi.TEXTS, ids=range(len(tiny_kimi.TEXTS)))
def test_merges_are_used_on_the_text_that_they_come_from(
    tokenizer: Tokenizer, ranks: dict[bytes, int], text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == tiny_kimi.encode(text, ranks)
    assert len(ids) < len(text.encode()) / 1.5
    detokenizer = Detokenizer(tokenizer)
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == text


def test_runs_of_han_are_words_of_their_own(tokenizer: Tokenizer) -> None:
    # Without that alternative of the expression, the letters beside them would join.
    first = tokenizer.encode("中文English混合", add_special_tokens=False)
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in ("中文", "English", "混合")]
    assert first == [*itertools.chain.from_iterable(parts)]


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(_TEXT, st.sampled_from([*tiny_kimi.SPECIAL.values(), "<think>"])), max_size=6))
def test_special_tokens_in_a_text_are_found_as_tiktoken_finds_them(
    tokenizer: Tokenizer, ranks: dict[bytes, int], parts: list[str]
) -> None:
    named = {place + len(ranks): text for place, text in (tiny_kimi.SPECIAL | tiny_kimi.PLAIN).items()}
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)}
    vendor = tiktoken.Encoding("vendor", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    text = "".join(parts)
    assert tokenizer.encode(text, add_special_tokens=False) == vendor.encode(text, allowed_special="all")


def test_marks_are_hidden_and_added_text_is_shown(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    first = len(ranks)
    text = "<|im_user|>hi<think>so</think>[EOS]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == "hi<think>so</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.token_id("<think>")) == (first, first + 1, first + 6)
    assert tokenizer.encode(f"<|reserved_token_{first + 200}|>", add_special_tokens=False) == [first + 200]
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.description == "tiktoken.model (tiktoken BPE)"


def test_a_chat_is_rendered_with_the_template_beside_it(tokenizer: Tokenizer, ranks: dict[bytes, int]) -> None:
    text = ChatTemplate.load(tokenizer).render([{"role": "user", "content": "hi"}])
    assert text == "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    first = len(ranks)
    assert tokenizer.encode(text, add_special_tokens=False)[0] == first + 3


@pytest.mark.parametrize(
    "text",
    [
        "x" * 70_001,
        " " * 70_001,
        "中" * 60_000 + " \t" * 40_000,
        "word " * 90_000,
        "a" * 399_990 + " b" * 30_000 + "\u3000" * 25_001,
    ],
    ids=["one word", "spaces", "han and spaces", "many words", "across the limit"],
)
def test_long_texts_are_cut_where_the_vendor_cuts_them(tokenizer: Tokenizer, text: str) -> None:
    cuts = [*bounded_runs(text)]
    assert "".join(cuts) == text
    assert cuts == naive_cuts(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [i for part in cuts for i in tokenizer.encode(part, add_special_tokens=False)]
    assert tokenizer.decode(ids) == text


def naive_cuts(text: str) -> list[str]:
    """400,000 characters at a time; in each, runs of white space or of other characters end after 25,000."""
    parts: list[list[str]] = []
    for begin in range(0, len(text), 400_000):
        parts.append([])
        for _, run in itertools.groupby(text[begin : begin + 400_000], str.isspace):
            for place, char in enumerate(run):
                if place and place % 25_000 == 0:
                    parts.append([])
                parts[-1].append(char)
    return ["".join(part) for part in parts]


def test_texts_without_long_runs_are_not_cut() -> None:
    assert [*bounded_runs("")] == [""]
    short = "x" * MAX_RUN_CHARS
    assert [*bounded_runs(f"{short} {short}")] == [f"{short} {short}"]


def test_files_that_are_damaged_are_refused(tmp_path: Path) -> None:
    tiny_kimi.write(tmp_path)
    path = tmp_path / "tiktoken.model"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for damaged, reason in [
        (b"".join([*lines[:9], b"!! 9\n", *lines[10:]]), "damaged in line 10"),
        (b"".join([*lines[:9], b"QUJD\n", *lines[10:]]), "damaged in line 10"),
        (b"".join(lines[:-5] + lines[-4:]), "must have the ranks from 0 on"),
        (b"".join(lines[1:]), "must have the ranks from 0 on"),
        (b"", "the 256 bytes must be among them"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=reason):
            Tokenizer(tmp_path)
    path.write_bytes(whole)
    settings_path = tmp_path / "tokenizer_config.json"
    given_settings = json.loads(settings_path.read_text())
    settings_path.write_text(json.dumps({**given_settings, "tokenizer_class": "QWenTokenizer"}))
    with pytest.raises(CheckpointError, match="'QWenTokenizer', which is not supported"):
        Tokenizer(tmp_path)
    settings_path.write_text(json.dumps({**given_settings, "added_tokens_decoder": {"600": {"special": True}}}))
    with pytest.raises(CheckpointError, match="damaged added_tokens_decoder"):
        Tokenizer(tmp_path)


def test_a_tokenizer_json_is_read_before_a_tiktoken_model(tmp_path: Path) -> None:
    from tests.oracle import tiny_tokenizers

    tiny_kimi.write(tmp_path)
    tiny_tokenizers.byte_level(tmp_path)
    assert Tokenizer(tmp_path).description == "tokenizer.json (BPE)"
