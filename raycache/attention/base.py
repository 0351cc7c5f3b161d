"""What an attention backend is: a factory of steps. A step is planned once per plan and serves all layers of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from raycache.engine.inputs import StepInputs
from raycache.memory.device import KVView


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; composites intersect them.

    Attributes:
        name: for people.
        device_types: such as "cpu", "cuda".
        dtypes: of queries and cache, such as "float32".
        max_head_dim: largest D.
    """

    name: str
    device_types: frozenset[str]
    dtypes: frozenset[str]
    max_head_dim: int


class AttentionStep(Protocol):
    """Attention of one step."""

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new tokens that this rank owns and attend the new queries to everything before them.

        Args:
            view: of the layer.
            q: [T, Hq, D], this rank's new tokens and heads.
            k, v: [T, Hkv, D].
        Returns:
            [T, Hq, D].
        """
        ...


class AttentionBackend(Protocol):
    """Plans steps."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def plan(self, inputs: StepInputs, *, scale: float) -> AttentionStep:
        """Prepare one step.

        Args:
            inputs: the rank's view of the plan.
            scale: of the scores, such as head_dim ** -0.5.
        """
        ...
