"""Sizes of a tier's component spaces, as its decider knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpaceSizes:
    """Pages and slots of a tier.

    Attributes:
        num_pages: pages of the "full" space.
        page_size: tokens per page.
        windows: space -> (window in tokens, pages).
        states: space -> slots; at most one.
    """

    num_pages: int
    page_size: int
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    states: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.states) <= 1, "a model has one kind of recurrent state"
