"""Where a model's chat templates come from: its own files, or a built-in template where it publishes none.

Files, the first that there is:

    chat_template.jinja         with more templates in additional_chat_templates/NAME.jinja
    tokenizer_config.json       "chat_template": a template, or a list of named ones
    chat_template.json          "chat_template": of older vision models
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycache.errors import CheckpointError
from raycache.vocabulary.base import SETTINGS, read_json

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_BUILT_IN = Path(__file__).with_name("chat_templates")
_MARKS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v32": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
}
"""model_type of models that publish no template -> tokens that a tokenizer has for which ours is made."""


@dataclass(frozen=True)
class TemplateSources:
    """Jinja sources of a model's chat templates.

    Attributes:
        sources: name -> source; the usual name is "default"; empty when there is none.
        origin: file, or "built in (NAME)", or empty when there is none.
        is_built_in: they are ours, as the model has none.
    """

    sources: Mapping[str, str]
    origin: str
    is_built_in: bool = False


def read_templates(
    folder: Path, settings: Mapping[str, Any], *, token_id: Callable[[str], int | None]
) -> TemplateSources:
    """Find the templates of a model.

    Args:
        settings: of its tokenizer_config.json.
        token_id: id of a token of its tokenizer, or None.
    Raises:
        CheckpointError: a file is damaged.
    """
    path = folder / _FILE
    if path.is_file():
        more = {other.stem: _text(other) for other in sorted((folder / _MORE).glob("*.jinja"))}
        return TemplateSources({**more, "default": _text(path)}, _FILE)
    for name, values in (
        (SETTINGS, settings),
        ("chat_template.json", read_json(folder / "chat_template.json")),
    ):
        if named := _named(values.get("chat_template"), path=folder / name):
            return TemplateSources(named, name)
    model_type = read_json(folder / "config.json").get("model_type")
    marks = _MARKS.get(model_type) if isinstance(model_type, str) else None
    if marks and all(token_id(mark) is not None for mark in marks):
        source = _text(_BUILT_IN / f"{model_type}.jinja")
        return TemplateSources({"default": source}, f"built in ({model_type})", is_built_in=True)
    return TemplateSources({}, "")


def _named(value: object, *, path: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(entries):
            pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
        case dict():
            pairs = [*value.items()]
        case _:
            pairs = [(None, None)]
    found = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if len(found) != len(pairs):
        raise CheckpointError(
            f"{path}: chat_template must be a template or a list of templates with name and template; download it again"
        )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}); download it again") from error
