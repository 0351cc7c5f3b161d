"""What a model directory says about its model: config.json and generation_config.json.

Every value is checked here, so that the rest can rely on it; what a family cannot do is refused instead of ignored.
"""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from raycache.checkpoint.hub_id import name_of
from raycache.checkpoint.prefixes import Prefixes
from raycache.checkpoint.rope_config import ROPE_KINDS, RopeConfig, yarn_attention_factor, yarn_score_factor
from raycache.errors import CheckpointError
from raycache.memory.component import CacheFormat, Component
from raycache.parallel.sharding import HeadCount
from raycache.vocabulary.end_token import end_token_id

DTYPES = ("float32", "bfloat16", "float16")
"""Number formats that weights and cache can have."""

MAX_INTEGER = 2**31 - 1
MAX_COUNT = 100_000
MAX_HEAD_DIM = 65_536

# Far above any model there is: what follows from these numbers is made before a tensor's shape can contradict them.
_BOUNDS = (
    (re.compile(r"(layers|heads|experts|groups?)$"), MAX_COUNT),
    (re.compile(r"(head_dim|d_head|state_size|d_state|kernel|kernel_size|kernel_dim|d_conv)$"), MAX_HEAD_DIM),
)

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig(ABC):
    """What all decoder-only models have; families add to it.

    Attributes:
        name: the directory's name, for messages.
        model_type: the family, such as "llama".
        num_layers, hidden_size, vocab_size: sizes of the whole model.
        rms_norm_eps: of its norms.
        max_position_embeddings: tokens of context that it was made for.
        tie_word_embeddings: the head is the embedding.
        dtype: of the checkpoint, one of `DTYPES`.
        bos_token_id: begins a text, or None.
        eos_token_ids: end one, without repeats: those of generation_config.json, config.json and the tokenizer.
        bound_layers: layers that use what the layer before them found, and so belong to the same stage.
        ignored_tensors: regular expressions of tensor names that a checkpoint may have and that are not used.
        part_of: model_type of the vision model that it is the text part of, or empty.
        prefixes: of its tensors inside of that, in each layout that is published.
        num_drafts: layers for speculative drafts that a checkpoint may have after its others.
        draft: the model that drafts tokens for this one, if there is one.
        unknown_keys: of config.json, which the family does not read and nothing is known about.
    """

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    bound_layers: tuple[int, ...] = field(default=(), kw_only=True)
    ignored_tensors: tuple[str, ...] = field(default=(), kw_only=True)
    part_of: str = field(default="", kw_only=True)
    prefixes: tuple[Prefixes, ...] = field(default=(), kw_only=True)
    num_drafts: int = field(default=0, kw_only=True)
    draft: DraftConfig | None = field(default=None, kw_only=True)
    unknown_keys: tuple[str, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def components(self, fmt: CacheFormat) -> tuple[Component, ...]:
        """The kinds of cached state, without those of a draft model."""

    @property
    @abstractmethod
    def head_counts(self) -> tuple[HeadCount, ...]:
        """Head counts to be split over tp, and over tp x cp."""

    def stream_width(self, layer: int) -> int:
        """Features of a token's hidden state before a layer."""
        return self.hidden_size

    def layer_signature(self, layer: int) -> tuple[int, tuple[bool, ...]]:
        """What a layer's weights do not tell: features of a hidden state before it, and which components it has."""
        parts = self.components(CacheFormat(self.dtype))
        return self.stream_width(layer), tuple(layer in part.layers for part in parts)

    @property
    def doubt(self) -> str:
        """Warning about unknown keys of config.json, which are ignored; empty without any."""
        names = ", ".join(self.unknown_keys)
        return f"config.json of {self.name} has unknown keys, which are ignored: {names}" if names else ""


class DraftKind(Enum):
    """Kinds of draft models, by their input."""

    MODEL = "model"
    """A separate model; takes tokens."""
    LAYER = "layer"
    """A prediction layer of the same checkpoint; takes the target's features of each token, and the next token."""
    HEAD = "head"
    """A head that was trained separately; takes the same, or hidden states of the target's inner layers."""


@dataclass(frozen=True)
class DraftConfig:
    """A draft model.

    Attributes:
        model: its configuration; the cache of its layers follows that of the target's.
        directory: of its weights.
        recorded: layers of the target whose inputs it takes; none if it takes the output of the last one.
    """

    kind: DraftKind
    model: ModelConfig
    directory: Path
    recorded: tuple[int, ...] = ()


class ConfigFile:
    """A parsed JSON object with typed access to its values.

    It records which keys were read, so that `unread` can list the others.

    Args:
        path: for messages.
        asked: keys read so far, shared with the file that this is a section of.
        at: prefix of the keys of this section, such as "text_config.".
    """

    def __init__(self, path: Path, values: dict[str, Any], *, asked: set[str] | None = None, at: str = "") -> None:
        self.path = path
        self._values = values
        self._asked = set() if asked is None else asked
        self._at = at

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Parse a file.

        Raises:
            CheckpointError: it does not exist, or is not a JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; is {path.parent} a Hugging Face model directory?") from None
        except (OSError, ValueError, RecursionError) as cause:
            raise CheckpointError(f"{path} is not readable JSON ({cause}); download it again") from cause
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}; download it again")
        return cls(path, values)

    def having(self, **values: Any) -> ConfigFile:
        """The same file with some values replaced."""
        return ConfigFile(self.path, {**self._values, **values}, asked=self._asked, at=self._at)

    def unread(self) -> dict[str, Any]:
        """Keys that were never read and are not null, with their values; those of sections as "section.key"."""
        return dict(_unread(self._values, self._asked, self._at))

    def values(self) -> tuple[Any, ...]:
        """All values."""
        return tuple(self._values.values())

    def says(self, key: str) -> bool:
        """Whether the key exists, even if it is null."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value of any type, or None."""
        self._asked.add(self._at + key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` if it is missing or null, or an error without a default."""
        return self._integer(key, default, least=1)

    def count(self, key: str, default: int | None = None) -> int:
        """Like `integer`, but may be zero."""
        return self._integer(key, default, least=0)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; see `integer`."""
        value = self.raw(key)
        if value is None:
            return self._default(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, "a positive number")
        return float(value)

    def weight(self, key: str, default: float) -> float:
        """Like `number`, but may be zero."""
        value = self.raw(key)
        return 0.0 if type(value) in (int, float) and value == 0 else self.number(key, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false; see `integer`."""
        return self._typed(key, default, bool, wanted="true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """A string; see `integer`."""
        return self._typed(key, default, str, wanted="a string")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty if it is missing or null."""
        value = self.raw(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return tuple(ids)

    def section(self, key: str) -> ConfigFile:
        """A nested object; empty if it is missing or null."""
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return ConfigFile(self.path, value or {}, asked=self._asked, at=f"{self._at}{key}.")

    def require(self, key: str, served: Any) -> None:
        """Check that a key is missing, null, or has the only supported value.

        Raises:
            CheckpointError: it has another value.
        """
        value = self.raw(key)
        if value is not None and value != served:
            raise CheckpointError(f"{self.path} has {key}={value!r}, which is not supported; only {served!r} is")

    def _integer(self, key: str, default: int | None, *, least: int) -> int:
        value = self.raw(key)
        if value is None:
            return self._default(key, default)
        most = next((bound for pattern, bound in _BOUNDS if pattern.search(key)), MAX_INTEGER)
        if type(value) is not int or value < least:
            raise self._wrong(key, "a positive integer" if least else "a positive integer or zero")
        if value > most:
            raise self._wrong(key, f"at most {most}")
        return value

    def _typed(self, key: str, default: T | None, kind: type[T], *, wanted: str) -> T:
        value = self.raw(key)
        if value is None:
            return self._default(key, default)
        if type(value) is not kind:
            raise self._wrong(key, wanted)
        return value

    def _default(self, key: str, default: T | None) -> T:
        if default is None:
            raise CheckpointError(f"{self.path} does not say {key}; is the file complete? Download it again")
        return default

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {wanted}, got {self._values[key]!r}")


def _unread(values: dict[str, Any], asked: set[str], at: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = at + key
        if isinstance(value, dict) and any(name.startswith(f"{path}.") for name in asked):
            yield from _unread(value, asked, f"{path}.")
        elif value is not None and path not in asked:
            yield path, value


def read_common(file: ConfigFile) -> Any:
    """Read the fields of `ModelConfig`, as keyword arguments of a family's config class.

    Raises:
        CheckpointError: a key is missing or invalid.
    """
    _require_language_model(file)
    return {
        "name": name_of(file.path.parent),
        "model_type": file.text("model_type"),
        "num_layers": file.integer("num_hidden_layers"),
        "hidden_size": file.integer("hidden_size"),
        "vocab_size": file.integer("vocab_size"),
        "rms_norm_eps": file.number("rms_norm_eps"),
        "max_position_embeddings": file.integer("max_position_embeddings"),
        "tie_word_embeddings": file.flag("tie_word_embeddings", False),
        "dtype": _read_dtype(file),
        "bos_token_id": next(iter(file.token_ids("bos_token_id")), None),
        "eos_token_ids": _read_eos(file),
    }


def read_layer_types(file: ConfigFile, *, key: str = "layer_types", known: Sequence[str]) -> tuple[str, ...]:
    """One kind per layer.

    Args:
        file: config.json.
        key: where the list stands.
        known: kinds that the family has.
    Raises:
        CheckpointError: there is no list, it has an unknown kind, or not one for each of num_hidden_layers.
    """
    kinds = file.raw(key)
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError(f"{file.path}: {key} must be a list with one kind per layer, got {kinds!r}")
    for kind in kinds:
        if kind not in known:
            raise CheckpointError(f"{file.path}: {key} has {kind!r}, which is not supported; known are {list(known)}")
    num_layers = file.integer("num_hidden_layers", len(kinds))
    if len(kinds) != num_layers:
        raise CheckpointError(f"{file.path} has {len(kinds)} {key} and num_hidden_layers={num_layers}")
    return tuple(kinds)


def read_given_layer_types(file: ConfigFile, *, key: str = "layer_types", known: Sequence[str]) -> tuple[str, ...]:
    """Like `read_layer_types`, but empty if the key is missing."""
    return () if file.raw(key) is None else read_layer_types(file, key=key, known=known)


def require_full_attention(file: ConfigFile) -> None:
    """Check that all layers have full attention.

    Raises:
        CheckpointError: `layer_types` has other kinds.
    """
    read_given_layer_types(file, known=("full_attention",))


def _require_language_model(file: ConfigFile) -> None:
    architectures = file.raw("architectures")
    if isinstance(architectures, list) and not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise CheckpointError(f"{file.path} is of {architectures}, which is no causal language model (...ForCausalLM)")


def read_rope(
    file: ConfigFile, *, layer_type: str = "", partial: float = 1.0, theta: float | None = None
) -> RopeConfig:
    """Read the configuration of rotary embedding.

    Args:
        layer_type: whose parameters to read, if they differ between layer types.
        partial: the only supported share of rotated features of a head.
        theta: default of rope_theta; None makes it required.
    Raises:
        CheckpointError: a kind or a value is not supported.
    """
    # transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`.
    scaling = file.section("rope_scaling")
    rope = scaling if scaling.values() else file.section("rope_parameters")
    if layer_type and isinstance(rope.raw(layer_type), dict):
        rope = rope.section(layer_type)
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{file.path} has rope parameters per layer type, which is not supported")
    for place in (file, rope):
        place.require("partial_rotary_factor", partial)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(f"{file.path}: rope type {kind!r} is not supported; known are {', '.join(ROPE_KINDS)}")
    stated = [place for place in (rope, file) if place.raw("rope_theta") is not None]
    base = (*stated, file)[0].number("rope_theta", theta)
    original = rope.integer("original_max_position_embeddings", file.integer("max_position_embeddings"))
    original = file.integer("original_max_position_embeddings", original)
    match kind:
        case "default":
            return RopeConfig(kind, base)
        case "linear":
            return RopeConfig(kind, base, rope.number("factor"))
        case "llama3":
            return _read_llama3(rope, base, original)
        case "yarn":
            return _read_yarn(file, rope, base, original)
    raise AssertionError(f"{kind} is one of ROPE_KINDS, and they are all above")


def _read_llama3(rope: ConfigFile, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(f"{rope.path}: low_freq_factor={low} must be below high_freq_factor={high}")
    return RopeConfig("llama3", theta, rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(file: ConfigFile, rope: ConfigFile, theta: float, original: int) -> RopeConfig:
    if theta <= 1:
        raise CheckpointError(f"{rope.path}: rope_theta={theta} is not supported for yarn; it must be above 1")
    betas = {key: rope.number(key, turns) for key, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    for key, turns in betas.items():
        if not 1e-6 <= turns <= 1e6:
            raise CheckpointError(f"{rope.path}: {key}={turns} of yarn is not supported; 1e-6 to 1e6 are")
    says_original = any(place.raw("original_max_position_embeddings") is not None for place in (rope, file))
    factor = rope.number("factor", file.integer("max_position_embeddings") / original if says_original else None)
    mscale_all_dim = rope.weight("mscale_all_dim", 0.0)
    inferred = yarn_attention_factor(factor, rope.weight("mscale", 0.0), mscale_all_dim)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=betas["beta_fast"],
        beta_slow=betas["beta_slow"],
        attention_factor=rope.number("attention_factor", inferred),
        score_factor=yarn_score_factor(factor, mscale_all_dim),
        truncate=rope.flag("truncate", True),
    )


def _read_dtype(file: ConfigFile) -> str:
    # Until transformers 4 the key was `torch_dtype`, and the value may have a prefix.
    dtype = file.text("dtype", file.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file.path}: dtype {dtype!r} is not supported; known are {', '.join(DTYPES)}")
    return dtype


def _read_eos(file: ConfigFile) -> tuple[int, ...]:
    generation = file.path.with_name("generation_config.json")
    ids = ConfigFile.read(generation).token_ids("eos_token_id") if generation.exists() else ()
    named = end_token_id(file.path.parent)
    return tuple(dict.fromkeys((*ids, *file.token_ids("eos_token_id"), *(() if named is None else (named,)))))
