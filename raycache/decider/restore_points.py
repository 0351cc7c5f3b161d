"""Chooses where prompt chunks end so that they leave restore points.

Only models with sliding windows or recurrent states need them; others can resume from any page.

    prompt            [ known to the cache | ............................. | last page boundary | rest ]
    restore points                         ^ branch         ^ interval     ^ end
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from raycache.cache.sequences import SequenceCache
from raycache.decider.request import Request, Run


class RestorePointPlanner:
    """Chooses restore points.

    Args:
        interval: tokens between restore points inside a prompt, rounded up to whole pages; also the longest row.
            0: only at branches and at the end.
    """

    def __init__(self, cache: SequenceCache, *, interval: int) -> None:
        self._page_size = cache.page_size
        self._interval = -(-interval // cache.page_size) * cache.page_size
        self._is_needed = cache.has_points and cache.is_kept

    def plan(self, known_len: int, start: int, num_tokens: int) -> list[int]:
        """Choose positions for a starting request: where it diverges from the cache, and its last page boundary.

        Args:
            known_len: tokens whose pages are cached.
            start: number of tokens that need not be computed.
            num_tokens: length of the prompt.
        """
        if not self._is_needed:
            return []
        points = {known_len, self._floor(num_tokens - 1)}
        return sorted(point for point in points if point > start)

    def end(self, run: Run, *, reach: int) -> int:
        """Return where the next chunk ends, at most at `reach`."""
        if not self._is_needed:
            return reach
        start = run.next_start
        index = bisect.bisect_right(run.restore_at, start)
        points = run.restore_at[index : index + 1]
        if self._interval:
            points = [*points, (start // self._interval + 1) * self._interval]
        if points and min(points) <= reach:
            return min(points)
        # On a page boundary, so that a request that stops here leaves its pages reusable.
        is_last, floor = reach == run.request.num_tokens, self._floor(reach)
        return reach if is_last or floor <= start else floor

    def is_point(self, run: Run) -> bool:
        """Whether to keep a restore point at the current position."""
        if not self._is_needed:
            return False
        return run.num_computed in run.restore_at or (self._interval > 0 and run.num_computed % self._interval == 0)

    def ask(self, request: Request, running: Sequence[Run]) -> None:
        """Ask running prompts for a restore point where a waiting request diverges, if they are not past it."""
        for other in self._serving(request, running):
            shared = self._floor(_shared_len(request, other.request))
            if shared > other.num_planned and shared not in other.restore_at:
                bisect.insort(other.restore_at, shared)

    def is_worth_waiting(self, request: Request, cached_len: int, running: Sequence[Run]) -> bool:
        """Whether a running prompt will leave a restore point beyond a waiting request's cached tokens."""
        for other in self._serving(request, running):
            shared = self._floor(_shared_len(request, other.request))
            if cached_len <= other.num_computed and any(
                other.num_computed < point <= shared for point in other.restore_at
            ):
                return True
        return False

    def _serving(self, request: Request, running: Sequence[Run]) -> list[Run]:
        """Running prompts that could leave a restore point for a request."""
        if not self._is_needed or request.is_scored:
            return []
        # Prompts of lower priority may be starved by others.
        priority = request.spec.order[0]
        return [
            other
            for other in running
            if other.remaining > 1 and other.is_kept and other.request.spec.order[0] <= priority
        ]

    def _floor(self, position: int) -> int:
        return position // self._page_size * self._page_size


def _shared_len(one: Request, other: Request) -> int:
    """Length of the common prefix, short of either's last token: at least one must be left to compute."""
    length = min(one.num_tokens, other.num_tokens) - 1
    # Copies: a view would keep the token arrays from growing.
    differs = np.frombuffer(one.packed(0, length), np.int32) != np.frombuffer(other.packed(0, length), np.int32)
    return int(differs.argmax()) if differs.any() else length
