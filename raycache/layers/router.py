"""Routers: choose the experts of each token and their weights.

    softmax    the top k of the probabilities over all experts, optionally renormalised to sum to one
    sigmoid    an independent score per expert; a learned correction affects the choice but not the weights; the choice
               can be limited to the best groups of experts ("DeepSeek-V3", arXiv 2412.19437, section 2.1.2)

A softmax over the logits of the chosen experts only equals the first kind with renormalised weights: the denominator of
the full softmax cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers import fused
from raycache.layers.precision import precise

# Shapes in this file: T tokens, C hidden size, E experts, k of them per token, G groups of E / G consecutive experts.

MOST = 1024
"""Most experts that the kernel chooses from."""

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[T, C] -> (weights [T, k] in at least float32, expert ids [T, k] int64), identical on all tp ranks."""


class SoftmaxRouter:
    """The k most probable experts.

    Args:
        weight: [E, C]; logits are computed in its dtype, the rest in at least float32.
        bias: [E], or None.
        renormalise: make the k weights sum to one.
    """

    def __init__(self, weight: Tensor, *, top_k: int, renormalise: bool, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._top_k = top_k
        self._renormalise = renormalise

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.to(self._weight.dtype), self._weight, self._bias)
        if kernels := _kernels_for(x, logits.shape[1]):
            chosen: tuple[Tensor, Tensor] = kernels.choose(
                logits, None, top_k=self._top_k, renormalise=self._renormalise
            )
            return chosen
        logits = precise(logits)
        weights, ids = logits.softmax(dim=-1).topk(self._top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self._renormalise else weights), ids


class SigmoidRouter:
    """The k experts with the best corrected scores, within the best groups.

    Groups are ranked by the sum of their two best corrected scores.

    Args:
        weight: [E, C]; the router computes in its dtype, at least float32.
        correction: [E], added to the scores for the choice only.
        num_groups: G; 1 chooses among all experts.
        top_groups: number of groups that a token's experts come from.
        renormalise: make the k weights sum to one before they are scaled.
        scale: factor of the weights.
    """

    def __init__(
        self,
        weight: Tensor,
        correction: Tensor,
        *,
        top_k: int,
        num_groups: int,
        top_groups: int,
        renormalise: bool,
        scale: float,
    ) -> None:
        self._weight = precise(weight)
        self._correction = correction.to(self._weight.dtype)
        self._top_k = top_k
        self._num_groups = num_groups
        self._top_groups = top_groups
        self._renormalise = renormalise
        self._scale = scale

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if kernels := _kernels_for(x, len(self._weight), self._num_groups):
            return self._by(kernels, x)
        scores = F.linear(x.to(self._weight.dtype), self._weight).sigmoid()
        ids = self._limit(scores + self._correction).topk(self._top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self._renormalise:
            # All scores of a token can be zero; checkpoints were trained with this epsilon.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self._scale, ids

    def _by(self, kernels: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        how = {
            "top_k": self._top_k,
            "num_groups": self._num_groups,
            "top_groups": self._top_groups,
            "renormalise": self._renormalise,
            "scale": self._scale,
        }
        chosen: tuple[Tensor, Tensor]
        is_fit = x.dtype == torch.bfloat16 and self._weight.dtype == torch.float32 and self._weight.is_contiguous()
        if is_fit and len(x) <= kernels.MOST_TOKENS:
            chosen = kernels.choose_by_scores(x, self._weight, self._correction, **how)
        else:
            logits = F.linear(x.to(self._weight.dtype), self._weight)
            chosen = kernels.choose(logits, self._correction, **how)
        return chosen

    def _limit(self, choice: Tensor) -> Tensor:
        """Set scores [T, E] outside of each token's best groups to -inf."""
        if self._num_groups == self._top_groups:
            return choice
        groups = choice.view(choice.shape[0], self._num_groups, choice.shape[1] // self._num_groups)
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self._top_groups, dim=-1).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def _kernels_for(x: Tensor, count: int, num_groups: int = 1) -> Any:
    """The kernels of routers if they support x and `count` experts, else None."""
    is_even = num_groups == 1 or all(size & (size - 1) == 0 for size in (num_groups, count // num_groups))
    return _kernels() if count <= MOST and is_even and fused.has_kernels(x) else None


@cache
def _kernels() -> Any:
    from raycache.layers import router_kernels

    return router_kernels
