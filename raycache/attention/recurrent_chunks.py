"""Long rows of recurrent layers with a delta rule, computed by the Triton kernels of flash-linear-attention.

All long rows of a step are one call: of chunk_gated_delta_rule for one decay per head, of chunk_kda for one per
channel. Chunks of 64 tokens use matrix products in half precision with float32 sums; the state is float32.

FlashInfer's prefill kernels for such layers need a newer GPU than Hopper, or the compiler of CUTLASS.
"""

# Shapes in this file: T tokens of the step, L of them in long rows, N long rows, Hk key heads, Hv value heads, Dk and
# Dv head sizes.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from raycache.attention.layout import StepLayout
from raycache.attention.recurrent_plain import FORGOTTEN
from raycache.step.inputs import RowInputs

TILES: Mapping[str, Mapping[str, int]] = {
    "utils.cumsum:chunk_local_cumsum_scalar_kernel": {"num_warps": 2},
    "utils.cumsum:chunk_local_cumsum_vector_kernel": {"BS": 64, "num_warps": 4},
    "common.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {
        "BV": 32,
        "num_warps": 4,
        "num_stages": 3,
    },
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

    def __init__(self, rows: Sequence[RowInputs], layout: StepLayout) -> None:
        bounds = list(accumulate((len(row.tokens) for row in rows), initial=0))
        has_all = bounds[-1] == layout.inputs.num_tokens
        self.tokens = None if has_all else layout.on_device([token for row in rows for token in row.tokens])
        self._reads = layout.on_device([max(row.read_state, 0) for row in rows])
        self._writes = layout.on_device([row.write_state for row in rows])
        self._fresh = layout.on_device([i for i, row in enumerate(rows) if row.read_state < 0])
        self._bounds = layout.on_device(bounds)
        # The library computes the number of chunks from a copy on the host, so that it does not wait for the device.
        self._bounds_on_host = torch.tensor(bounds)

    def scan(
        self, states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, half: torch.dtype
    ) -> Tensor:
        """Process the rows' tokens.

        Args:
            states: [slots, Hv, Dk, Dv] float32, read and written.
            q, k, v, g, beta: as in AttentionStep.scan; Dk is at most recurrent_plain.MAX_KEY_DIM.
            half: dtype of products, bfloat16 or float16.
        Returns:
            [L, Hv, Dv] in v's dtype.
        """
        dtype = v.dtype
        q, k, v = (self._take(x).to(half) for x in (q, k, v))
        g, beta = self._take(g).float().clamp(min=FORGOTTEN), self._take(beta).float()
        is_per_head = g.shape[-1] == 1
        out, after = _kernel("gated_delta_rule" if is_per_head else "kda")(
            q,
            k,
            v,
            g[..., 0] if is_per_head else g,
            beta,
            scale=1.0,
            initial_state=states[self._reads].index_fill_(0, self._fresh, 0),
            output_final_state=True,
            cu_seqlens=self._bounds,
            cu_seqlens_cpu=self._bounds_on_host,
        )
        states.index_copy_(0, self._writes, after)
        found: Tensor = out[0]
        return found.to(dtype)

    def _take(self, x: Tensor) -> Tensor:
        """[T, ...] -> [1, L, ...]."""
        return (x if self.tokens is None else x[self.tokens])[None]


@cache
def has_library() -> bool:
    """Whether flash-linear-attention and its dependencies can be imported. The first call takes some seconds."""
    try:
        import_module("fla.ops")
    except ImportError:
        return False
    return True


@cache
def _kernel(module: str) -> Callable[..., Any]:
    """The chunk-parallel function of a module of flash-linear-attention, with one fixed configuration per kernel.

    By default it tunes every kernel at first use: up to ninety compilations of a second or two during the first prompt.
    The winner depends on timing noise, so ranks and runs would round differently.
    """
    triton = import_module("triton")
    for place, values in TILES.items():
        file, name = place.split(":")
        sizes = {key: value for key, value in values.items() if not key.startswith("num_")}
        launch = {key: value for key, value in values.items() if key.startswith("num_")}
        # `.fn` of the heuristics decorator is the tuner.
        vars(import_module(f"fla.ops.{file}"))[name].fn.configs = [triton.Config(sizes, **launch)]
    function: Callable[..., Any] = vars(import_module(f"fla.ops.{module}"))[f"chunk_{module}"]
    return function
