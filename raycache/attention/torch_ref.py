"""The readable backend: the design's one formula in plain torch, on any device. It is the oracle of the fast ones.

    out = merge( causal(new tokens of this chunk), all(prefix held by cp rank 0), ..., all(prefix held by cp rank n-1) )

1. Gather q, k, v of the new tokens over cp.
2. Write the tokens that this rank owns into its pages.
3. Causal part: this rank's queries against the chunk's keys.
4. Prefix part: all queries against this rank's tokens; partial results go back to the queries' ranks by all-to-all.
5. Merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycache.attention.base import Capabilities
from raycache.attention.merge import attend_all, attend_causal, merge
from raycache.engine.inputs import StepInputs
from raycache.memory.device import KVView


class TorchBackend:
    """Plain torch attention."""

    capabilities = Capabilities(
        name="torch",
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
        max_head_dim=1024,
    )

    def plan(self, inputs: StepInputs, *, scale: float) -> TorchStep:
        return TorchStep(inputs, scale=scale)


class TorchStep:
    """Attention of one step."""

    def __init__(self, inputs: StepInputs, *, scale: float) -> None:
        self._inputs = inputs
        self._scale = scale
        self._has_chunks = any(row.runs for row in inputs.rows)
        self._cp_has_chunks = any(len(row.tokens) > 1 for row in inputs.rows)

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = self._inputs
        q_all, k_all, v_all = self._gather(q, k, v)
        view.write(inputs.slots, k_all[inputs.owned], v_all[inputs.owned])
        out_all, lse_all = self._prefix_part(view, q_all)
        if inputs.ctx.cp.size == 1 and not self._cp_has_chunks:
            return out_all
        outs, lses = self._return_to_queries(out_all, lse_all, num_local=q.shape[0])
        if self._has_chunks:
            out, lse = self._causal_part(q, k_all, v_all)
            outs, lses = torch.cat([outs, out[None]]), torch.cat([lses, lse[None]])
        return merge(outs, lses)

    def _gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's [T_local, H, D] -> all cp ranks' [T, H, D]."""
        inputs = self._inputs
        if inputs.ctx.cp.size == 1:
            return q, k, v
        heads = [q.shape[1], k.shape[1], v.shape[1]]
        mine = q.new_zeros((inputs.padded_len, sum(heads), q.shape[2]))
        mine[: q.shape[0]] = torch.cat([q, k, v], dim=1)
        every = inputs.ctx.cp.all_gather(mine).flatten(0, 1)[inputs.gather]
        q_all, k_all, v_all = every.split(heads, dim=1)
        return q_all.contiguous(), k_all, v_all

    def _prefix_part(self, view: KVView, q: Tensor) -> tuple[Tensor, Tensor]:
        """All queries [T, Hq, D] against the tokens in this rank's pages."""
        out = torch.zeros_like(q)
        lse = _no_keys(q)
        for row in self._inputs.rows:
            if row.prefix:
                tokens = slice(row.tokens.start, row.tokens.stop)
                keys, values = view.read(row.prefix)
                out[tokens], lse[tokens] = attend_all(q[tokens], keys, values, scale=self._scale)
        return out, lse

    def _return_to_queries(self, out: Tensor, lse: Tensor, *, num_local: int) -> tuple[Tensor, Tensor]:
        """Parts of all queries on this rank -> parts of this rank's queries, [cp, T_local, ...]."""
        inputs = self._inputs
        if inputs.ctx.cp.size == 1:
            return out[None], lse[None]
        both = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)[inputs.scatter]
        parts = inputs.ctx.cp.all_to_all(both.unflatten(0, (inputs.ctx.cp.size, inputs.padded_len)))[:, :num_local]
        return parts[..., :-1].to(out.dtype), parts[..., -1]

    def _causal_part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's queries [T_local, Hq, D] against the new keys [T, Hkv, D] of their row up to themselves."""
        out = torch.zeros_like(q)
        lse = _no_keys(q)
        for row in self._inputs.rows:
            keys, values = (x[row.tokens.start : row.tokens.stop] for x in (k, v))
            place = row.local.start
            for run in row.runs:
                mine = slice(place, place + len(run))
                out[mine], lse[mine] = self._run_of_chunk(q[mine], keys, values, run)
                place += len(run)
        return out, lse

    def _run_of_chunk(self, q: Tensor, k: Tensor, v: Tensor, run: range) -> tuple[Tensor, Tensor]:
        """Queries of a run: all keys before the run, and causally those of the run itself."""
        own = slice(run.start, run.stop)
        out, lse = attend_causal(q, k[own], v[own], scale=self._scale)
        if run.start == 0:
            return out, lse
        before, before_lse = attend_all(q, k[: run.start], v[: run.start], scale=self._scale)
        merged = merge(torch.stack([out, before]), torch.stack([lse, before_lse]))
        return merged, torch.logaddexp(lse, before_lse)


def _no_keys(q: Tensor) -> Tensor:
    """Log-sum-exp over nothing, for queries [T, Hq, D]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
