"""Views of one layer's cache, used by attention backends.

A view knows the format of its rows, the component space of their ids (`space`), and the window of its queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raycache.memory.component import FP8_BLOCK, Component

Runs = Sequence[tuple[int, int]]
"""Consecutive slots, as (first, count)."""

# Shapes in this file: P pages, R rows of a page on this cp rank, T tokens, L rows read, Hkv key heads, D head size.


def read_rows(rows: Tensor, runs: Runs) -> Tensor:
    """Rows of consecutive slots, [L, ...]: a view for one run, a copy for several."""
    if len(runs) == 1:
        start, count = runs[0]
        return rows[start : start + count]
    return torch.cat([rows[start : start + count] for start, count in runs])


class KVView:
    """Keys and values.

    Attributes:
        window: number of tokens that a query attends to, including itself; 0 for no limit.
        k, v: [P, R, Hkv, D].
    """

    def __init__(self, component: Component, fields: Mapping[str, Tensor]) -> None:
        self.space, self.window = component.space, component.window
        self.k, self.v = fields["k"], fields["v"]
        self._rows = (self.k.flatten(0, 1), self.v.flatten(0, 1))

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows [T, Hkv, D] at slots [T] (page id * R + offset)."""
        for rows, new in zip(self._rows, (k, v), strict=True):
            rows.index_copy_(0, slots, new)

    def read(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """k, v [L, Hkv, D] of at least one run."""
        return read_rows(self._rows[0], runs), read_rows(self._rows[1], runs)


class LatentView:
    """MLA latents and rotary parts, shared by all heads; latents may be float8 with scales.

    Attributes:
        pages: latents [P, R, rank] and rotary parts [P, R, rope_dim], as stored; scales [P, R, rank / FP8_BLOCK] of
            float8 latents behind them.
    """

    window = 0

    def __init__(self, component: Component, fields: Mapping[str, Tensor]) -> None:
        self.space = component.space
        self.pages = tuple(fields[name] for name in ("latent", "rope", "scale") if name in fields)
        self._latent, self._rope = fields["latent"].flatten(0, 1), fields["rope"].flatten(0, 1)
        self._scale = fields["scale"].flatten(0, 1) if "scale" in fields else None
        self.rank, self.rope_dim = self._latent.shape[1], self._rope.shape[1]

    def write(self, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Store rows latent [T, rank] and rope [T, rope_dim] at slots [T]."""
        if self._scale is None:
            self._latent.index_copy_(0, slots, latent)
        else:
            small, scale = _to_fp8(latent)
            # As bytes, since index_copy_ does not support float8.
            self._latent.view(torch.uint8).index_copy_(0, slots, small.view(torch.uint8))
            self._scale.index_copy_(0, slots, scale)
        self._rope.index_copy_(0, slots, rope.to(self._rope.dtype))

    def read(self, runs: Runs, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """latent [L, rank], rope [L, rope_dim] in `dtype`, of at least one run."""
        latent = read_rows(self._latent, runs)
        if self._scale is not None:
            latent = _from_fp8(latent, read_rows(self._scale, runs))
        return latent.to(dtype), read_rows(self._rope, runs).to(dtype)

    def take(self, slots: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Like `read`, for slots [L]."""
        latent = self._latent[slots]
        if self._scale is not None:
            latent = _from_fp8(latent, self._scale[slots])
        return latent.to(dtype), self._rope[slots].to(dtype)


class IndexView:
    """Keys of a sparse indexer, [P, R, D]."""

    def __init__(self, component: Component, fields: Mapping[str, Tensor]) -> None:
        self.space = component.space
        self.key = fields["key"]
        self._rows = self.key.flatten(0, 1)

    def write(self, slots: Tensor, key: Tensor) -> None:
        """Store rows [T, D] at slots [T]."""
        self._rows.index_copy_(0, slots, key)

    def read(self, runs: Runs) -> Tensor:
        """Keys [L, D] of at least one run."""
        return read_rows(self._rows, runs)


class StateView:
    """State of a recurrent layer, one slot per sequence or restore point.

    Attributes:
        state: [slots, H, Dk, Dv].
        conv: name -> [slots, H, D, K - 1], the last inputs of a short convolution, oldest first.
    """

    def __init__(self, component: Component, fields: Mapping[str, Tensor]) -> None:
        self.space = component.space
        self.state = fields["state"]
        self.conv = {name.removeprefix("conv_"): rows for name, rows in fields.items() if name.startswith("conv_")}


View = KVView | LatentView | IndexView | StateView

VIEWS: Mapping[frozenset[str], type[View]] = {
    frozenset({"k", "v"}): KVView,
    frozenset({"latent", "rope"}): LatentView,
    frozenset({"latent", "scale", "rope"}): LatentView,
    frozenset({"key"}): IndexView,
}
"""Fields -> view; components with a `state` use StateView."""


def view_type(component: Component) -> type[View] | None:
    """The view for a component's fields, or None."""
    names = frozenset(field.name for field in component.fields)
    if "state" in names and all(name == "state" or name.startswith("conv_") for name in names):
        return StateView
    return VIEWS.get(names)


def _to_fp8(latent: Tensor) -> tuple[Tensor, Tensor]:
    """[T, rank] -> float8 [T, rank] and float32 scales [T, rank / FP8_BLOCK], so that the largest number just fits."""
    blocks = latent.to(torch.float32).unflatten(-1, (-1, FP8_BLOCK))
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (blocks.abs().amax(-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    small = (blocks / scale[..., None]).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return small.flatten(1), scale


def _from_fp8(small: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `_to_fp8`, up to rounding: float32 [L, rank]."""
    blocks: Tensor = small.to(torch.float32).unflatten(-1, (-1, FP8_BLOCK)) * scale[..., None]
    return blocks.flatten(1)
