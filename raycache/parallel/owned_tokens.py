"""Which tokens of a sequence a cp rank holds: a share of each page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def owned_prefix_len(prefix_len: int, *, page_size: int, cp_rank: int, cp_size: int) -> int:
    """Number of the first `prefix_len` tokens of a sequence that a cp rank holds."""
    pages, rest = divmod(prefix_len, page_size)
    share = page_size // cp_size
    return pages * share + min(max(rest - cp_rank * share, 0), share)


def owned_slots(
    positions: NDArray[np.int64], page_table: NDArray[np.int32], *, page_size: int, cp_rank: int, cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the tokens that a cp rank holds, with their slots.

    Args:
        positions: in the sequence.
        page_table: page id per page of the sequence.
    Returns:
        Indices into `positions` of these tokens, and their slots, page_id * (page_size / cp_size) + offset, in this
        rank's pool; negative where the table has -1.
    """
    share = page_size // cp_size
    offset = positions % page_size
    index = np.flatnonzero(offset // share == cp_rank)
    owned = positions[index]
    pages: NDArray[np.int64] = page_table[owned // page_size].astype(np.int64)
    return index, pages * share + owned % share
