r"""Attention residuals: what a part of a layer takes is a mixture of sums of what earlier parts gave, chosen per token
("Kimi K3", section 2; `attn_res_block_size` of config.json).

Layers form blocks. A stream holds one sum per block, the one in progress first:

    [ prefix | sum of block n-1 | ... | sum of block 0 = embedding ]        T x P C features, P = n + 1 planes

    score of a plane = proj . rms_norm(plane)      mixture = sum over planes of softmax(scores) * plane

The first part of a block begins a new prefix, so the stream grows by a plane there. Planes are mixed whatever their
order is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass, Mixer
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise

# Shapes in this file: T packed tokens, C hidden size, P planes of the stream.


class PlaneMixture:
    """Mixes the planes of a stream: [T, P C] -> [T, C].

    Args:
        query: [C], the norm's weight times the projection, at least float32.
        eps: of the norm.
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
        mixture: of the planes.
        norm: of the mixer's input.
        mixer: attention or feed-forward part.
        starts_block: whether the output begins a new prefix in front of the others, instead of being added to it.
    """

    def __init__(self, mixture: PlaneMixture, norm: RMSNorm, mixer: Mixer, *, starts_block: bool) -> None:
        self._mixture = mixture
        self._norm = norm
        self._mixer = mixer
        self._starts_block = starts_block

    def __call__(self, stream: Tensor, run: ForwardPass) -> Tensor:
        """[T, P C] -> [T, P C], the same tensor, or new [T, (P + 1) C]."""
        out = self._mixer(self._norm(self._mixture(stream)), run)
        if self._starts_block:
            return torch.cat((out, stream), dim=1)
        stream[:, : out.shape[1]] += out
        return stream


class MixedNorm:
    """The last norm, of the mixture of a stream's planes.

    Args:
        mixture: of the planes.
        norm: of the mixture.
    """

    def __init__(self, mixture: PlaneMixture, norm: RMSNorm) -> None:
        self._mixture = mixture
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """[T, P C] -> new [T, C]."""
        return self._norm(self._mixture(x))

    def add(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of hidden + delta, hidden + delta); delta may be overwritten."""
        total = delta.add_(hidden)
        return self(total), total
