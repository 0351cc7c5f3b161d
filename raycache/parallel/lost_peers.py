"""Errors of a GPU whose kernel has waited in vain for a peer.

Kernels of peer memory wait for at most `rank_timeout_s`, and then trap (peer_kernels.py). Every call of CUDA fails from
then on, as after a fault of this rank's own, but with another text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raycache.errors import RankLostError
from raycache.parallel.context import ParallelContext
from raycache.parallel.peer_group import PEER_MEMORY

_log = logging.getLogger(__name__)
_TRAP = "unspecified launch failure"
"""cudaErrorLaunchFailure, in errors of torch, Triton and NCCL. Invalid memory accesses have texts of their own."""


@contextmanager
def reporting_lost_peers(ctx: ParallelContext) -> Iterator[None]:
    """Turn the error of a kernel that has waited in vain for a peer into a RankLostError.

    Raises:
        RankLostError: a kernel inside trapped, and this rank's groups use peer memory.
    """
    try:
        yield
    except RuntimeError as cause:
        if PEER_MEMORY not in ctx.transports or not _has_trapped(cause, ctx.device):
            raise
        # A fault of a kernel of this rank can have the same text: whoever looks for one must find it in the log.
        _log.warning("rank %d (%s) timed out waiting for a peer: %s", ctx.rank, ctx.coords, cause)
        raise RankLostError(
            -1, f"a peer of rank {ctx.rank}", -1, "a peer-memory kernel timed out waiting for a peer"
        ) from cause


@contextmanager
def logging_errors_of_gpu(has_failed: bool) -> Iterator[None]:
    """Log errors instead of raising them if something has failed before: after a trap every call of CUDA fails, and the
    first error is the one to report."""
    try:
        yield
    except RuntimeError as cause:
        if not has_failed:
            raise
        _log.warning("could not release everything: %s", cause)


def _has_trapped(error: RuntimeError, device: torch.device) -> bool:
    """Whether a kernel has trapped: the error says so, or comes from a library that only says that a call failed."""
    if _TRAP in str(error):
        return True
    if device.type != "cuda":
        return False
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as cause:
        return _TRAP in str(cause)
    return False
