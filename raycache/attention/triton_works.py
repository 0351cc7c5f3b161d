"""Whether Triton works, for kernels that FlashInfer or torch can replace."""

from __future__ import annotations

import logging
from functools import cache
from subprocess import SubprocessError

import torch

_log = logging.getLogger(__name__)


@cache
def triton_works() -> bool:
    """Compile a kernel; a failure is logged. This must not first happen while a graph is captured."""
    try:
        from raycache.attention.sink_kernels import apply_sinks

        one = torch.ones(1, 1, 16, dtype=torch.bfloat16, device="cuda")
        apply_sinks(one, one[..., 0].float(), one[0, :, 0])
    except (ImportError, OSError, RuntimeError, SubprocessError) as cause:
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        _log.warning("attention uses FlashInfer and torch alone, which is slower: Triton: %s", lines[0])
        return False
    return True
