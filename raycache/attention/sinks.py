"""Attention sinks: an additional key per head without a value, which reduces the weights of all others."""

from __future__ import annotations

import logging
import math
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Multiply outputs by the share that the keys have beside the sinks, in place; returns them.

    On CUDA in bfloat16 and float16 it is one Triton kernel, so that a decode step has fewer launches.

    Args:
        out: [T, H, D], contiguous.
        lse: [T, H] float32, log-sum-exp of the scores, to base 2.
        sinks: [H], scores of the sinks.
    """
    if out.is_cuda and out.dtype in (torch.bfloat16, torch.float16) and out.numel() and (kernels := _kernels()):
        kernels.apply_sinks(out, lse, sinks)
        return out
    share = torch.sigmoid(lse * math.log(2) - sinks)
    return out.mul_(share[..., None])


@cache
def _kernels() -> Any:
    """The kernel, or None where Triton or its compiler is missing, which is logged once."""
    try:
        from raycache.attention import sink_kernels

        # Compiling shows whether Triton works. This must not first happen while a graph is captured.
        one = torch.ones(1, 1, 16, dtype=torch.bfloat16, device="cuda")
        sink_kernels.apply_sinks(one, one[..., 0].float(), one[0, :, 0])
    except (ImportError, OSError, RuntimeError, SubprocessError) as cause:
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        _log.warning("attention sinks use torch, which is slower: Triton: %s", lines[0])
        return None
    return sink_kernels
