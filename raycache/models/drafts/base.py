"""The interface of draft models, which draft tokens for another model, the target.

    small model         token t                        -> prediction of the token after t
    prediction layer    features of t, next token u    -> prediction of the token after u

The features of t are computed by the target. The cache entry of a prediction layer for u is at the position of t, so
that it has an entry for every position in the target's cache, and none is missing when another sequence reuses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens, N of them to draft after, F features taken from the target, V vocabulary of the
# target.


class DraftModel(Protocol):
    """Drafts tokens on the ranks of the last stage. Run under torch.inference_mode.

    Attributes:
        num_features: F; 0 for models that take tokens only.
    """

    num_features: int

    def features(self, hidden: Tensor) -> Tensor:
        """Recorded hidden states of the target, or its last one, [T, C] -> [T, F]; not called if F is 0."""
        ...

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """[T] token ids and [T, F] -> [T, F], which takes the place of the target's features in the next pass."""
        ...

    def logits(self, found: Tensor) -> Tensor:
        """[N, F] -> [N, V]; tokens outside of the draft model's vocabulary get the lowest finite logit."""
        ...

    def over_cp(self, split: CpSplit) -> DraftModel:
        """The same draft model for steps that compute all tokens on every cp rank, with its weights split over cp.

        Its weights are views, and its logits are on every rank of the stage.

        Raises:
            NotSplitError: a layer cannot be split; the message says why.
        """
        ...


def widened(scores: Tensor, size: int, *, known: Tensor | None = None) -> Tensor:
    """Extend logits [N, D] of some tokens to those of a vocabulary, [N, size].

    Args:
        known: int64 [D], ids of these tokens; by default the first D.
    """
    if scores.shape[1] == size and known is None:
        return scores
    every = scores.new_full((len(scores), size), torch.finfo(scores.dtype).min)
    ids = torch.arange(scores.shape[1], device=scores.device) if known is None else known
    return every.index_copy_(1, ids, scores)
