"""tekken.json (Mistral), compared with transformers' conversion of the same file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mistral.tokenizer import MistralConverter

from raycache.api.tokenizer import Tokenizer
from raycache.errors import CheckpointError
from tests.oracle import tiny_kimi

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def written(folder: Path, **changes: Any) -> Path:
    ranks = tiny_kimi.write(folder / "ranks")
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": piece.decode(errors="replace")}
        for piece, rank in ranks.items()
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    config = {"pattern": PATTERN, "default_vocab_size": 500, "default_num_special_tokens": 20, "version": "v11"}
    values = {"config": config, "vocab": vocab, "special_tokens": special, **changes}
    (folder / "tekken.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tekken"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def converted(folder: Path) -> Any:
    return MistralConverter(str(folder / "tekken.json")).converted()


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.text(st.sampled_from("the dog12é東🎉 \n\tABC's"), max_size=20),
            st.sampled_from([*SPECIAL, *tiny_kimi.TEXTS]),
        ),
        max_size=5,
    )
)
def test_ids_are_those_of_transformers(tokenizer: Tokenizer, converted: Any, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == converted.encode(text).ids
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_begin_after_the_special_tokens_and_end_at_the_vocabulary_s_size(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (500, 1, 2)
    assert tokenizer.encode("<SPECIAL_7>", add_special_tokens=False) == [7]
    assert tokenizer.decode([7, 3, 1000]) == ""
    assert tokenizer.description == "tekken.json (tiktoken BPE)"


def test_early_files_without_special_tokens_have_the_ones_of_that_time(tmp_path: Path) -> None:
    tokenizer = Tokenizer(written(tmp_path, special_tokens=None))
    assert tokenizer.encode("<s>[INST][TOOL_CONTENT]</s>", add_special_tokens=False) == [1, 3, 19, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {}},
        {"config": {"pattern": PATTERN, "default_vocab_size": 5000, "default_num_special_tokens": 20}},
        {"config": {"pattern": "(", "default_vocab_size": 500, "default_num_special_tokens": 20}},
        {"config": {"pattern": PATTERN, "default_vocab_size": 500, "default_num_special_tokens": 2}},
        {"vocab": [{"rank": 0, "token_bytes": "!"}]},
        {"vocab": []},
        {"vocab": 7},
        {"special_tokens": [{"rank": 0}]},
    ],
    ids=range(8),
)
def test_damaged_files_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"tekken.json is damaged or of a newer format"):
        Tokenizer(written(tmp_path, **changes))
