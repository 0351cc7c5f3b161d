"""The mover: copies units between one rank's device pool and the host, in parallel with computation.

There are two lanes, each with a thread that processes its moves in order. The decider requests moves (StepPlan), and
results are posted to it.

    save   clear headers | copy, checksum, tag | post
    load   check tags | copy the first layers, release them | ... | copy the last | post, release them

A load is posted before its last layers are released, so a rank that has run all layers of a step has posted the step's
loads. A failed move is posted as failed and releases everything that waits for it; what steps compute from it is
discarded. Checksums may therefore be compared before or during the copy (carriers.py copies units).

Posting is a separate job after its move on the same thread, so that it runs however the move ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

from raycache.memory.arena import Arena
from raycache.memory.carriers import Units, open_carrier
from raycache.memory.device import DevicePool
from raycache.memory.host import HostSpace
from raycache.memory.moves import Moves
from raycache.memory.rows import EnvelopeLayout
from raycache.memory.streams import Event, after_compute

_log = logging.getLogger(__name__)

LaneName = Literal["save", "load"]
Post = Callable[[LaneName, int, bool], None]
"""(lane, number of the moves that are done, whether they failed). Called in order, on the lane's thread."""

Posting = deque[tuple[int, Future[None]]]
"""Moves in progress, by number."""

BEGIN_S = 0.003
"""How long a load may have to itself before the step is launched; its first copies are usually submitted after half
of that."""

DEADLINE_S = 120.0
"""Timeout of copies within a node's memory; a device that takes longer is broken."""


class Mover:
    """Saves and loads of one rank.

    Args:
        pool: its gate is set to this mover's.
        post: called for every move.
    Attributes:
        load_s, save_s: time spent in loads, and in saves.
        last_numbers: of the last submitted save and load.
    """

    def __init__(self, pool: DevicePool, arena: Arena, layout: EnvelopeLayout, *, rank: int, post: Post) -> None:
        self._post, self._name = post, f"rank-{rank}"
        self._spaces = {
            space: HostSpace(space, pool=pool, arena=arena, layout=layout, rank=rank) for space in layout.spaces
        }
        self._carrier = open_carrier(self._spaces, device=pool.device)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-save")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-load")
        self._saving: Posting = deque()
        self._load_posts: Posting = deque()
        self._loading = Loading()
        self._loading.end()
        self._device = pool.device
        self.load_s = self.save_s = 0.0
        self.last_numbers = (0, 0)
        pool.gate = self._wait_loaded

    def save(self, moves: Moves) -> None:
        """Start copying to the host, after all work submitted to the device so far."""
        _forget_posted(self._saving)
        self.last_numbers = (moves.number, self.last_numbers[1])
        move = self._saver.submit(self._save, moves, after_compute(self._device))
        self._saving.append((moves.number, self._saver.submit(self._finish, "save", moves.number, move)))

    def load(self, moves: Moves) -> None:
        """Start copying to the device, after all work submitted to it so far.

        From now on, views wait until their layer is loaded. If no other load is in progress, returns when the first
        layers may be used, or after `BEGIN_S`.
        """
        _forget_posted(self._load_posts)
        is_alone = not self._load_posts
        self.last_numbers = (self.last_numbers[0], moves.number)
        self._loading = loading = Loading()
        move = self._loader.submit(self._load, moves, loading, after_compute(self._device))
        self._load_posts.append((moves.number, self._loader.submit(self._finish_load, moves.number, loading, move)))
        if is_alone:
            # Launching the step now would only take Python's lock from the load, whose first layers it waits for.
            loading.wait_begun(BEGIN_S)

    def wait_saved(self, number: int) -> None:
        """Wait for all saves up to this one, so that their pages may be overwritten.

        Raises:
            TimeoutError: they take longer than `DEADLINE_S`.
        """
        open_saves = [posted for saved, posted in self._saving if saved <= number]
        if wait(open_saves, timeout=DEADLINE_S).not_done:
            raise TimeoutError(f"saves up to {number} of {self._name} are not done after {DEADLINE_S:.0f} s")

    def close(self) -> None:
        """Finish moves that have begun; others are dropped and not posted."""
        for lane in (self._saver, self._loader):
            lane.shutdown(cancel_futures=True)
        self._loading.end()
        self._carrier.close()

    def _wait_loaded(self, layer: int) -> None:
        self._loading.wait(layer)

    def _save(self, moves: Moves, after: Event) -> str:
        """Run a save on the lane's thread; returns "", or what went wrong."""
        start_s = time.monotonic()
        self._carrier.save(self._checked(moves), after=after)
        self.save_s += time.monotonic() - start_s
        return ""

    def _load(self, moves: Moves, loading: Loading, after: Event) -> str:
        """Run a load on the lane's thread; returns "", or what went wrong."""
        start_s = time.monotonic()
        fault = self._carrier.load(self._checked(moves), after=after, release=loading.release)
        self.load_s += time.monotonic() - start_s
        return fault

    def _checked(self, moves: Moves) -> Units:
        units = moves.by_space()
        for space, of_space in units.items():
            self._spaces[space].check(of_space)
        return units

    def _finish(self, lane: LaneName, number: int, move: Future[str]) -> None:
        """Log and post the result of a move."""
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
    """Drop posted moves; raises what `post` has raised."""
    while posting and posting[0][1].done():
        posting.popleft()[1].result()


class Loading:
    """A load in progress: which layers have been loaded."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._filled: dict[int, Event] = {}
        self._is_over = False

    def release(self, layers: Iterable[int], filled: Event) -> None:
        """Let these layers be used by work that comes after the event."""
        with self._changed:
            self._filled |= dict.fromkeys(layers, filled)
            self._changed.notify_all()

    def wait_begun(self, timeout: float) -> None:
        """Wait until some layers may be used, at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or bool(self._filled), timeout)

    def end(self) -> None:
        """Let all layers be used: they are loaded, or the load has failed."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Wait until the layer may be used.

        Raises:
            TimeoutError: it is not loaded within `DEADLINE_S`.
        """
        if self._is_over:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or layer in self._filled, timeout=DEADLINE_S):
                raise TimeoutError(f"layer {layer} is not loaded after {DEADLINE_S:.0f} s")
        if layer in self._filled:
            self._filled[layer].wait()
