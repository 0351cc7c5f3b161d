"""The ack board: how far each rank is, one line of int64 per rank in shared memory.

    rank 0   [ joined | loaded | step | failed | lost | saves | loads | bad save | bad load | load us | save us ]
    rank 1   [ ...                                    ]

Each rank writes its own line, the decider reads all of them and waits for none: numbers only grow, so a torn view is
only an old one. A board is a file in /dev/shm that loses its name at once or as soon as every rank has mapped it, so
nothing is left behind by a crash. Ranks on another node than the decider's have a board there, which is passed on to it
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
    """What a number on the board counts."""

    JOINED = 0  # 1 once the rank is a member of all its groups
    LOADED = 1  # weights read, in bytes; layers of random ones
    STEP = 2  # last step completed
    FAILED = 3  # step during which the rank failed, 0 for none
    LOST = 4  # step after which the rank ended because another one was gone or late, 0 for none
    SAVES = 5  # last moves to the host that are done, whether they failed or not
    LOADS = 6  # the same from the host
    BAD_SAVE = 7  # last moves to the host that failed, 0 for none
    BAD_LOAD = 8  # the same from the host
    LOAD_US = 9  # time spent in loads, microseconds
    SAVE_US = 10  # the same in saves
    TO_LOAD = 11  # what LOADED will be when all is read; 0 until that is known


_WATERMARKS = [Lane.SAVES, Lane.LOADS]
_OTHERS = [lane for lane in Lane if lane not in _WATERMARKS]


@dataclass(frozen=True, slots=True)
class Acks:
    """How far all ranks are with page moves.

    Attributes:
        saves, loads: numbers up to which all are done.
        bad_save, bad_load: the last that failed on any rank, 0 for none.
        load_s, save_s: longest time that a rank has spent in loads, and in saves.
    """

    saves: int = 0
    loads: int = 0
    bad_save: int = 0
    bad_load: int = 0
    load_s: float = 0.0
    save_s: float = 0.0


class AckBoard:
    """One gang's board on one node.

    Args:
        path: of the shared file.
        num_ranks: lines.
    """

    def __init__(self, path: Path, *, num_ranks: int) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), num_ranks * len(Lane) * 8)
        self.lines = np.frombuffer(self._map, np.int64).reshape(num_ranks, len(Lane))
        self._shared: int | None = None

    @classmethod
    def create(cls, num_ranks: int, *, directory: Path = Path("/dev/shm")) -> AckBoard:
        """Make a new board with all numbers 0.

        Raises:
            ConfigError: the directory cannot be written.
        """
        path = directory / f"raycache-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with path.open("xb") as file:
                file.truncate(num_ranks * len(Lane) * 8)
        except OSError as cause:
            raise ConfigError(f"cannot make the ack board {path}: {cause}; make {directory} writable") from cause
        return cls(path, num_ranks=num_ranks)

    def share(self) -> Path:
        """Take the file's name away; returns where other processes of this node find it until `unshare`, or the end of
        this process."""
        self._shared = os.open(self.path, os.O_RDWR)
        self.unlink()
        return Path(f"/proc/{os.getpid()}/fd/{self._shared}")

    def unshare(self) -> None:
        """Let nobody find the file any more; mappings stay valid."""
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None

    def post(self, rank: int, lane: Lane, value: int) -> None:
        """Set one number of this rank's line."""
        self.lines[rank, lane] = value

    def low(self, lane: Lane) -> int:
        """What all ranks have reached."""
        return int(self.lines[:, lane].min())

    def loaded(self) -> tuple[int, int]:
        """What all ranks together have read of the weights and what they are to read; zeros until all know that."""
        if not self.lines[:, Lane.TO_LOAD].all():
            return 0, 0
        return int(self.lines[:, Lane.LOADED].sum()), int(self.lines[:, Lane.TO_LOAD].sum())

    def acks(self) -> Acks:
        """Page moves of all ranks. Failures are read last: they are posted before the watermark that covers them."""
        saves, loads = self.low(Lane.SAVES), self.low(Lane.LOADS)
        bad_save, bad_load, load_us, save_us = (
            int(self.lines[:, lane].max()) for lane in (Lane.BAD_SAVE, Lane.BAD_LOAD, Lane.LOAD_US, Lane.SAVE_US)
        )
        return Acks(saves, loads, bad_save, bad_load, load_us / 1e6, save_us / 1e6)

    def post_moves(self, rank: int, lane: str, number: int, has_failed: bool, /) -> None:
        """Moves of a lane, "save" or "load", are done."""
        done, bad = (Lane.SAVES, Lane.BAD_SAVE) if lane == "save" else (Lane.LOADS, Lane.BAD_LOAD)
        if has_failed:
            self.post(rank, bad, number)
        self.post(rank, done, number)

    def suspects(self, step: int) -> list[int]:
        """Ranks that may have kept a step from being completed: those that failed, else those that say nothing.

        Who has lost a peer is a victim. Of the silent ones those that are late come first; a stage of a pipeline may
        have ended after its part of the step. Who never joined is left out.
        """
        joined = self.lines[:, Lane.JOINED] > 0
        failed = joined & (self.lines[:, Lane.FAILED] > 0)
        silent = joined & (self.lines[:, Lane.LOST] == 0)
        late = silent & (self.lines[:, Lane.STEP] < step)
        found = next((ranks for ranks in (failed, late) if ranks.any()), silent)
        return [int(rank) for rank in np.flatnonzero(found)]

    def snapshot(self) -> NDArray[np.int64]:
        """A copy of all lines, in which no failed move is covered by a watermark without being told: those first."""
        done = self.lines[:, _WATERMARKS].copy()
        lines = self.lines.copy()
        lines[:, _WATERMARKS] = done
        return lines

    def take(self, lines: NDArray[np.int64], *, ranks: Sequence[int]) -> None:
        """Post the lines of ranks as a `snapshot` of another node's board has them; watermarks last."""
        for lanes in (_OTHERS, _WATERMARKS):
            places = np.ix_(list(ranks), lanes)
            self.lines[places] = lines[places]

    def unlink(self) -> None:
        """Remove the file; mappings stay valid."""
        self.path.unlink(missing_ok=True)
