"""Keys of rows in parts, so that as many programs as the device runs at once attend to about as many keys each.

row 0, 900 keys    [ part 0 ][ part 1 ][ part 2 ]
row 1, 200 keys    [ part 3 ]
row 2, no keys     [ part 4 ]                           it has one all the same, which writes zeros
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Division:
    """How the keys of some rows are divided.

    Attributes:
        most: parts of all rows together; more than there are rows.
        most_per_row: parts of a row.
        block: keys that a program takes at once; a part has whole blocks, but for the end of its row.
    """

    most: int
    most_per_row: int
    block: int

    def parts(self, lens: Ints, begins: Ints | None) -> tuple[Ints, Ints]:
        """Divide the keys of n rows.

        Args:
            lens: int32 [n], keys of each row.
            begins: int32 [n], those before its window; None for no windows.
        Returns:
            firsts, int32 [n + 1]: the parts of row i are firsts[i] to firsts[i + 1] - 1, at least one. Each but the
            last has ceil(blocks of the row / parts of the row) blocks.
            rows, int32 [most]: the row of each part. Those behind the last one are further parts of row 0, without
            keys.
        """
        blocks = -(-(lens if begins is None else lens - begins) // self.block)
        spare = self.most - len(lens)
        per_part = max(1, -(-int(blocks.sum()) // spare), -(-int(blocks.max(initial=0)) // self.most_per_row))
        firsts = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(np.maximum(-(-blocks // per_part), 1), out=firsts[1:])
        rows = np.zeros(self.most, np.int32)
        rows[: firsts[-1]] = np.repeat(np.arange(len(lens), dtype=np.int32), np.diff(firsts))
        return firsts, rows
