"""Recurrent layers in plain torch: linear attention with a decaying state, and a short convolution.

A head's state S is a [Dk, Dv] matrix. Each token decays it, writes to it and reads from it:

    S <- exp(g) * S                        g <= 0, one for the head or one per row of S
    S <- S + k (v)^T                       linear attention
    S <- S + k (beta * (v - S^T k))^T      with beta: the delta rule, which replaces the value stored under the key
    out = S^T q

    layer                         g              q, k, v
    Mamba2                        dt * A         C, B, dt * x        "Transformers are SSMs", arXiv 2405.21060
    lightning attention           -slope                             arXiv 2401.04658
    gated delta net               per head                           with beta; arXiv 2412.06464
    Kimi delta attention (KDA)    per channel                        with beta; arXiv 2510.26692

Scales, norms, activations and skip connections are up to the caller. `scan` processes one sequence in chunks: it uses
matrix products within a chunk and passes only the state between chunks. `step` processes one token of many sequences.
No exponent is positive and no sums of decays are subtracted from each other in float32, so that every g <= 0 is safe
and precise.

Shapes in this file: T tokens, N sequences, Hk key heads, Hv value heads, Dk and Dv head sizes, n chunks of C tokens,
K taps and F channels of the convolution. Value head h uses key head h // (Hv / Hk).
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from raycache.rounding import power_of_2

CHUNK = 64  # tokens, a power of two; results do not depend on it
# Tokens whose chunks are prepared together, multiples of CHUNK; bounds temporary memory. On a CPU, tensors that fit the
# caches are twice as fast as those of thousands of tokens; on a GPU, fewer launches are faster.
CPU_RUN = 256
DEVICE_RUN = 4096
NO_MEMORY = -1e4  # lower limit of log decays: exp of it is 0 even in float64, and differences stay defined


def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process the next T >= 1 tokens of one sequence.

    Args:
        q, k: [T, Hk, Dk].
        v: [T, Hv, Dv], Hk divides Hv.
        g: log decay <= 0, [T, Hv, 1] or [T, Hv, Dk].
        beta: [T, Hv] for the delta rule, or None.
        state: [Hv, Dk, Dv] before the first token; not modified.
    Returns:
        out [T, Hv, Dv] in v's dtype, and the state after the last token, a new tensor in state's dtype. Computed in
        float32, or in float64 if q, k, v, g or state is float64.
    """
    tokens = len(v)
    current = state.to(_compute_dtype(q, k, v, g, state))
    run = CPU_RUN if v.device.type == "cpu" else DEVICE_RUN
    outs = []
    for part in (slice(start, start + run) for start in range(0, tokens, run)):
        out, current = _scan_run(q[part], k[part], v[part], g[part], None if beta is None else beta[part], current)
        outs.append(out)
    return torch.cat(outs), current.to(state.dtype)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process one token of each of N sequences.

    Args:
        q, k: [N, Hk, Dk].
        v: [N, Hv, Dv].
        g: [N, Hv, 1] or [N, Hv, Dk].
        beta: [N, Hv] for the delta rule, or None.
        state: [N, Hv, Dk, Dv]; not modified.
    Returns:
        out [N, Hv, Dv] and the new state, with dtypes as in `scan`.
    """
    heads = v.shape[1]
    dtype = _compute_dtype(q, k, v, g, state)
    q, k = (x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    written = v.to(dtype)
    current = state * g.to(dtype).exp()[..., None]
    if beta is not None:
        written = beta.to(dtype)[..., None] * (written - _read(current, k))
    current.addcmul_(k[..., :, None], written[..., None, :])
    return _read(current, q).to(v.dtype), current.to(state.dtype)


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel of one sequence over its last K inputs.

    Args:
        x: [T, F], T >= 1.
        state: [F, K - 1], the inputs before x, oldest first; not modified.
        weight: [F, K], the tap of the newest input last.
        bias: [F] or None.
    Returns:
        y [T, F] in x's dtype, summed in at least float32, without activation; and the new state [F, K - 1], a new
        tensor in state's dtype.
    """
    dtype = _compute_dtype(x, state, weight)
    inputs = torch.cat([state.mT.to(dtype), x.to(dtype)])
    taps = weight.to(dtype)
    y = inputs[: len(x)] * taps[:, 0]
    for tap in range(1, weight.shape[1]):
        y.addcmul_(inputs[tap : tap + len(x)], taps[:, tap])
    if bias is not None:
        y += bias
    return y.to(x.dtype), _copy(inputs[len(x) :].mT, state)


