"""Kinds of state that a token leaves behind, as data.

A model declares its components; pools, plans and page moves are built from them and know no model. Full KV, MLA
latents, indexer keys, sliding windows and recurrent states are values of `Component`, not subclasses.

    rule           one row is of     lives in                     a prefix can be continued where
    EVERY_PAGE     a token           the pages of the sequence    every page before is there
    LAST_WINDOW    a token           pages of its own, the last   the last `window` - 1 tokens are there
    STATE_HERE     a sequence        one slot                     the state at exactly this token is there
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from raycache.errors import ConfigError

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes per number of the types that rows are made of."""


class Reuse(Enum):
    """Where a prefix can be continued, for one component."""

    EVERY_PAGE = "every_page"
    LAST_WINDOW = "last_window"
    STATE_HERE = "state_here"


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored.

    Attributes:
        dtype: of keys, values, latents and index keys, a key of `ITEMSIZE`; that of the activations.
        has_fp8_latent: latents as float8 with one float32 scale per 128 numbers, their rotary part in bfloat16.
    """

    dtype: str
    has_fp8_latent: bool = False

    @property
    def state_dtype(self) -> str:
        """Of recurrent states, which add up over the whole sequence."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class RowField:
    """One tensor of a row, in one layer.

    Attributes:
        name: such as "k" or "v".
        shape: of the whole model, such as (num_kv_heads, head_dim).
        dtype: a key of `ITEMSIZE`.
        head_axis: the axis of `shape` that is split over ranks, or None when every one of them holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    head_axis: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the whole model."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Component:
    """One kind of state.

    Attributes:
        name: unique within a model.
        layers: model layers that keep it, ascending.
        fields: what one token, or one sequence, leaves in one of those layers.
        reuse: where a prefix can be continued.
        window: tokens that a query sees, itself included (LAST_WINDOW only).
        is_draft: whether it is of the model that drafts for another; its layers follow the other's.
    Raises:
        ConfigError: no layer, no field, a row without bytes, or a window where none belongs.
    """

    name: str
    layers: tuple[int, ...]
    fields: tuple[RowField, ...]
    reuse: Reuse = Reuse.EVERY_PAGE
    window: int = 0
    is_draft: bool = False

    def __post_init__(self) -> None:
        if not self.layers or not self.fields:
            raise ConfigError(f"component {self.name!r} has no layers or no fields")
        for field in self.fields:
            if field.dtype not in ITEMSIZE or field.num_bytes < 1:
                raise ConfigError(f"field {field.name!r} of component {self.name!r} has a row without bytes")
        if (self.window > 0) != (self.reuse is Reuse.LAST_WINDOW):
            raise ConfigError(f"component {self.name!r} has window={self.window} and reuse={self.reuse.value}")

    @property
    def space(self) -> str:
        """Whose ids name its rows: those of the sequence's pages, of its states, or its own."""
        return _SHARED_SPACES.get(self.reuse, self.name)


FULL = "full"
"""The page ids of the sequence, which all EVERY_PAGE components share."""

STATE = "state"
"""The slots of recurrent states, which all STATE_HERE components share: a model's own and its draft's."""

_SHARED_SPACES = {Reuse.EVERY_PAGE: FULL, Reuse.STATE_HERE: STATE}


def window_pages(window: int, page_size: int) -> int:
    """Most pages that a query and the window before it touch."""
    return -(-(window - 1) // page_size) + 1 if window else 0


def first_window_page(position: int, *, window: int, page_size: int) -> int:
    """The first page that a query at `position` sees through a window."""
    return max(0, position - window + 1) // page_size


def tokens_per_point(*, token_bytes: float, point_bytes: float) -> float:
    """Tokens per restore point of a tier: so many that its points take no more memory than its pages, at least 1024."""
    return max(1024, point_bytes / max(token_bytes, 1))


def kv(name: str, layers: Sequence[int], *, heads: int, dim: int, fmt: CacheFormat, window: int = 0) -> Component:
    """Keys and values, split by KV heads; of all tokens, or of a window's."""
    fields = tuple(RowField(field, (heads, dim), fmt.dtype, head_axis=0) for field in ("k", "v"))
    reuse = Reuse.LAST_WINDOW if window else Reuse.EVERY_PAGE
    return Component(name, tuple(layers), fields, reuse, window)


def latent(layers: Sequence[int], *, rank: int, rope_dim: int, fmt: CacheFormat) -> Component:
    """MLA latents with their rotary part, whole on every tp rank ("DeepSeek-V2", arXiv 2405.04434, section 2.1).

    In float8 a row of 512 + 64 numbers takes 512 + 16 + 128 = 656 bytes.

    Raises:
        ConfigError: float8 is wanted and 128 does not divide `rank`.
    """
    if not fmt.has_fp8_latent:
        plain = (RowField("latent", (rank,), fmt.dtype), RowField("rope", (rope_dim,), fmt.dtype))
        return Component("latent", tuple(layers), plain)
    if rank % FP8_BLOCK:
        raise ConfigError(f"an fp8 cache needs a kv_lora_rank in multiples of {FP8_BLOCK}, this model has {rank}")
    fields = (
        RowField("latent", (rank,), "float8_e4m3fn"),
        RowField("scale", (rank // FP8_BLOCK,), "float32"),
        RowField("rope", (rope_dim,), "bfloat16"),
    )
    return Component("latent", tuple(layers), fields)


FP8_BLOCK = 128
"""Numbers of a float8 latent that share a scale."""


def index_keys(layers: Sequence[int], *, dim: int, fmt: CacheFormat) -> Component:
    """Keys of a sparse indexer, one head, whole on every tp rank."""
    return Component("index", tuple(layers), (RowField("key", (dim,), fmt.dtype),))


def recurrent(
    layers: Sequence[int],
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    fmt: CacheFormat,
    conv: Sequence[tuple[str, int, int]] = (),
    conv_kernel: int = 0,
) -> Component:
    """The state of a recurrent layer, split by heads over tp x cp.

    Args:
        layers: that keep it.
        heads, key_dim, value_dim: of the matrix [key_dim, value_dim] that each head carries on.
        fmt: of the cache.
        conv: (name, heads, features per head) of the inputs of short convolutions, whose last conv_kernel - 1 are kept.
        conv_kernel: taps of those convolutions.
    """
    inputs = tuple(
        RowField(f"conv_{name}", (count, dim, conv_kernel - 1), fmt.dtype, head_axis=0) for name, count, dim in conv
    )
    state = RowField("state", (heads, key_dim, value_dim), fmt.state_dtype, head_axis=0)
    return Component(STATE, tuple(layers), (*inputs, state), Reuse.STATE_HERE)
