r"""Attention residuals: the input of a mixer is a mixture of sums of earlier outputs, weighted by attention per token
("Kimi K3", section 2; `attn_res_block_size` of config.json).

Layers form blocks. The residual stream holds one sum of outputs per block, called a plane, the current one first:

    [ prefix | sum of block n-1 | ... | sum of block 0 = embedding ]        T x P C features, P = n + 1 planes

    score of a plane = proj . rms_norm(plane)      mixture = sum over planes of softmax(scores) * plane

The first mixer of a block begins a new prefix, which adds a plane to the stream. The mixture does not depend on the
order of the planes.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise

if TYPE_CHECKING:
    from raycache.layers.cp_split import CpSplit

# Shapes in this file: T packed tokens, C hidden size, P planes of the stream.


class PlaneMixture:
    """Mixes the planes of a stream: [T, P C] -> [T, C].

    Args:
        query: [C], the norm's weight times the projection, at least float32.
    """

    def __init__(self, query: Tensor, eps: float) -> None:
        self._query = query
        self._eps = eps

    def __call__(self, stream: Tensor) -> Tensor:
        size = len(self._query)
        if stream.shape[1] == size:
            return stream
        planes = precise(stream.unflatten(1, (-1, size)))
        scale = planes.square().mean(dim=-1).add_(self._eps).rsqrt_()
        shares = (planes @ self._query).mul_(scale).softmax(dim=-1)
        return torch.einsum("tpc,tp->tc", planes, shares).to(stream.dtype)


class AttentionResidual:
    """prefix + mixer(norm(mixture)), where the prefix is the first plane.

    Args:
        starts_block: whether the output becomes a new first plane instead of being added to the prefix.
    """

    def __init__(self, mixture: PlaneMixture, norm: RMSNorm, mixer: Mixer, *, starts_block: bool) -> None:
        self._mixture = mixture
        self._norm = norm
        self._mixer = mixer
        self._starts_block = starts_block

    @property
    def is_position_wise(self) -> bool:
        return self._mixer.is_position_wise

    def __call__(self, stream: Tensor, run: ForwardPass) -> Tensor:
        """[T, P C] -> [T, P C], in place, or new [T, (P + 1) C]."""
        out = self._mixer(self._norm(self._mixture(stream)), run)
        if self._starts_block:
            return torch.cat((out, stream), dim=1)
        stream[:, : out.shape[1]] += out
        return stream

    def over_cp(self, split: CpSplit) -> AttentionResidual:
        own = copy(self)
        own._mixer = self._mixer.over_cp(split)
        return own


class MixedNorm:
    """The final norm of a model, applied to the mixture of the planes."""

    def __init__(self, mixture: PlaneMixture, norm: RMSNorm) -> None:
        self._mixture = mixture
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """[T, P C] -> new [T, C]."""
        return self._norm(self._mixture(x))

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of hidden + delta, hidden + delta); may overwrite delta."""
        total = delta.add_(hidden)
        return self(total), total
