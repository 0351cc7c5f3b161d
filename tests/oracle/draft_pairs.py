"""A model and who drafts for it, of each kind, with heads that fast kernels take (see draft_models.py and half.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.oracle.draft_models import make_eagle, make_eagle3, make_predicting, make_smaller, make_target
from tests.oracle.half import SETTINGS
from tests.oracle.tiny_tokenizers import byte_level

MakePair = Callable[[Path], tuple[Path, str]]
"""(folder) -> directory of the target, and the setting `draft`."""

_HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}


def _settings(name: str, **others: Any) -> dict[str, Any]:
    """Those of half.py, but as narrow as the models of draft_models.py, for which `share` and `noise` are chosen."""
    return {**SETTINGS[name], "hidden_size": 64, **others}


def _small(folder: Path) -> tuple[Path, str]:
    target = byte_level(make_target(folder / "target", "qwen3", **_settings("qwen3")))
    return target, str(byte_level(make_smaller(folder / "draft", target, noise=0.3)))


def _by_another(target_name: str, draft_name: str) -> MakePair:
    def make(folder: Path) -> tuple[Path, str]:
        target = byte_level(make_target(folder / "target", target_name, share=0.35, **_settings(target_name)))
        draft = make_target(folder / "draft", draft_name, share=0.35, seed=1, like=target, **_settings(draft_name))
        return target, str(byte_level(draft))

    return make


def _predicting(folder: Path) -> tuple[Path, str]:
    settings = _settings("deepseek_v3")
    del settings["num_hidden_layers"]
    return byte_level(make_predicting(folder / "target", "deepseek_v3", **settings)), "mtp"


def _eagle(folder: Path) -> tuple[Path, str]:
    target = byte_level(make_target(folder / "target", "qwen3", share=0.5, **_settings("qwen3")))
    return target, str(make_eagle(folder / "head", target, has_bias=False, **_HEADS))


def _eagle3(folder: Path) -> tuple[Path, str]:
    target = make_target(folder / "target", "qwen3", share=0.35, **_settings("qwen3", num_hidden_layers=8))
    heads = {**_HEADS, "num_key_value_heads": 1}  # values are as wide as the model
    head = make_eagle3(folder / "head", target, draft_vocab=400, has_embedding=False, **heads)
    return byte_level(target), str(head)


PAIRS: Mapping[str, MakePair] = MappingProxyType(
    {
        "small": _small,
        "recurrent draft": _by_another("qwen3", "nemotron_h"),
        "recurrent target": _by_another("nemotron_h", "qwen3"),
        "mtp": _predicting,
        "eagle": _eagle,
        "eagle3": _eagle3,
    }
)
