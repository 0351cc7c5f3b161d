"""A separate, smaller model as draft model."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.models.drafts.base import widened

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit
    from raycache.models.base import Model

# Shapes in this file: T packed tokens, N of them to draft after, F hidden size of the draft model, V vocabulary of the
# target.


class SmallModel:
    """A model with the target's tokenizer; the sizes of their vocabularies may differ.

    Args:
        model: with all its layers on this stage.
        vocab_size: of the draft model.
        target_vocab_size: V.
    """

    num_features = 0

    def __init__(self, model: Model, *, vocab_size: int, target_vocab_size: int) -> None:
        self._model = model
        self._last_id, self._target_size = vocab_size - 1, target_vocab_size

    def features(self, hidden: Tensor) -> Tensor:
        """Never called: `num_features` is 0."""
        raise AssertionError("a small model takes tokens only")

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """Run the model; ids beyond its vocabulary are replaced by its last token."""
        return self._model.forward(self._model.embed(ids.clamp(max=self._last_id)), run)

    def logits(self, found: Tensor) -> Tensor:
        """[N, F] -> [N, V]."""
        return widened(self._model.logits(found)[:, : self._target_size], self._target_size)

    def over_cp(self, split: CpSplit) -> SmallModel:
        """The same with its weights split over cp."""
        own = copy(self)
        own._model = self._model.over_cp(split)
        return own
