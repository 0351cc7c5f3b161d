"""Parts that layers with a delta rule share: short convolutions, normalised keys, the scan and a gated norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from raycache.layers.forward_pass import ForwardPass
from raycache.layers.precision import precise

L2_EPS = 1e-6
"""Added to the squared norm of queries and keys; the same in all models and not in any config.json."""

# Shapes in this file: T new tokens, Hk key heads and Hv value heads of Dk and Dv features each, K taps.


class DeltaRule:
    """silu(convolution) of queries, keys and values, then the scan with L2-normalised queries and keys.

    Runs on all tokens of the step and this rank's recurrent heads. Queries are also scaled by Dk ** -0.5.

    Args:
        layer: index in the whole model.
        taps: weights of the convolutions "q", "k" and "v", [H, D, K], the tap of the newest input last.
    """

    def __init__(self, layer: int, taps: Mapping[str, Tensor]) -> None:
        self._layer = layer
        self._taps = dict(taps)

    def __call__(self, run: ForwardPass, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Tensor:
        """Read and write the layer's states.

        Args:
            q, k: [T, Hk, Dk].
            v: [T, Hv, Dv].
            g: [T, Hv, 1] or [T, Hv, Dk], log of the decay, at least float32.
            beta: [T, Hv], at least float32.
        Returns:
            [T, Hv, Dv] in v's dtype.
        """
        view = run.pool.state(self._layer)

        def convolved(name: str, x: Tensor) -> Tensor:
            return F.silu(run.step.recurrent.convolve(view, name, x, self._taps[name], None), inplace=True)

        q, k, v = convolved("q", q), convolved("k", k), convolved("v", v)
        return run.step.recurrent.scan(view, unit_length(q).mul_(q.shape[-1] ** -0.5), unit_length(k), v, g, beta)


class GatedHeadNorm:
    """RMSNorm of each head, times the activated gate: [T, H, D] and [T, H, D] -> [T, H, D].

    Args:
        weight: [D], shared by all heads, at least float32.
        activation: of the gate, such as silu or sigmoid.
    """

    def __init__(self, weight: Tensor, eps: float, *, activation: Callable[[Tensor], Tensor]) -> None:
        self._weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps
        self._activation = activation

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute in at least float32; the result is new and in x's dtype."""
        normed = F.rms_norm(precise(x), self._shape, self._weight, self._eps)
        return normed.mul_(self._activation(precise(gate))).to(x.dtype)


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + L2_EPS) over the last dimension: new, in at least float32."""
    dim = x.shape[-1]
    return F.rms_norm(precise(x), (dim,), None, L2_EPS / dim).mul_(dim**-0.5)
