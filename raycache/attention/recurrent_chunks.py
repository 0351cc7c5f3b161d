"""Long rows of recurrent layers with a delta rule, in chunks of 64 tokens.

    prepare       all that does not depend on a state, for all rows of the step: kernels of flash-linear-attention
    pass_states   from chunk to chunk, a launch for all rows of a stage (attention/row_order.py): our own kernel
    finish        outputs of all rows: a kernel of flash-linear-attention

Matrix products are in half precision with float32 sums; the state is float32.

FlashInfer's prefill kernels for such layers need a newer GPU than Hopper, or the compiler of CUTLASS.
"""

# Shapes in this file: T tokens of the step, L of them in long rows, n chunks, Hk key heads, Hv value heads, Dk and
# Dv head sizes.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.recurrent_delta import Chains, Chunks, decays, pass_states
from raycache.attention.recurrent_plain import CHUNK
from raycache.attention.row_order import Chain
from raycache.parallel.uploads import Uploads
from raycache.step.inputs import RowInputs, StepInputs

TILES: Mapping[str, Mapping[str, int]] = {
    "common.chunk_o:chunk_fwd_kernel_o": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 2},
    "gated_delta_rule.chunk_fwd:chunk_gated_delta_rule_fwd_kkt_solve_kernel": {"BK": 64, "num_warps": 1},
    "gated_delta_rule.wy_fast:recompute_w_u_fwd_kernel": {"num_warps": 4, "num_stages": 3},
    "kda.chunk_intra_token_parallel:chunk_kda_fwd_kernel_intra_token_parallel": {"BH": 8, "num_warps": 4},
    "kda.chunk_intra:chunk_kda_fwd_kernel_inter_solve_fused": {"BK": 32, "num_warps": 1},
    "kda.wy_fast:recompute_w_u_fwd_kda_kernel": {"num_warps": 4, "num_stages": 2},
    "gla.chunk:chunk_gla_fwd_kernel_o": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 2},
}
"""Module and kernel -> its configuration, the fastest on an H200 with heads of 128 features."""


