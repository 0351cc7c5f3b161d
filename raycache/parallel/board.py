"""The ack board: the progress of each rank, one line of int64 per rank in shared memory.

    rank 0   [ joined | loaded | step | failed | lost | saves | loads | bad save | bad load | load us | save us ]
    rank 1   [ ...                                    ]

Each rank writes its own line; the decider reads all lines without waiting. Numbers only grow, so an inconsistent view
is merely outdated. A board is a file in /dev/shm that is unlinked immediately or once every rank has mapped it, so
that a crash leaves nothing behind. Other nodes have boards of their own, which are forwarded to the decider's
(relay.py).
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycache.errors import ConfigError


class Lane(IntEnum):
    """Meaning of a number on the board."""

    JOINED = 0  # 1 once the rank is a member of all its groups
    LOADED = 1  # weights read, in bytes; layers of random ones
    STEP = 2  # last step completed
    FAILED = 3  # step during which the rank failed, 0 for none
    LOST = 4  # step after which the rank ended because it lost another one, 0 for none
    SAVES = 5  # number of the last save that has ended, failed or not
    LOADS = 6  # number of the last load that has ended, failed or not
    BAD_SAVE = 7  # number of the last save that failed, 0 for none
    BAD_LOAD = 8  # number of the last load that failed, 0 for none
    LOAD_US = 9  # time spent in loads, microseconds
    SAVE_US = 10  # time spent in saves, microseconds
    TO_LOAD = 11  # final value of LOADED; 0 until it is known


_WATERMARKS = [Lane.SAVES, Lane.LOADS]
_OTHERS = [lane for lane in Lane if lane not in _WATERMARKS]


@dataclass(frozen=True, slots=True)
class Acks:
    """Progress of page moves over all ranks.

    Attributes:
        saves, loads: numbers up to which all moves have ended on all ranks.
        bad_save, bad_load: number of the last one that failed on any rank, 0 for none.
        load_s, save_s: maximum time that a rank has spent in loads, and in saves.
    """

    saves: int = 0
    loads: int = 0
    bad_save: int = 0
    bad_load: int = 0
    load_s: float = 0.0
    save_s: float = 0.0


class AckBoard:
    """A gang's board on one node, a shared file with a line per rank."""

    def __init__(self, path: Path, *, num_ranks: int) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_ranks * len(Lane) * 8)
        self.lines = np.frombuffer(self._map, np.int64).reshape(num_ranks, len(Lane))
        self._shared: int | None = None

    @classmethod
    def create(cls, num_ranks: int, *, directory: Path = Path("/dev/shm")) -> AckBoard:
        """Create a board of zeros.

        Raises:
            ConfigError: the directory is not writable.
        """
        path = directory / f"raycache-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            path.touch(mode=0o600, exist_ok=False)
            os.truncate(path, num_ranks * len(Lane) * 8)
        except OSError as cause:
            raise ConfigError(f"cannot make the ack board {path}: {cause}; make {directory} writable") from cause
        return cls(path, num_ranks=num_ranks)

    def share(self) -> Path:
        """Unlink the file; returns a path by which other processes of this node can open it until `unshare`."""
        self._shared = os.open(self.path, os.O_RDWR)
        self.unlink()
        return Path(f"/proc/{os.getpid()}/fd/{self._shared}")

    def unshare(self) -> None:
        """Invalidate the path of `share`; mappings stay valid."""
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None

    def post(self, rank: int, lane: Lane, value: int) -> None:
        """Set one number of this rank's line."""
        self.lines[rank, lane] = value

    def low(self, lane: Lane) -> int:
        """Minimum of a lane over all ranks."""
        return int(self.lines[:, lane].min())

    def loaded(self) -> tuple[int, int]:
        """(loaded, total) of the weights of all ranks; zeros until all totals are known."""
        if not self.lines[:, Lane.TO_LOAD].all():
            return 0, 0
        return int(self.lines[:, Lane.LOADED].sum()), int(self.lines[:, Lane.TO_LOAD].sum())

    def acks(self) -> Acks:
        """Progress of page moves. Failures are read last: they are posted before the watermark that covers them."""
        saves, loads = self.lines[:, Lane.SAVES : Lane.LOADS + 1].min(axis=0).tolist()
        most = self.lines[:, Lane.BAD_SAVE : Lane.SAVE_US + 1].max(axis=0)
        bad_save, bad_load, load_us, save_us = most.tolist()
        return Acks(saves, loads, bad_save, bad_load, load_us / 1e6, save_us / 1e6)

    def post_moves(self, rank: int, lane: str, number: int, has_failed: bool, /) -> None:
        """Post the end of moves of a lane, "save" or "load"."""
        done, bad = (Lane.SAVES, Lane.BAD_SAVE) if lane == "save" else (Lane.LOADS, Lane.BAD_LOAD)
        if has_failed:
            self.post(rank, bad, number)
        self.post(rank, done, number)

    def suspects(self, step: int) -> list[int]:
        """Ranks that may have kept a step from completing: those that failed, else those that posted nothing.

        Ranks that lost another one are victims. Among the silent ranks, those that have not completed the step are
        returned if there are any; a pipeline stage may have exited after its part of it. Ranks that never joined are
        excluded.
        """
        joined = self.lines[:, Lane.JOINED] > 0
        failed = joined & (self.lines[:, Lane.FAILED] > 0)
        silent = joined & (self.lines[:, Lane.LOST] == 0)
        late = silent & (self.lines[:, Lane.STEP] < step)
        found = next((ranks for ranks in (failed, late) if ranks.any()), silent)
        return [int(rank) for rank in np.flatnonzero(found)]

    def snapshot(self) -> NDArray[np.int64]:
        """Copy all lines, watermarks first, so that failures below a watermark are included."""
        done = self.lines[:, _WATERMARKS].copy()
        lines = self.lines.copy()
        lines[:, _WATERMARKS] = done
        return lines

    def take(self, lines: NDArray[np.int64], *, ranks: Sequence[int]) -> None:
        """Copy the lines of some ranks from a `snapshot` of another node's board; watermarks last."""
        for lanes in (_OTHERS, _WATERMARKS):
            cells = np.ix_(list(ranks), lanes)
            self.lines[cells] = lines[cells]

    def unlink(self) -> None:
        """Remove the file; mappings stay valid."""
        self.path.unlink(missing_ok=True)
