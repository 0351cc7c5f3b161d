"""Models that guess for another, the target: what they take of it, and what they give.

    small model         token t            -> what follows t
    prediction layer    after t, token u   -> what follows u       after t: what the target found behind t, u unknown

The rows of a prediction layer stand one place before their token, so that a row for every place of the target's cache
can be kept, and none is missing where another sequence goes on from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.models.decoder import Decoder, Norm

if TYPE_CHECKING:
    from raycache.layers.linear import ColumnLinear
    from raycache.models.base import Model

# Shapes in this file: T packed tokens, N of them to guess after, C hidden size, F features that a draft takes of its
# target, V the target's vocabulary.


class DraftModel(Protocol):
    """Guesses on the ranks of the last stage. Run under torch.inference_mode.

    Attributes:
        num_features: F. A row is what was found behind a token, and the next token; where it is 0, a token alone.
    """

    num_features: int

    def features(self, hidden: Tensor) -> Tensor:
        """What the target's last layer left, [T, C], or what is recorded -> [T, F]; only for one that takes them."""
        ...

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """[T] token ids and [T, F] -> [T, F]: what it found, which stands for the target's features in the next row."""
        ...

    def logits(self, found: Tensor) -> Tensor:
        """[N, F] -> [N, V]; tokens that it does not know are never likely."""
        ...


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
        """See DraftModel; never asked for."""
        raise AssertionError("a small model takes tokens alone")

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """See DraftModel."""
        return self._model.forward(self._model.embed(ids.clamp(max=self._last_id)), run)

    def logits(self, found: Tensor) -> Tensor:
        """See DraftModel."""
        return widened(self._model.logits(found)[:, : self._target_size], self._target_size)


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


class PredictionLayer:
    """Layers on top of the target's, with its embedding and head ("DeepSeek-V3", arXiv 2412.19437, section 2.2).

    Args:
        body: its layers, with the target's embedding and head and a norm of its own before that.
        embed_norm, hidden_norm: of what it joins.
        join: 2C -> C.
        target: whose last norm its features have passed.
        is_hidden_first: what the target found comes first in what it joins.
    """

    def __init__(
        self,
        body: Decoder,
        *,
        embed_norm: Norm,
        hidden_norm: Norm,
        join: ColumnLinear,
        target: Decoder,
        is_hidden_first: bool = False,
    ) -> None:
        self.num_features = join.weight.shape[0]
        self._body = body
        self._embed_norm, self._hidden_norm, self._join = embed_norm, hidden_norm, join
        self._target = target
        self._is_hidden_first = is_hidden_first

    def features(self, hidden: Tensor) -> Tensor:
        """See DraftModel."""
        return self._target.normed(hidden)

    def forward(self, ids: Tensor, features: Tensor | None, run: ForwardPass) -> Tensor:
        """See DraftModel."""
        assert features is not None, "a prediction layer takes what the target found"
        both = self._embed_norm(self._body.embed(ids)), self._hidden_norm(features)
        joined = self._join(torch.cat(both[::-1] if self._is_hidden_first else both, dim=-1))
        return self._body.normed(self._body.forward(joined, run))

    def logits(self, found: Tensor) -> Tensor:
        """See DraftModel."""
        return self._body.score(found)
