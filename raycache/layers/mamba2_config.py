"""Sizes of Mamba2 layers: config.json, cached state, and the split over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raycache.checkpoint.config_file import ConfigFile
from raycache.errors import CheckpointError
from raycache.memory.component import CacheFormat, Component, recurrent
from raycache.parallel.sharding import HeadCount

# Shapes in this file: H heads of P features, G groups of N state features, K taps; of the whole model.


@dataclass(frozen=True)
class Mamba2Config:
    """The Mamba2 layers of a model.

    Attributes:
        heads, head_dim: H and P.
        groups, state_dim: G and N; the heads of a group share B and C.
        kernel: K.
        has_bias: whether both projections have biases.
        has_conv_bias: whether the convolution has a bias.
        dt_limit: smallest and largest time step.
        has_norm: whether the gated output is normalised.
        factors: of the projected z, x, B, C and dt; empty for none.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    has_bias: bool
    has_conv_bias: bool
    dt_limit: tuple[float, float]
    has_norm: bool = True
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of B (or C) of all groups."""
        return self.groups * self.state_dim

    def components(self, layers: Sequence[int], fmt: CacheFormat) -> tuple[Component, ...]:
        """Recurrent states of `layers`, and the last inputs of the convolutions of x, B and C."""
        if not layers:
            return ()
        per_group = (self.groups, self.state_dim)
        states = recurrent(
            layers,
            heads=self.heads,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
            fmt=fmt,
            conv=[("x", self.heads, self.head_dim), ("b", *per_group), ("c", *per_group)],
            conv_kernel=self.kernel,
        )
        return (states,)

    def head_counts(self, *, heads_key: str, groups_key: str) -> tuple[HeadCount, ...]:
        """Head counts to be split, with their keys in config.json. Ranks share groups like KV heads."""
        return (
            HeadCount(heads_key, self.heads, over_cp=True),
            HeadCount(groups_key, self.groups, is_shared=True),
            HeadCount(groups_key, self.groups, is_shared=True, over_cp=True),
        )


def require_groups(file: ConfigFile, mamba: Mamba2Config) -> Mamba2Config:
    """Return `mamba` if its sizes are valid.

    Raises:
        CheckpointError: groups do not divide the heads, or the convolution has one tap.
    """
    if mamba.heads % mamba.groups:
        raise CheckpointError(f"{file.path}: {mamba.groups} groups do not divide the {mamba.heads} heads of Mamba2")
    if mamba.kernel < 2:
        raise CheckpointError(
            f"{file.path}: a convolution with {mamba.kernel} tap is not supported; it needs 2 or more"
        )
    return mamba


def read_dt_limit(file: ConfigFile) -> tuple[float, float]:
    """Read `time_step_limit`; no limits if it is missing or null.

    Raises:
        CheckpointError: it is not a pair of ascending numbers.
    """
    limit = file.raw("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    numbers = [_number(value) for value in limit] if isinstance(limit, list) else []
    match numbers:
        case [float(low), float(high)] if 0 <= low < high:
            return low, high
    raise CheckpointError(f"{file.path}: time_step_limit must be two numbers, smallest first, got {limit!r}")


def _number(value: object) -> float | None:
    """A number, or infinity if it is beyond float32, in which time steps are computed; some files have 1e308."""
    # JSON has no infinity: transformers 5 writes {"__float__": "Infinity"}, earlier versions Infinity, others strings.
    if isinstance(value, dict):
        value = value.get("__float__")
    if value in ("Infinity", "inf"):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return math.inf if value > _MAX_FLOAT32 else float(value)


_MAX_FLOAT32 = torch.finfo(torch.float32).max