def causal_conv_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`causal_conv` of one token of each of N sequences: x [N, F], state [N, F, K - 1] -> y [N, F], new state."""
    dtype = _compute_dtype(x, state, weight)
    inputs = torch.cat([state.to(dtype), x.to(dtype)[..., None]], dim=-1)
    y = (inputs * weight).sum(-1)
    if bias is not None:
        y += bias
    return y.to(x.dtype), _copy(inputs[..., 1:], state)


def _scan_run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan` of a few chunks, in state's dtype."""
    tokens, heads = v.shape[:2]
    length = min(CHUNK, power_of_2(tokens))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    q, k, values, g = (_chunks(x.to(state.dtype), length) for x in (q, k, v, g))
    rows = torch.stack([q] if beta is None else [q, k], dim=-2)
    decayed_products = _products_per_head if g.shape[-1] == 1 else _products_per_channel
    products, before, after = decayed_products(rows, k, g)
    reads = products[..., 0, :].tril()
    writes = None
    if beta is not None:
        writes = _delta_writes(products[..., 1, :], _chunks(beta.to(state.dtype)[..., None], length))

    arriving, leaving = before.exp(), after.exp()
    q_start, k_start, k_end = q * arriving, k * arriving, k * leaving
    outs = torch.empty_like(values)
    for c in range(len(values)):
        written = values[c]
        if writes is not None:
            written = writes[c] @ (written - k_start[c] @ state)
        outs[c] = q_start[c] @ state + reads[c] @ written
        state = state * arriving[c, :, -1, :, None] + k_end[c].mT @ written
    return outs.transpose(1, 2).flatten(0, 1)[:tokens].to(v.dtype), state


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def _copy(view: Tensor, state: Tensor) -> Tensor:
    """Copy a part of the inputs to a new state, so that it does not keep all of them alive."""
    own = torch.empty(view.shape, dtype=state.dtype, device=state.device)
    return own.copy_(view)


def _chunks(x: Tensor, length: int) -> Tensor:
    """[T, Hv, D] -> [n, Hv, C, D]. The last chunk is padded with zeros, which neither decay nor write."""
    missing = -len(x) % length
    padded: Tensor = functional.pad(x, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, length))
    return padded.transpose(1, 2).contiguous()


def _products_per_head(rows: Tensor, cols: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_products_per_channel` for one decay per head, g [n, Hv, C, 1]: a matrix product times the decays of pairs."""
    # In float64, since differences of sums lose small decays in float32; cheap, since g has no channels.
    total = g.double().clamp(min=NO_MEMORY).cumsum(-2)
    between = (total - total.mT).tril().exp().to(rows.dtype)
    products = (rows.flatten(-3, -2) @ cols.mT).unflatten(-2, rows.shape[-3:-1]) * between[..., None, :]
    return products, total.to(rows.dtype), (total[..., -1:, :] - total).to(rows.dtype)


def _products_per_channel(rows: Tensor, cols: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products of all pairs of tokens i >= j of a chunk, with the decay between them.

    Works on blocks of doubling size. The decay from the left half of a block to its right half is that up to the middle
    times that from the middle on, so these pairs are one matrix product with factors of at most 1:

        j, i in one token | C / 2 products of 1 x 1 | C / 4 of 2 x 2 | ... | one of C / 2 x C / 2

    Args:
        rows: [n, Hv, C, R, Dk], R vectors per token.
        cols: [n, Hv, C, Dk].
        g: [n, Hv, C, Dk].
    Returns:
        products [n, Hv, C, R, C]: sum over channels of rows_i * cols_j * exp(g_(j+1) + ... + g_i), 0 or anything finite
        for i < j; and the sums of g from the start of the chunk up to each token, and from after it to the end, [n, Hv,
        C, Dk].
    """
    length = g.shape[-2]
    before, after = g.clone(), torch.zeros_like(g)  # within the current block
    products = rows.new_zeros(*rows.shape[:-1], length)
    products.diagonal(dim1=-3, dim2=-1).copy_((rows * cols[..., None, :]).sum(-1).mT)
    half = 1
    while half < length:
        halves = (length // (2 * half), 2, half)
        left_after = after.unflatten(-2, halves).select(-3, 0)
        left_before, right_before = before.unflatten(-2, halves).unbind(-3)
        right = rows.unflatten(-3, halves).select(-4, 1) * right_before.exp()[..., None, :]
        left = cols.unflatten(-2, halves).select(-3, 0) * left_after.exp()
        pairs = (right.flatten(-3, -2) @ left.mT).unflatten(-2, right.shape[-3:-1])
        target = products.unflatten(-3, halves).select(-4, 1).unflatten(-1, halves).select(-2, 0)
        target.diagonal(dim1=-5, dim2=-2).copy_(pairs.movedim(-4, -1))
        left_after += right_before[..., -1:, :]
        right_before += left_before[..., -1:, :]
        half *= 2
    return products, before, after


def _delta_writes(products: Tensor, beta: Tensor) -> Tensor:
    """Matrix [n, Hv, C, C] that maps the values u of a chunk's tokens to what they write, w.

    Earlier tokens of the chunk have written under the key of token i: w_i = beta_i * (u_i - sum over j < i of
    products_ij * w_j), that is (1 + tril(beta * products, -1)) w = beta * u. "Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length", arXiv 2406.06484.

    Args:
        products: keys with keys, [n, Hv, C, C].
        beta: [n, Hv, C, 1].
    """
    right = torch.diag_embed(beta[..., 0])
    left = (beta * products).tril(-1)
    solved: Tensor = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
    return solved


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Read states [N, Hv, Dk, Dv] with keys [N, Hv, Dk] -> [N, Hv, Dv]."""
    return (key[..., None, :] @ state)[..., 0, :]