class DeltaRows:
    """Long rows of a step.

    Attributes:
        tokens: int64 [L], the rows' tokens; None if they are all T.
    """

    def __init__(self, inputs: StepInputs, stages: Sequence[Sequence[Chain]]) -> None:
        """Lay out the long rows of a step.

        Args:
            stages: chains of long rows.
        """
        rows, uploads = inputs.rows, Uploads(inputs.ctx.device, room=16 * inputs.num_tokens + 4096)
        found = sorted(i for chains in stages for chain in chains for i in chain)
        counts = [len(rows[i].tokens) for i in found]
        bounds = list(accumulate(counts, initial=0))
        firsts = list(accumulate((-(-count // CHUNK) for count in counts), initial=0))
        has_all = bounds[-1] == inputs.num_tokens
        self.tokens = None if has_all else uploads.integers([token for i in found for token in rows[i].tokens])
        self._bounds = uploads.integers(bounds)
        pieces = [(n, at) for n, count in enumerate(counts) for at in range(0, count, CHUNK)]
        self._indices = _table([(n, at // CHUNK) for n, at in pieces], uploads)
        table = [(rows[found[n]].tokens.start + at, bounds[n] + at, min(CHUNK, counts[n] - at)) for n, at in pieces]
        self._chunks = Chunks(_table(table, uploads), bounds[-1])
        lines = {i: (bounds[n], counts[n], firsts[n], rows[i].write_state) for n, i in enumerate(found)}
        self._stages = [_chains(chains, rows, lines, uploads) for chains in stages]
        uploads.send()

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        half: torch.dtype,
        gates: DeltaRule | None = None,
    ) -> Prepared:
        """All that does not depend on a state.

        Args:
            q, k, v, g, beta: as in AttentionStep.scan; Dk is at most recurrent_plain.MAX_KEY_DIM.
            half: dtype of products, bfloat16 or float16.
            gates: if given, g and beta are what comes before its gates.
        """
        q, k, v, beta = (self._take(x).contiguous() for x in (q, k, v, beta))
        q, k, v, beta = q.to(half), k.to(half), v.to(half), beta.float()
        beta = beta if gates is None else beta.sigmoid()
        g = decays(self._chunks, g, gates=gates)
        rows = {"cu_seqlens": self._bounds, "chunk_indices": self._indices, "chunk_size": CHUNK}
        if g.shape[-1] == 1:
            module = _library()["gated_delta_rule.chunk_fwd"]
            w, u, _ = module.chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g[..., 0], beta=beta, **rows)
            products, keys = None, k
        else:
            module = _library()["kda.chunk_intra"]
            w, u, _, keys, products, _ = module.chunk_kda_fwd_intra(
                q=q, k=k, v=v, gk=g, beta=beta, scale=1.0, disable_recompute=False, **rows
            )
        states = q.new_empty(1, len(self._chunks.table), v.shape[2], q.shape[3], v.shape[3])
        return Prepared(q, keys, w, u, g, products, states, torch.empty_like(u))

    def pass_states(self, stage: int, states: Tensor, ready: Prepared) -> None:
        """Process the rows of a stage; `states` [slots, Hv, Dk, Dv] float32 are read and written."""
        if (chains := self._stages[stage]) is not None:
            pass_states(states, chains, k=ready.k, w=ready.w, u=ready.u, g=ready.g, to=(ready.states, ready.written))

    def finish(self, ready: Prepared) -> Tensor:
        """Outputs [L, Hv, Dv] in half precision, after all stages."""
        rows = {"cu_seqlens": self._bounds, "chunk_indices": self._indices, "chunk_size": CHUNK}
        shared = {"q": ready.q, "v": ready.written, "h": ready.states, "scale": 1.0, **rows}
        if ready.products is None:
            out = _library()["common.chunk_o"].chunk_fwd_o(k=ready.k, g=ready.g[..., 0], **shared)
        else:
            out = _library()["gla.chunk"].chunk_gla_fwd_o_gk(g=ready.g, A=ready.products, **shared)
        found: Tensor = out[0]
        return found

    def _take(self, x: Tensor) -> Tensor:
        """[T, ...] -> [1, L, ...]."""
        return (x if self.tokens is None else x[self.tokens])[None]


class Prepared(NamedTuple):
    """What chunks compute without a state.

    Attributes:
        q: [1, L, Hk, Dk].
        k: the same; with a decay per channel decayed to the end of the chunk, [1, L, Hv, Dk].
        w, u: what the chunks' tokens write is u - w state, [1, L, Hv, Dk] and [1, L, Hv, Dv].
        g: [1, L, Hv, 1 or Dk], see `recurrent_delta.decays`.
        products: queries with keys [1, L, Hv, CHUNK], or None for one decay per head.
        states: [1, n, Hv, Dk, Dv], at the start of each chunk; not yet written.
        written: shaped like u; not yet written.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    u: Tensor
    g: Tensor
    products: Tensor | None
    states: Tensor
    written: Tensor


def _chains(
    chains: Sequence[Chain],
    rows: Sequence[RowInputs],
    lines: Mapping[int, tuple[int, int, int, int]],
    uploads: Uploads,
) -> Chains | None:
    if not chains:
        return None
    firsts = accumulate(map(len, chains), initial=0)
    heads = [(first, len(chain), rows[chain[0]].read_state) for first, chain in zip(firsts, chains, strict=False)]
    return Chains(_table([lines[i] for chain in chains for i in chain], uploads), _table(heads, uploads))


def _table(lines: Sequence[tuple[int, ...]], uploads: Uploads) -> Tensor:
    """int64 [N, columns], N >= 1."""
    return uploads.integers([number for line in lines for number in line]).view(len(lines), -1)


@cache
def has_library() -> bool:
    """Whether flash-linear-attention and its dependencies can be imported. The first call takes some seconds."""
    try:
        import_module("fla.ops")
    except ImportError:
        return False
    return True


@cache
def _library() -> Mapping[str, Any]:
    """Modules of flash-linear-attention, with one fixed configuration per kernel.

    By default it tunes every kernel at first use: up to ninety compilations of a second or two during the first prompt.
    The winner depends on timing noise, so ranks and runs would round differently.
    """
    triton = import_module("triton")
    found: dict[str, Any] = {}
    for place, values in TILES.items():
        file, name = place.split(":")
        sizes = {key: value for key, value in values.items() if not key.startswith("num_")}
        launch = {key: value for key, value in values.items() if key.startswith("num_")}
        found[file] = import_module(f"fla.ops.{file}")
        # `.fn` of the heuristics decorator is the tuner.
        vars(found[file])[name].fn.configs = [triton.Config(sizes, **launch)]
    return found
