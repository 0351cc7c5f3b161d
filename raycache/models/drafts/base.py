"""What a model that drafts tokens for another, the target, takes of it and gives.

    small model         token t            -> what follows t
    prediction layer    after t, token u   -> what follows u       after t: the target's features behind t, u unknown

The rows of a prediction layer stand one place before their token, so that a row for every place of the target's cache
can be kept, and none is missing where another sequence goes on from there.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass

# Shapes in this file: T packed tokens, N of them to draft after, F features that a draft model takes of its target, V
# the target's vocabulary.


class DraftModel(Protocol):
    """Drafts tokens on the ranks of the last stage. Run under torch.inference_mode.

    Attributes:
        num_features: F. A row is the target's features behind a token, and the next token; where F is 0, a token alone.
    """

    num_features: int

    def features(self, hidden: Tensor) -> Tensor:
        """What the target's last layer left, [T, C], or what is recorded -> [T, F]; not called where F is 0."""
        ...

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """[T] token ids and [T, F] -> [T, F], which stands for the target's features in the next row."""
        ...

    def logits(self, found: Tensor) -> Tensor:
        """[N, F] -> [N, V]; tokens that it does not know are never likely."""
        ...


def widened(scores: Tensor, size: int, *, known: Tensor | None = None) -> Tensor:
    """Logits [N, D] of some tokens, as [N, size] of all.

    Args:
        scores: of those tokens.
        size: of the vocabulary.
        known: int64 [D], those tokens; by default the first D.
    """
    if scores.shape[1] == size and known is None:
        return scores
    every = scores.new_full((len(scores), size), torch.finfo(scores.dtype).min)
    places = torch.arange(scores.shape[1], device=scores.device) if known is None else known
    return every.index_copy_(1, places, scores)
