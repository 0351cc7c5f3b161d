r"""The projections around multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1).

    x --- q_a --- norm --- q_b ------- queries of all heads: a plain part and a rotary part
     |              `--- indexer ----- which tokens they see, in sparse models
     |`-- kv_a --- norm -------------- latent \
     |     `----------- rope --------- rotary /  kept in the cache, one for all heads
     `--- gate ----------------------- of the heads' outputs, in some models

Keys and values are made of latents where they are attended to, so that the cache holds nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raycache.attention.base import LatentProjection
from raycache.layers.forward_pass import ForwardPass
from raycache.layers.indexer import Selector
from raycache.layers.linear import ColumnLinear, RowLinear
from raycache.layers.norm import RMSNorm
from raycache.layers.precision import precise
from raycache.layers.rope import Rotary

# Shapes in this file: T packed tokens of this rank, C hidden size, H heads of this tp rank, Q rank of queries, R of
# latents, Dn and Dr sizes of a head's plain and rotary part, Dv of its values.


@dataclass(frozen=True)
class LatentInputs:
    """What is made of the layer's input.

    Attributes:
        down: C -> [Q +] R + Dr features, whole on every tp rank: q_a if there is one, then kv_a.
        latent_norm: of the R features.
        query_norm: of the Q features; None where queries are made of the input itself.
        query: Q or C features -> H * (Dn + Dr).
        gate: C -> H or H * Dv, whose sigmoid multiplies the heads' outputs, or None.
    """

    down: ColumnLinear
    latent_norm: RMSNorm
    query_norm: RMSNorm | None
    query: ColumnLinear
    gate: ColumnLinear | None


class LatentAttention:
    """Queries and latents, their rotary embedding, selection, attention, output projection.

    Args:
        layer: its number in the whole model.
        inputs: what comes before attention.
        projection: makes keys and values of latents.
        out: H * Dv features back to the hidden size, summed over tp.
        rotary: of the rotary parts, or None for no positions.
        rope_dim: Dr.
        scale: of the scores.
        selector: of the tokens that each query sees, or None for all before it.
    """

    def __init__(
        self,
        layer: int,
        inputs: LatentInputs,
        projection: LatentProjection,
        out: RowLinear,
        *,
        rotary: Rotary | None,
        rope_dim: int,
        scale: float,
        selector: Selector | None = None,
    ) -> None:
        self._layer = layer
        self._inputs = inputs
        self._projection = projection
        self._out = out
        self._rotary = rotary
        self._scale = scale
        self._selector = selector
        heads, plain_dim, rank = projection.key.shape
        self._head_shape = (heads, plain_dim + rope_dim)
        self._plain_dim = plain_dim
        self._key_sizes = [rank, rope_dim]

    def __call__(self, x: Tensor, run: ForwardPass) -> Tensor:
        """[T, C] -> new [T, C]."""
        source, latent, rope = self._down(x)
        q = self._inputs.query(source).view(x.shape[0], *self._head_shape)
        if self._rotary is not None:
            turn = run.rotation(self._rotary, q.dtype)
            q_rope = q[..., self._plain_dim :]
            turn(q_rope, out=q_rope)
            rope = turn(rope[:, None])[:, 0]
        out = run.step.attend_latent(
            run.pool.latent(self._layer),
            q,
            latent,
            rope,
            self._projection,
            scale=self._scale,
            selection=None if self._selector is None else self._selector(x, source, run),
        )
        if self._inputs.gate is not None:
            gate = precise(self._inputs.gate(x)).sigmoid()
            out = out * gate.to(x.dtype).unflatten(1, (out.shape[1], -1))
        return self._out(out.flatten(1))

    def _down(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> what queries are made of [T, Q or C], normalised latents [T, R], keys' rotary part [T, Dr]."""
        features = self._inputs.down(x)
        query_rank = features.shape[1] - sum(self._key_sizes)
        low, latent, rope = features.split([query_rank, *self._key_sizes], dim=1)
        source = x if self._inputs.query_norm is None else self._inputs.query_norm(low)
        return source, self._inputs.latent_norm(latent), rope
