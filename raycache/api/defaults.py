"""What applies to a request that says nothing: sampling settings of generation_config.json, and max_tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycache.api.schema import GenerationBody
from raycache.config import Config
from raycache.errors import ConfigError, RequestError
from raycache.types import SamplingParams
from raycache.vocabulary.base import read_json

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_COMPLETION_TOKENS = 16  # as the OpenAI API says

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Defaults:
    """What applies to a request that does not set a field itself.

    Attributes:
        sampling: fields of SamplingParams that differ from its own defaults.
        origin: file that they come from.
        max_tokens: None: the rest of the context for chats, 16 for completions.
        cuts_max_tokens: whether a max_tokens that does not fit the context is cut, instead of refused.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    max_tokens: int | None = None
    cuts_max_tokens: bool = False

    @classmethod
    def of(cls, config: Config) -> Defaults:
        """Those of a service.

        Args:
            config: its model must be a directory on this machine.
        Raises:
            ConfigError: the file cannot be read, or a value in it is out of range.
        """
        path = _path(config)
        found = cls(
            sampling={} if path is None else _read(path),
            origin="" if path is None else str(path),
            max_tokens=None if config.default_max_tokens == "auto" else config.default_max_tokens,
            cuts_max_tokens=config.excess_max_tokens == "cut",
        )
        _log.info("sampling defaults: %s", found.description)
        return found

    @property
    def description(self) -> str:
        """For people, such as "temperature=0.6, top_p=0.95 (generation_config.json)"."""
        values = ", ".join(f"{name}={value:g}" for name, value in self.sampling.items())
        return f"{values} ({Path(self.origin).name})" if values else "those of the OpenAI API"

    @property
    def card(self) -> dict[str, Any]:
        """Fields of the model for clients."""
        usual = SamplingParams()
        return {
            "default_sampling": {name: self.sampling.get(name, getattr(usual, name)) for name in _NAMES},
            "default_max_tokens": self.max_tokens,
            "excess_max_tokens": "cut" if self.cuts_max_tokens else "refuse",
        }

    def sampling_of(self, body: GenerationBody) -> dict[str, Any]:
        """Sampling fields of a request: its own, and the defaults for those that it did not send."""
        values = {**self.sampling, **{name: getattr(body, name) for name in _NAMES if name in body.model_fields_set}}
        if "top_k" in values:
            values["top_k"] = max(0, values["top_k"])  # -1 also says all tokens
        return values

    def completion_tokens(self) -> int:
        """The max_tokens of a completion that sets none."""
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


def _path(config: Config) -> Path | None:
    """The file of the sampling defaults, if there is one."""
    match config.generation_config:
        case "none":
            return None
        case "auto":
            path = Path(config.model) / _FILE
            return path if path.is_file() else None
    path = Path(config.generation_config)
    path = path / _FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"generation_config={config.generation_config!r} is not a file; use auto, none or a path")
    return path


def _read(path: Path) -> dict[str, float]:
    values = read_json(path)
    if values.get("do_sample") is False:
        return {}
    found = {name: values[name] for name in _NAMES if values.get(name) is not None}
    hint = "correct it, or leave it out with generation_config=none"
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ConfigError(f"{path}: {name} must be a number, got {value!r}; {hint}")
    if found.get("top_k") == -1:
        found["top_k"] = 0
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}; {hint}") from error
    return found
