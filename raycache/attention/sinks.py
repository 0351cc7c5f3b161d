"""Attention sinks: an additional key per head without a value, which reduces the weights of all others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raycache.attention.triton_works import triton_works


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Multiply outputs by the share that the keys have beside the sinks, in place; returns them.

    On CUDA in bfloat16 and float16 it is one Triton kernel, so that a decode step has fewer launches.

    Args:
        out: [T, H, D], contiguous.
        lse: [T, H] float32, log-sum-exp of the scores, to base 2.
        sinks: [H], scores of the sinks.
    """
    if out.is_cuda and out.dtype in (torch.bfloat16, torch.float16) and out.numel() and triton_works():
        from raycache.attention import sink_kernels

        sink_kernels.apply_sinks(out, lse, sinks)
        return out
    share = torch.sigmoid(lse * math.log(2) - sinks)
    return out.mul_(share[..., None])
