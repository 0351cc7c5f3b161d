"""tokenizer.model (SentencePiece), compared with sentencepiece itself and with transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from raycache.api.detokenize import Detokenizer
from raycache.api.tokenizer import Tokenizer
from raycache.errors import CheckpointError
from tests.oracle import tiny_sentencepiece
from tests.oracle.tiny_kimi import TEXTS
from tests.oracle.tiny_sentencepiece import LLAMA

KINDS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "unigram": {"model_type": "unigram"},
    "without prefix": {"add_dummy_prefix": False},
    "unknown characters": {"byte_fallback": False, "vocab_size": 200},
    "normalised": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "user symbols": {"user_defined_symbols": ["<start>", "\u2581\u2581", "ing"], "pad_id": 3},
}
_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the dog runs  12é東🎉\u2581\n\t")), max_size=40
).filter(lambda text: not any(mark in text for mark in ("<s>", "</s>", "<unk>", "<pad>")))
"""Without marks, which mean something else to sentencepiece; Hypothesis draws strings of imported modules as well."""
_WORDS = st.lists(st.sampled_from(["the dog", "x", "12 runs!", "日 Grüße", "<s>", "</s>", "<unk>"]), max_size=6)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_sentencepiece.write(folder, **KINDS[request.param])
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@settings(max_examples=150, deadline=None)
@given(text=_TEXT)
def test_ids_of_plain_text_are_those_of_sentencepiece(
    tokenizer: Tokenizer, model: SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == model.encode(text)
    assert tokenizer.encode(text, add_special_tokens=True) == [model.bos_id(), *ids]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_are_used_on_the_text_that_they_come_from(
    tokenizer: Tokenizer, model: SentencePieceProcessor, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == model.encode(text)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    joined = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    unknown = model.decode([model.unk_id()])
    assert joined.replace("<unk>", unknown) == model.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_of_any_ids_is_that_of_sentencepiece(
    tokenizer: Tokenizer, model: SentencePieceProcessor, data: st.DataObject
) -> None:
    marks = {i for i in range(model.get_piece_size()) if model.is_control(i) or model.is_unknown(i)}
    usual = st.integers(0, model.get_piece_size() - 1).filter(lambda token_id: token_id not in marks)
    ids = data.draw(st.lists(usual, max_size=20))
    # Both replace what is no UTF-8, once per byte or once per run of them.
    ours, theirs = (re.sub("\ufffd+", "\ufffd", text) for text in (tokenizer.decode(ids), model.decode(ids)))
    if model.normalize("  x") == "\u2581x":  # where it joins spaces, it keeps some that a text begins with
        ours, theirs = ours.lstrip(" "), theirs.lstrip(" ")
    assert ours == theirs
    detokenizer = Detokenizer(tokenizer)
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == tokenizer.decode(ids)


@pytest.fixture(scope="module", params=["first", "each", "with eos", "with added tokens"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    added = {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "430": {"content": "[INST]", "special": True},
    }
    changes: dict[str, dict[str, Any]] = {
        "first": {},
        "each": {"legacy": True},
        "with eos": {"add_bos_token": False, "add_eos_token": True},
        "with added tokens": {"added_tokens_decoder": added},
    }
    folder = tmp_path_factory.mktemp("both")
    tiny_sentencepiece.write(
        folder, settings={**LLAMA, **changes[request.param]}, hard_vocab_limit=True, vocab_size=430
    )
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=100, deadline=None)
@given(parts=_WORDS)
def test_special_tokens_are_handled_as_transformers_does(both: tuple[Tokenizer, Any], parts: list[str]) -> None:
    ours, theirs = both
    text = "".join(parts)
    for adds in (True, False):
        ids = ours.encode(text, add_special_tokens=adds)
        assert ids == theirs.encode(text, add_special_tokens=adds)
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)


def test_added_tokens_are_found_in_text(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    text = "<s>[INST] the dog[/INST]"
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert (ours.bos_id, ours.eos_id, ours.token_id("[INST]")) == (1, 2, theirs.get_vocab().get("[INST]"))


@pytest.mark.parametrize(
    "text", ["<start_of_turn>user\nthe dog runs  fast<end_of_turn>\n", "Grüße  東京", " dog", "a\tb"]
)
def test_gemma_s_settings_are_read_as_transformers_does(tmp_path: Path, text: str) -> None:
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    added = {str(token_id): {"content": mark, "special": True} for token_id, mark in enumerate(marks)}
    named = {f"{mark[1:4]}_token": mark for mark in marks[:4]}
    tiny_sentencepiece.write(
        tmp_path,
        settings={"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "added_tokens_decoder": added, **named},
        add_dummy_prefix=False,
        user_defined_symbols=marks[4:],
        **{f"{mark[1:4]}_piece": mark for mark in marks[:4]},
        **{f"{mark[1:4]}_id": token_id for token_id, mark in enumerate(marks[:4])},
    )
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (2, 1)


def test_older_files_name_added_tokens_and_the_model_names_its_own(tmp_path: Path) -> None:
    tiny_sentencepiece.write(tmp_path, settings={}, vocab_size=400, hard_vocab_limit=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 400, "<tool>": 402}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("<s><tool>", add_special_tokens=True) == [1, 1, 402]
    assert tokenizer.decode([1, 402, 401]) == "<tool>"
    assert (tokenizer.vocab_size, tokenizer.description) == (403, "tokenizer.model (SentencePiece)")
    with pytest.raises(CheckpointError, match="token 402 is '<tool>'"):
        tokenizer.check_fits(402)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": "400"}))
    with pytest.raises(CheckpointError, match="'<pad>' has the id '400'"):
        Tokenizer(tmp_path)


def test_white_space_beside_an_added_token_belongs_to_it_if_it_says_so(tmp_path: Path) -> None:
    added = {"420": {"content": "<l>", "lstrip": True, "special": True}, "421": {"content": "<r>", "rstrip": True}}
    tiny_sentencepiece.write(tmp_path, settings={**LLAMA, "added_tokens_decoder": added})
    tokenizer = Tokenizer(tmp_path)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert ids("x <l>") == ids("x<l>") != ids("x <r>")
    assert ids("<r> \n x") == ids("<r>x") != ids("<l> \n x")


@pytest.mark.parametrize(
    "content",
    [b"", b"not a model", b"IQ== 0\nIg== 1\n", b"version https://git-lfs.github.com/spec/v1\n"],
    ids=["empty", "garbage", "of tiktoken", "pointer"],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"tokenizer.model is (damaged or no SentencePiece model|a git-lfs pointer)"
    ):
        Tokenizer(tmp_path)


def test_a_half_downloaded_file_is_refused(tmp_path: Path) -> None:
    content = tiny_sentencepiece.write(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer(tmp_path)
