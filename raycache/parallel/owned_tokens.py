"""Which tokens of a sequence a cp rank holds: of each page, a share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def owned_prefix_len(prefix_len: int, *, page_size: int, cp_rank: int, cp_size: int) -> int:
    """How many of the first `prefix_len` tokens of a sequence a cp rank holds."""
    pages, rest = divmod(prefix_len, page_size)
    share = page_size // cp_size
    return pages * share + min(max(rest - cp_rank * share, 0), share)


def owned_slots(
    positions: NDArray[np.int64], page_table: NDArray[np.int32], *, page_size: int, cp_rank: int, cp_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a cp rank writes the tokens that it owns.

    Args:
        positions: positions in the sequence, length T.
        page_table: page id per page of the sequence.
    Returns:
        (index, slot): index into `positions` of the owned ones, and their slot page_id * (S / cp) + offset in this
        rank's pool; negative where the table has -1 for their page.
    """
    share = page_size // cp_size
    offset = positions % page_size
    index = np.flatnonzero(offset // share == cp_rank)
    owned = positions[index]
    pages: NDArray[np.int64] = page_table[owned // page_size].astype(np.int64)
    return index, pages * share + owned % share
