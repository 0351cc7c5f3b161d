"""Where chunks of a prompt end so that they leave a restore point.

Only models with windows or recurrent states need that; others can be continued from every page.

    prompt     [ known to the cache | ............................. | last page boundary | rest ]
    cuts                            ^ branch         ^ interval     ^ end
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from raycache.cache.sequences import SequenceCache
from raycache.decider.request import Request


class Cuts:
    """Chooses restore points.

    Args:
        cache: where sequences live.
        interval: tokens between restore points inside a prompt, rounded up to whole pages; 0 for none inside. No
            chunk is longer.
    """

    def __init__(self, cache: SequenceCache, *, interval: int) -> None:
        self._page_size = cache.page_size
        self._interval = -(-interval // cache.page_size) * cache.page_size
        self._is_needed = cache.has_points and cache.is_kept

    def plan(self, request: Request) -> list[int]:
        """Cuts of a request that starts: where it leaves what the cache knows, and before its end."""
        if not self._is_needed:
            return []
        assert request.holding is not None, "requests that start are locked"
        branch, end = request.holding.handle.known_length, self._floor(request.num_tokens - 1)
        return sorted(cut for cut in {branch, end} if cut > request.num_computed)

    def end(self, request: Request, *, reach: int) -> int:
        """Where its next chunk ends, if it may go as far as `reach`."""
        if not self._is_needed:
            return reach
        start = request.num_computed
        index = bisect.bisect_right(request.cuts, start)
        cuts = request.cuts[index : index + 1]
        if self._interval:
            cuts = [*cuts, (start // self._interval + 1) * self._interval]
        if cuts and min(cuts) <= reach:
            return min(cuts)
        # On a page boundary, where a request that has to stop here leaves what it has.
        is_last, floor = reach == request.num_tokens, self._floor(reach)
        return reach if is_last or floor <= start else floor

    def is_point(self, request: Request) -> bool:
        """Whether what it has computed now should become a restore point."""
        if not self._is_needed:
            return False
        return request.num_computed in request.cuts or (
            self._interval > 0 and request.num_computed % self._interval == 0
        )

    def ask(self, request: Request, running: Sequence[Request]) -> None:
        """Let running prompts leave a restore point where a waiting request goes another way, if they still can."""
        for other in self._serving(request, running):
            shared = self._floor(_shared_len(request, other))
            if shared > max(request.num_computed, other.num_planned) and shared not in other.cuts:
                bisect.insort(other.cuts, shared)

    def is_worth_waiting(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a running prompt will leave a restore point that serves a waiting request that is locked."""
        for other in self._serving(request, running):
            shared = self._floor(_shared_len(request, other))
            if request.num_computed <= other.num_computed and any(
                other.num_computed < cut <= shared for cut in other.cuts
            ):
                return True
        return False

    def _serving(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Running prompts that could leave something for a request."""
        if not self._is_needed or request.is_scored:
            return []
        # Those of lower priority may be kept from running by others.
        return [
            other
            for other in running
            if other.remaining > 1 and not other.is_scored and other.order[0] <= request.order[0]
        ]

    def _floor(self, position: int) -> int:
        return position // self._page_size * self._page_size


def _shared_len(one: Request, other: Request) -> int:
    """Tokens that two requests begin with alike, without the last of either: something must be left to compute."""
    length = min(one.num_tokens, other.num_tokens) - 1
    # Copies: a view would keep the token arrays from growing.
    differs = np.frombuffer(one.packed(0, length), np.int32) != np.frombuffer(other.packed(0, length), np.int32)
    return int(differs.argmax()) if differs.any() else length
