"""The mover: copies units between one rank's device pool and the host, behind the computation.

Two lanes, each with a thread of its own that does its moves in order. The decider says what moves where (StepPlan) and
is told by `post` what came of it; the mover decides nothing.

    save   clear header | copy pages | wait for the copies | checksum, tag | post
    load   check tags and checksums | copy the first layers, release them | ... | copy the last | post, release them

A load is posted before its last layers are released: who has got past all layers of a step has posted the step's loads.
A move that fails, however it does, is posted as failed and releases what waits for it; what a step then computes from
it is thrown away.

Posting is a job of its own behind its move, on the same thread: it finds whatever became of the move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

from raycache.memory.arena import Arena
from raycache.memory.device import DevicePool
from raycache.memory.host import HostSpace, Run, runs
from raycache.memory.moves import Moves
from raycache.memory.rows import EnvelopeLayout
from raycache.memory.streams import Event, PinnedSlabs, open_stream
from raycache.parallel.sharding import even_range

_log = logging.getLogger(__name__)

LaneName = Literal["save", "load"]
Post = Callable[[LaneName, int, bool], None]
"""Lane, number of the moves that are done, whether they failed. Called in order, by the lane's thread."""

Posting = deque[tuple[int, Future[None]]]
"""Moves on their way, by number."""

CPU_TURNS = 8
"""In how many turns a load copies all layers on the CPU: with more, calls cost as much as the copies."""

DEADLINE_S = 120.0
"""Of a wait for copies within a node's memory. A device that takes longer is broken."""


