"""Prefixes of tensor names in checkpoints where a text model is nested in another model.

ours                       gemma-3-4b as published                   gemma-3-4b of transformers 5
model.norm.weight          language_model.model.norm.weight          model.language_model.norm.weight
lm_head.weight             language_model.lm_head.weight             lm_head.weight
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from raycache.checkpoint.stored_slice import StoredSlice
    from raycache.checkpoint.tensor_files import WeightSource

_ALWAYS_THERE = ("model.embed_tokens.weight", "model.norm.weight")
"""Tensors that show which prefixes a checkpoint uses."""


@dataclass(frozen=True)
class Prefixes:
    """Mapping between the tensor names of a family and of a checkpoint; names with other prefixes are equal.

    Attributes:
        pairs: (prefix of the family, prefix of the checkpoint), including the last dot.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def published(self, name: str) -> str:
        """The checkpoint's name of the family's tensor `name`."""
        return _replaced(name, self.pairs)

    def ours(self, name: str) -> str:
        """The family's name of the checkpoint's tensor `name`."""
        return _replaced(name, [(published, ours) for ours, published in self.pairs])


class PrefixedSource:
    """A weight source with the family's tensor names, over one with the checkpoint's."""

    def __init__(self, source: WeightSource, prefixes: Prefixes) -> None:
        self._source = source
        self._prefixes = prefixes

    def has(self, name: str) -> bool:
        return self._source.has(self._prefixes.published(name))

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        return self._source.read(self._prefixes.published(name), shape=shape, axis=axis, start=start, stop=stop)

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> StoredSlice | None:
        return self._source.stored(self._prefixes.published(name), shape=shape, axis=axis, start=start, stop=stop)


def prefixes_of(source: WeightSource, known: Sequence[Prefixes]) -> Prefixes:
    """Find out which of the known prefixes a checkpoint uses; the first ones if it matches none."""
    found = (own for own in known if any(source.has(own.published(name)) for name in _ALWAYS_THERE))
    return next(found, known[0] if known else Prefixes())


def _replaced(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    return next((new + name[len(old) :] for old, new in pairs if name.startswith(old)), name)
