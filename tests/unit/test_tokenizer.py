"""Tokenizers beside the model that they belong to: end tokens from every file, and vocabularies that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from launch.doctor.check import Outcome
from launch.doctor.command import examine
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.errors import CheckpointError
from raycache.llm import LLM
from raycache.models.base import read_config
from raycache.types import FinishReason, SamplingParams
from tests.oracle import tiny_kimi, tiny_sentencepiece
from tests.oracle.tiny import make_tiny
from tests.oracle.tiny_tokenizers import byte_level

VOCAB = 403  # of the model; the tokenizer has 400 tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return byte_level(make_tiny(tmp_path, vocab_size=VOCAB, num_hidden_layers=1))


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def add_tokens(model: Path, *tokens: tokenizers.AddedToken) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_tokens([*tokens])
    backend.save(str(model / "tokenizer.json"))


def test_whatever_a_file_names_as_end_token_ends_an_output(model: Path) -> None:
    edit(model / "generation_config.json", eos_token_id=[7, 9])
    edit(model / "config.json", eos_token_id=11)
    named = Tokenizer(model).eos_id
    assert named is not None
    assert read_config(model).eos_token_ids == (7, 9, 11, named)
    llm = LLM(str(model), device="cpu", page_size=8, num_pages=20)
    for token_id in (7, 9, 11, named, 13):
        sampling = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={token_id: 100.0})
        (found,) = llm.generate(["one"], sampling)
        is_end = token_id != 13
        assert found.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
        assert found.token_ids == (token_id,) * (1 if is_end else 4)


def test_the_end_token_of_a_tokenizer_is_found_by_its_text_wherever_ids_are(model: Path) -> None:
    edit(model / "tokenizer_config.json", eos_token={"content": "<|end|>"})
    assert read_config(model).eos_token_ids == (1, 0)  # of config.json, of tokenizer.json
    edit(model / "tokenizer_config.json", added_tokens_decoder={"17": {"content": "<|end|>", "special": True}})
    assert read_config(model).eos_token_ids == (1, 17)  # where the file itself says, tokenizer.json is not read
    edit(model / "tokenizer_config.json", eos_token="<|nowhere|>")
    assert read_config(model).eos_token_ids == (1,)
    edit(model / "tokenizer_config.json", eos_token=None)
    assert read_config(model).eos_token_ids == (1,)


def test_older_directories_name_special_tokens_in_a_file_of_their_own(model: Path) -> None:
    edit(model / "special_tokens_map.json", eos_token="<|end|>", unk_token={"content": "<|im_start|>"})
    assert Tokenizer(model).special_tokens["eos_token"] == "<|im_end|>"  # tokenizer_config.json comes first
    (model / "tokenizer_config.json").unlink()
    assert Tokenizer(model).special_tokens == {"eos_token": "<|end|>", "unk_token": "<|im_start|>"}
    assert read_config(model).eos_token_ids == (1, 0)


@pytest.mark.parametrize("kind", ["tiktoken.model", "tokenizer.model"])
def test_a_model_chats_with_a_tokenizer_of_each_form(kind: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, vocab_size=900, num_hidden_layers=1)
    if kind == "tiktoken.model":
        tiny_kimi.write(model)
    else:
        tiny_sentencepiece.write(model, settings={"chat_template": tiny_kimi.CHAT_TEMPLATE})
    llm = LLM(str(model), device="cpu", page_size=8, num_pages=50)
    assert llm.tokenizer.description.startswith(kind)
    dog = llm.tokenizer.encode(" dog", add_special_tokens=False)[-1]
    sampling = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={dog: 100.0})
    (found,) = llm.chat([[{"role": "user", "content": "Grüße, 東京 🎉"}]], sampling)
    assert found.text == llm.tokenizer.decode([*found.prompt_token_ids, *found.token_ids])[-len(found.text) :]
    assert found.token_ids == (dog,) * 3 and found.text.endswith("og")
    prompt = llm.tokenizer.decode(found.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|im_user|>user<|im_middle|>Grüße, 東京 🎉<|im_end|><|im_assistant|>assistant<|im_middle|>"


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model: Path) -> None:
    add_tokens(model, *(tokenizers.AddedToken(f"extra{number}") for number in range(4)))
    message = r"tokenizer.json \(BPE\) does not fit the model: token 403 is 'extra3' and .* vocab_size=403; use"
    with pytest.raises(CheckpointError, match=message):
        LLM(str(model), device="cpu")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.of(Config(model=str(model)), vocab_size=VOCAB)
    found = {one.check: one for one in examine({"model": str(model), "device": "cpu", "port": "auto"})}
    assert found["tokenizer"].outcome is Outcome.FAILED and "vocab_size=403" in found["tokenizer"].text


def test_special_tokens_that_no_text_needs_may_lie_beyond_the_vocabulary(model: Path) -> None:
    add_tokens(model, *(tokenizers.AddedToken(f"<extra{number}>", special=True) for number in range(4)))
    Tokenizer(model).check_fits(VOCAB)
    edit(model / "tokenizer_config.json", eos_token="<extra3>")
    with pytest.raises(CheckpointError, match="token 403 is '<extra3>'"):
        Tokenizer(model).check_fits(VOCAB)


def test_a_padded_vocabulary_fits(model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.vocab_size == 400
    tokenizer.check_fits(400)
    tokenizer.check_fits(512)
    with pytest.raises(CheckpointError, match="token 399"):
        tokenizer.check_fits(399)


def test_the_doctor_asks_for_no_tokenizer_where_weights_are_random(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    given = {"model": str(model), "device": "cpu", "port": "auto"}
    refused = {one.check: one for one in examine(given)}["tokenizer"]
    assert refused.outcome is Outcome.FAILED and "has no tokenizer: expected tokenizer.json" in refused.text
    found = {one.check: one for one in examine({**given, "dummy_weights": True})}["tokenizer"]
    assert (found.outcome, found.text) == (Outcome.OK, "256 tokens, none (one token per byte)")
