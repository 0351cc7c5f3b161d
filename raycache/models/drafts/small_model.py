"""A model of its own as a draft model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.models.drafts.base import widened

if TYPE_CHECKING:
    from raycache.models.base import Model

# Shapes in this file: T packed tokens, N of them to draft after, F features, none of them the target's, V the target's
# vocabulary.


class SmallModel:
    """A model like any other, with the target's vocabulary.

    Args:
        model: whole.
        vocab_size: its own; tokens beyond it are known to the target only.
        target_vocab_size: V.
    """

    num_features = 0

    def __init__(self, model: Model, *, vocab_size: int, target_vocab_size: int) -> None:
        self._model = model
        self._last_id, self._target_size = vocab_size - 1, target_vocab_size

    def features(self, hidden: Tensor) -> Tensor:
        """Never called: `num_features` is 0."""
        raise AssertionError("a small model takes tokens alone")

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """Ids beyond the model's own vocabulary count as its last token."""
        return self._model.forward(self._model.embed(ids.clamp(max=self._last_id)), run)

    def logits(self, found: Tensor) -> Tensor:
        """[N, F] -> [N, V]."""
        return widened(self._model.logits(found)[:, : self._target_size], self._target_size)
