"""Components: the kinds of cached state of a model, as data.

Models declare their components; pools, plans and page moves are built from them and are independent of models. Full KV,
MLA latents, indexer keys, sliding windows and recurrent states are values of `Component`, not subclasses.

    rule           one row per       stored in                    a prefix can be reused if
    EVERY_PAGE     token             pages of the sequence        all its pages are cached
    LAST_WINDOW    token             pages of its own             its last `window` - 1 tokens are cached
    STATE_HERE     sequence          one slot                     the state at exactly its last token is cached
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from raycache.errors import ConfigError

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes per element of the dtypes of rows."""


class Reuse(Enum):
    """When a prefix can be reused, for one component."""

    EVERY_PAGE = "every_page"
    LAST_WINDOW = "last_window"
    STATE_HERE = "state_here"


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored.

    Attributes:
        dtype: of keys, values, latents and index keys; the same as that of the activations.
        has_fp8_latent: whether latents are float8 with a float32 scale per 128 elements, and rotary parts bfloat16.
    """

    dtype: str
    has_fp8_latent: bool = False

    @property
    def state_dtype(self) -> str:
        """The dtype of recurrent states, which accumulate over the whole sequence."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class RowField:
    """One tensor of a row, in one layer.

    Attributes:
        name: such as "k" or "v".
        shape: of the whole model, such as (num_kv_heads, head_dim).
        dtype: a key of `ITEMSIZE`.
        head_axis: the axis of `shape` that is split over ranks, or None if every rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    head_axis: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a row of the whole model."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Component:
    """One kind of state.

    Attributes:
        name: unique within a model.
        layers: model layers that have it, ascending.
        fields: tensors of a row in one layer.
        reuse: when a prefix can be reused.
        window: number of tokens that a query attends to, including itself (LAST_WINDOW only).
        is_draft: whether it belongs to the draft model, whose layers follow the target's.
    Raises:
        ConfigError: no layers, no fields, an empty row, or a window that does not match `reuse`.
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
        """The component space of its ids: the pages of sequences, their states, or a space of its own."""
        return _SHARED_SPACES.get(self.reuse, self.name)


FULL = "full"
"""The page ids of the sequence, which all EVERY_PAGE components share."""

STATE = "state"
"""The slots of recurrent states, which all STATE_HERE components share: a model's own and its draft's."""

_SHARED_SPACES = {Reuse.EVERY_PAGE: FULL, Reuse.STATE_HERE: STATE}


def window_pages(window: int, page_size: int) -> int:
    """Maximum number of pages that a query's window overlaps."""
    return -(-(window - 1) // page_size) + 1 if window else 0


def first_window_page(position: int, *, window: int, page_size: int) -> int:
    """The first page in the window of a query at `position`."""
    return max(0, position - window + 1) // page_size


def tokens_per_point(*, token_bytes: float, point_bytes: float) -> float:
    """Tokens per restore point of a tier: at least 1024, and enough that points take no more memory than pages."""
    return max(1024, point_bytes / max(token_bytes, 1))


def kv(name: str, layers: Sequence[int], *, heads: int, dim: int, fmt: CacheFormat, window: int = 0) -> Component:
    """Keys and values, split by KV heads; of all tokens, or of a window."""
    fields = tuple(RowField(field, (heads, dim), fmt.dtype, head_axis=0) for field in ("k", "v"))
    reuse = Reuse.LAST_WINDOW if window else Reuse.EVERY_PAGE
    return Component(name, tuple(layers), fields, reuse, window)


def latent(layers: Sequence[int], *, rank: int, rope_dim: int, fmt: CacheFormat) -> Component:
    """MLA latents and rotary parts, replicated on every tp rank ("DeepSeek-V2", arXiv 2405.04434, section 2.1).

    In float8 a row of 512 + 64 elements takes 512 + 16 + 128 = 656 bytes.

    Raises:
        ConfigError: for float8, 128 does not divide `rank`.
    """
    if not fmt.has_fp8_latent:
        plain = (RowField("latent", (rank,), fmt.dtype), RowField("rope", (rope_dim,), fmt.dtype))
        return Component("latent", tuple(layers), plain)
    if rank % FP8_BLOCK:
        raise ConfigError(f"an fp8 cache needs a kv_lora_rank that is a multiple of {FP8_BLOCK}, this model has {rank}")
    fields = (
        RowField("latent", (rank,), "float8_e4m3fn"),
        RowField("scale", (rank // FP8_BLOCK,), "float32"),
        RowField("rope", (rope_dim,), "bfloat16"),
    )
    return Component("latent", tuple(layers), fields)


FP8_BLOCK = 128
"""Elements of a float8 latent that share a scale."""


def index_keys(layers: Sequence[int], *, dim: int, fmt: CacheFormat) -> Component:
    """Keys of a sparse indexer, replicated on every tp rank."""
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
        heads, key_dim, value_dim: each head has a state [key_dim, value_dim].
        conv: (name, heads, features per head) of short convolutions, whose last conv_kernel - 1 inputs are kept.
        conv_kernel: taps of the convolutions.
    """
    inputs = tuple(
        RowField(f"conv_{name}", (count, dim, conv_kernel - 1), fmt.dtype, head_axis=0) for name, count, dim in conv
    )
    state = RowField("state", (heads, key_dim, value_dim), fmt.state_dtype, head_axis=0)
    return Component(STATE, tuple(layers), (*inputs, state), Reuse.STATE_HERE)
