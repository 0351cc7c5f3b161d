"""Which model may draft for another: what `draft` says, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from raycache.checkpoint.config_file import DraftKind
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.errors import CheckpointError, ConfigError
from raycache.models.drafts.loading import read_models
from tests.oracle.draft_models import make_eagle3, make_predicting, make_target
from tests.oracle.families import make_family
from tests.oracle.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(make_target(tmp_path_factory.mktemp("target") / "model", "llama", num_hidden_layers=8))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("head") / "head", target, draft_vocab=400, has_embedding=False)


def changed(directory: Path, to: Path, **values: object) -> Path:
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **values}))
    return to


def refusal(target: Path, draft: Path | str, **settings: object) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        check_model(Config(model=str(target), draft=str(draft), **settings))
    return str(caught.value)


@pytest.mark.parametrize("word", ["none", "ngram"])
def test_words_for_no_model(target: Path, word: str) -> None:
    assert read_models(target, word).draft is None


def test_a_directory_is_a_smaller_model_or_a_head(target: Path, head: Path) -> None:
    found = [read_models(target, str(draft)).draft for draft in (target, head)]
    assert [one.kind for one in found if one is not None] == [DraftKind.MODEL, DraftKind.HEAD]


def test_what_is_no_directory_is_refused(target: Path) -> None:
    assert "is not a directory; use none, ngram, mtp, a directory" in refusal(target, "turbo")


def test_a_model_without_prediction_layers_is_refused(target: Path, tmp_path: Path) -> None:
    assert "draft=mtp is not supported for model_type llama" in refusal(target, "mtp")
    without = changed(make_family(tmp_path / "model", "deepseek_v3"), tmp_path / "none", num_nextn_predict_layers=0)
    assert "has no prediction layers" in refusal(without, "mtp")


def test_a_prediction_layer_that_is_not_in_the_files_is_refused(tmp_path: Path) -> None:
    model = make_family(tmp_path / "model", "deepseek_v3")
    assert "has no tensor model.layers.4." in refusal(model, "mtp")
    assert check_model(Config(model=str(make_predicting(tmp_path / "with", "deepseek_v3")), draft="mtp")).draft


def test_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(target, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[:2]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another vocabulary" in refusal(target, other)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"vocab_size": 600}, "a head for hidden_size=64, vocab_size=600"),
        ({"hidden_size": 128}, "a head for hidden_size=128"),
        ({"num_hidden_layers": 2}, "an EAGLE-3 head has 1"),
        ({"norm_before_residual": True}, "norm_before_residual=True, which is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False, which is not supported"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "must be three layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "hidden states before layers (2, 4, 8)"),
        ({"draft_vocab_size": 300}, "config.json wants [300"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    target: Path, head: Path, tmp_path: Path, values: dict[str, object], text: str
) -> None:
    assert text in refusal(target, changed(head, tmp_path / "head", **values))


def test_a_split_that_does_not_suit_the_draft_is_refused(tmp_path: Path) -> None:
    target = byte_level(make_family(tmp_path / "target", "llama"))
    draft = byte_level(make_target(tmp_path / "draft", "llama", num_attention_heads=2, num_key_value_heads=2))
    assert "use one of [1, 2]" in refusal(target, draft, tp=4)
