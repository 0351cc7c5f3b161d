"""Mixers with constant factors, and mixers in parallel ("Falcon-H1", arXiv 2507.22448)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.linear import Projection

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens, C hidden size, F features.


class ScaledProjection:
    """A projection with a factor per output feature.

    Args:
        project: [T, C] -> new [T, F].
        factors: [F].
    """

    def __init__(self, project: Projection, factors: Tensor) -> None:
        self._project = project
        self._factors = factors

    def __call__(self, x: Tensor) -> Tensor:
        """[T, C] -> new [T, F]."""
        return self._project(x).mul_(self._factors)

    def over_cp(self, split: CpSplit) -> ScaledProjection:
        """Features are gathered, then scaled."""
        return ScaledProjection(self._project.over_cp(split), self._factors)


class Scaled:
    """after * mixer(before * x)."""

    def __init__(self, mixer: Mixer, *, before: float = 1.0, after: float = 1.0) -> None:
        self._mixer = mixer
        self._before = before
        self._after = after

    @property
    def is_position_wise(self) -> bool:
        return self._mixer.is_position_wise

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        out = self._mixer(x if self._before == 1.0 else x * self._before, run)
        return out if self._after == 1.0 else out.mul_(self._after)

    def over_cp(self, split: CpSplit) -> Scaled:
        return Scaled(self._mixer.over_cp(split), before=self._before, after=self._after)


class ParallelMixers:
    """The sum of two mixers of the same input."""

    def __init__(self, first: Mixer, second: Mixer) -> None:
        self._first = first
        self._second = second

    @property
    def is_position_wise(self) -> bool:
        return self._first.is_position_wise and self._second.is_position_wise

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        return self._first(x, run).add_(self._second(x, run))

    def over_cp(self, split: CpSplit) -> ParallelMixers:
        return ParallelMixers(self._first.over_cp(split), self._second.over_cp(split))
