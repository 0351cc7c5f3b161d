"""Routers: choose the experts of each token and their weights.

    softmax    the top k of the probabilities over all experts, optionally renormalised to sum to one
    sigmoid    an independent score per expert; a learned correction affects the choice but not the weights; the choice
               can be limited to the best groups of experts ("DeepSeek-V3", arXiv 2412.19437, section 2.1.2)

A softmax over the logits of the chosen experts only equals the first kind with renormalised weights: the denominator of
the full softmax cancels.

Shared experts that are stored as the last of the routed ones are chosen for every token, after the others.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raycache.layers import fused
from raycache.layers.linear import linear
from raycache.layers.precision import precise

# Shapes in this file: T tokens, C hidden size, E experts, k of them per token, G groups of E / G consecutive experts, S
# shared experts.

MOST = 1024
"""Most experts that the kernel chooses from."""

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[T, C] -> (weights [T, k + S] in at least float32, expert ids [T, k + S] int64), identical on all tp ranks."""


@dataclass(frozen=True)
class Choice:
    """How kernels choose; see the routers.

    Attributes:
        count: E.
        has_gate: whether the weight of shared experts is the sigmoid of logit E, else 1.
    """

    count: int
    top_k: int
    renormalise: bool
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    num_shared: int = 0
    has_gate: bool = False


class SoftmaxRouter:
    """The k most probable experts.

    Args:
        weight: [E, C]; logits are computed in its dtype, the rest in at least float32.
        bias: [E], or None.
        renormalise: make the k weights sum to one.
        num_shared: S, experts E to E + S - 1.
        shared_gate: [1, C]; shared experts have the weight sigmoid(gate x), and there is no bias. None: a weight of 1.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        top_k: int,
        renormalise: bool,
        bias: Tensor | None = None,
        num_shared: int = 0,
        shared_gate: Tensor | None = None,
    ) -> None:
        assert shared_gate is None or bias is None, "a gate has no bias"
        self._weight = weight if shared_gate is None else _padded(torch.cat((weight, shared_gate)))
        self._bias = bias
        self._how = Choice(len(weight), top_k, renormalise, num_shared=num_shared, has_gate=shared_gate is not None)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        how, kernels = self._how, _kernels_for(x, self._how)
        chosen: tuple[Tensor, Tensor]
        # `linear` has a faster kernel for one or two tokens.
        if kernels and len(x) > 2 and kernels.are_few(len(x), how.count) and self._is_half(x):
            chosen = kernels.choose_by_probabilities(x, self._weight, self._bias, how)
            return chosen
        logits = linear(x.to(self._weight.dtype), self._weight, self._bias)
        if kernels:
            chosen = kernels.choose(logits, None, how)
            return chosen
        logits, gate = precise(logits).tensor_split((how.count,), dim=1)
        weights, ids = logits.softmax(dim=-1).topk(how.top_k, dim=-1)
        if how.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return _with_shared(weights, ids, how, gate=gate[:, :1] if how.has_gate else None)

    def _is_half(self, x: Tensor) -> bool:
        return x.dtype == self._weight.dtype == torch.bfloat16 and x.stride(-1) == 1 and self._weight.is_contiguous()


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
        self._how = Choice(len(weight), top_k, renormalise, num_groups, top_groups, scale)

    def with_shared(self, count: int) -> SigmoidRouter:
        """The same, which also chooses `count` shared experts, E and those after it, with a weight of 1."""
        own = copy(self)
        own._how = replace(self._how, num_shared=count)
        return own

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        how = self._how
        if kernels := _kernels_for(x, how):
            return self._by(kernels, x)
        scores = F.linear(x.to(self._weight.dtype), self._weight).sigmoid()
        ids = self._limit(scores + self._correction).topk(how.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if how.renormalise:
            # All scores of a token can be zero; checkpoints were trained with this epsilon.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return _with_shared(weights * how.scale, ids, how)

    def _by(self, kernels: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen: tuple[Tensor, Tensor]
        is_fit = x.dtype == torch.bfloat16 and self._weight.dtype == torch.float32 and self._weight.is_contiguous()
        if is_fit and len(x) <= kernels.MOST_TOKENS:
            chosen = kernels.choose_by_scores(x, self._weight, self._correction, self._how)
        else:
            logits = F.linear(x.to(self._weight.dtype), self._weight)
            chosen = kernels.choose(logits, self._correction, self._how)
        return chosen

    def _limit(self, choice: Tensor) -> Tensor:
        """Set scores [T, E] outside of each token's best groups to -inf."""
        how = self._how
        if how.num_groups == how.top_groups:
            return choice
        groups = choice.view(choice.shape[0], how.num_groups, choice.shape[1] // how.num_groups)
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(how.top_groups, dim=-1).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)


def _padded(weight: Tensor) -> Tensor:
    """The same with zeros behind its rows, up to a multiple of 8: others are multiplied by slow kernels."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 8))


def _with_shared(weights: Tensor, ids: Tensor, how: Choice, *, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the shared experts as well; `gate` [T, 1] are the logits of their weight."""
    if not how.num_shared:
        return weights, ids
    shares = weights.new_ones(len(weights), 1) if gate is None else gate.sigmoid()
    shared = torch.arange(how.count, how.count + how.num_shared, device=ids.device).expand(len(ids), -1)
    return torch.cat((weights, shares.expand_as(shared)), 1), torch.cat((ids, shared), 1)


def _kernels_for(x: Tensor, how: Choice) -> Any:
    """The kernels of routers if they support x and the choice, else None."""
    count, num_groups = how.count, how.num_groups
    is_even = num_groups == 1 or all(size & (size - 1) == 0 for size in (num_groups, count // num_groups))
    return _kernels() if count <= MOST and is_even and fused.has_kernels(x) else None


@cache
def _kernels() -> Any:
    from raycache.layers import router_kernels

    return router_kernels