class Mover:
    """Saves and loads of one rank.

    Args:
        pool: of the rank; its gate becomes this mover's.
        arena: of the rank's node.
        layout: of the arena.
        rank: world rank.
        post: told of every move.
    Attributes:
        load_s: time spent in loads.
        last_numbers: of the last save and the last load that it was given.
    """

    def __init__(self, pool: DevicePool, arena: Arena, layout: EnvelopeLayout, *, rank: int, post: Post) -> None:
        self._post, self._name = post, f"rank-{rank}"
        self._spaces = {
            space: HostSpace(space, pool=pool, arena=arena, layout=layout, rank=rank) for space in layout.spaces
        }
        layers = sorted({layer for space in self._spaces.values() for layer in space.layers})
        num_turns = len(layers) if pool.device.type == "cuda" else min(len(layers), CPU_TURNS)
        turns = (even_range(len(layers), turn, num_turns) for turn in range(num_turns))
        self._turns = [layers[turn.start : turn.stop] for turn in turns]
        slabs = [slab for space in self._spaces.values() for slab in space.slabs]
        self._pinned = PinnedSlabs(slabs if pool.device.type == "cuda" else [])
        self._save_stream, self._load_stream = open_stream(pool.device), open_stream(pool.device)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-save")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-load")
        self._saving: Posting = deque()
        self._load_posts: Posting = deque()
        self._loading = Loading()
        self._loading.end()
        self._pool = pool
        self.load_s = 0.0
        self.last_numbers = (0, 0)
        pool.gate = self._wait_loaded

    def save(self, moves: Moves) -> None:
        """Copy what the device holds after all that it was given so far; returns at once."""
        _forget_posted(self._saving)
        self.last_numbers = (moves.number, self.last_numbers[1])
        move = self._saver.submit(self._save, moves, self._save_stream.after_compute())
        self._saving.append((moves.number, self._saver.submit(self._finish, "save", moves.number, move)))

    def load(self, moves: Moves) -> None:
        """Copy to the device, after all that it was given so far; returns at once.

        From now on a layer's view waits until the layer is there.
        """
        _forget_posted(self._load_posts)
        self.last_numbers = (self.last_numbers[0], moves.number)
        self._loading = loading = Loading()
        move = self._loader.submit(self._load, moves, loading, self._load_stream.after_compute())
        self._load_posts.append((moves.number, self._loader.submit(self._finish_load, moves.number, loading, move)))

    def wait_saved(self, number: int) -> None:
        """Return when all saves up to this one are done, so that their pages may be overwritten.

        Raises:
            TimeoutError: they take longer than `DEADLINE_S`.
        """
        open_saves = [posted for saved, posted in self._saving if saved <= number]
        if wait(open_saves, timeout=DEADLINE_S).not_done:
            raise TimeoutError(f"saves up to {number} of {self._name} are not done after {DEADLINE_S:.0f} s")

    def close(self) -> None:
        """End: what has begun is finished, what has not is dropped and not posted."""
        for lane in (self._saver, self._loader):
            lane.shutdown(cancel_futures=True)
        self._loading.end()
        self._pinned.close()

    def _wait_loaded(self, layer: int) -> None:
        self._loading.wait(layer)

    def _save(self, moves: Moves, after: Event) -> str:
        """One move, in the lane's thread; what is wrong with it."""
        units = [(self._spaces[unit.space], unit) for unit in moves.units]
        for space, unit in units:
            space.check(unit)
        # On the CPU unit by unit, while the envelope is in the processor's cache; on CUDA all copies first.
        groups = [units] if self._pool.device.type == "cuda" else [[one] for one in units]
        for group in groups:
            with self._save_stream.copying(after=after):
                for space, unit in group:
                    space.begin_save(unit)
            self._save_stream.mark().synchronize()
            for space, unit in group:
                space.end_save(unit)
        return ""

    def _load(self, moves: Moves, loading: Loading, after: Event) -> str:
        """One move, in the lane's thread; what is wrong with it."""
        start_s = time.monotonic()
        for unit in moves.units:
            space = self._spaces[unit.space]
            space.check(unit)
            if fault := space.fault(unit):
                return fault
        taken = [(space, self._runs(name, moves)) for name, space in self._spaces.items()]
        with self._load_stream.copying(after=after):
            for layers in self._turns:
                for space, of_space in taken:
                    space.load(layers[0], layers[-1], of_space)
                if layers is not self._turns[-1]:
                    loading.release(layers, self._load_stream.mark())
            self._load_stream.mark().synchronize()
        self.load_s += time.monotonic() - start_s
        return ""

    def _runs(self, space: str, moves: Moves) -> Sequence[Run]:
        return runs(unit for unit in moves.units if unit.space == space)

    def _finish(self, lane: LaneName, number: int, move: Future[str]) -> None:
        """Tell what came of a move."""
        error = move.exception()
        if error is not None:
            _log.error("%s: %s %d failed", self._name, lane, number, exc_info=error)
        elif move.result():
            _log.warning("%s: %s %d failed: %s", self._name, lane, number, move.result())
        self._post(lane, number, error is not None or bool(move.result()))

    def _finish_load(self, number: int, loading: Loading, move: Future[str]) -> None:
        try:
            self._finish("load", number, move)
        finally:
            loading.end()


def _forget_posted(posting: Posting) -> None:
    """Raises what `post` has raised."""
    while posting and posting[0][1].done():
        posting.popleft()[1].result()


class Loading:
    """One load on its way: which layers are there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._filled: dict[int, Event] = {}
        self._is_over = False

    def release(self, layers: Iterable[int], filled: Event) -> None:
        """Let these layers be used, by what comes after the event."""
        with self._changed:
            self._filled |= dict.fromkeys(layers, filled)
            self._changed.notify_all()

    def end(self) -> None:
        """Let all layers be used: they are there, or the load has failed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when the layer may be used.

        Raises:
            TimeoutError: it is not there after `DEADLINE_S`.
        """
        if self._is_over:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or layer in self._filled, timeout=DEADLINE_S):
                raise TimeoutError(f"layer {layer} is not loaded after {DEADLINE_S:.0f} s")
        if layer in self._filled:
            self._filled[layer].wait()
