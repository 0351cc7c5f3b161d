"""Kinds of state that a token leaves behind, as data.

A model declares its components; pools, plans and page moves are built from them and know no model. Full KV, MLA
latents,
indexer keys, sliding windows and recurrent states are values of `Component`, not subclasses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from raycache.errors import ConfigError


class Reuse(Enum):
    """Where a prefix can be continued, for one component."""

    EVERY_PAGE = "every_page"  # needs the rows of all tokens before
    LAST_WINDOW = "last_window"  # needs the rows of the last `window` tokens
    STATE_HERE = "state_here"  # needs one state, exactly at this position


@dataclass(frozen=True)
class RowField:
    """One tensor of a row, for one token in one layer.

    Attributes:
        name: such as "k" or "v".
        shape: of the whole model, such as (num_kv_heads, head_dim).
        head_axis: the axis of `shape` that tp splits, or None when every tp rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    head_axis: int | None = None


@dataclass(frozen=True)
class Component:
    """One kind of state.

    Attributes:
        name: unique within a model.
        layers: model layers that keep it, ascending.
        fields: what one token leaves in one of those layers.
        itemsize: bytes per number.
        reuse: where a prefix can be continued.
    Raises:
        ConfigError: no layer, no field, or a row without bytes.
    """

    name: str
    layers: tuple[int, ...]
    fields: tuple[RowField, ...]
    itemsize: int
    reuse: Reuse = Reuse.EVERY_PAGE

    def __post_init__(self) -> None:
        if not self.layers or not self.fields:
            raise ConfigError(f"component {self.name!r} has no layers or no fields")
        if self.itemsize < 1 or any(math.prod(f.shape) < 1 for f in self.fields):
            raise ConfigError(f"component {self.name!r} has a row without bytes")
