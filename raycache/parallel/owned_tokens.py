"""Which tokens of a sequence a cp rank holds: a share of each page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def owned_prefix_lens(
    prefix_lens: NDArray[np.int64], *, page_size: int, cp_rank: int, cp_size: int
) -> NDArray[np.int64]:
    """How many of the first `prefix_lens` tokens of each sequence a cp rank holds."""
    if cp_size == 1:
        return prefix_lens
    pages, rest = np.divmod(prefix_lens, page_size)
    share = page_size // cp_size
    held: NDArray[np.int64] = pages * share + np.clip(rest - cp_rank * share, 0, share)
    return held


def owned_slots(
    positions: NDArray[np.int64], pages: NDArray[np.int32], *, page_size: int, cp_rank: int, cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the tokens that a cp rank holds, with their slots.

    Args:
        positions: in their sequences.
        pages: id of the page of each.
    Returns:
        Indices into `positions` of these tokens, and their slots, page_id * (page_size / cp_size) + offset, in this
        rank's pool; negative where the page is -1.
    """
    share = page_size // cp_size
    offset = positions % page_size
    if cp_size == 1:
        return np.arange(len(positions)), pages.astype(np.int64) * page_size + offset
    index = np.flatnonzero(offset // share == cp_rank)
    return index, pages[index].astype(np.int64) * share + offset[index] % share
