"""Which device pages and state slots are free.

Ids are the same on every rank, so there is one allocator per replica and component space, owned by the decider; it has
no tensors.

    PageAllocator      pages of sequences: many, each owned by one request or the tree; array operations
    SharedAllocator    window pages and state slots: few, shared by requests and restore points; reference counts

    stack    [ . . . . | 6 7 8 9 ]     free ids from num_taken on; the first of them is allocated next
    slot_of  page -> its index on the stack, -1 while it is taken
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.intp]
"""Page ids in numpy's index type: any other would be converted at each use."""

_TAKEN = -1
_TAKEN_BYTES = np.intp(_TAKEN).tobytes()


class PageAllocator:
    """A stack of the free ids among [0, num_pages); a new one allocates 0, 1, 2, ...

    Attributes:
        num_pages, num_free: number of ids, and of those that are free.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"a pool cannot have {num_pages} pages"
        self.num_pages = self.num_free = num_pages
        self._stack = np.arange(num_pages)
        # The second half is for ids up to twice the size of the pool, and down to minus it: they never count as taken.
        self._slot_of = np.concatenate((self._stack, self._stack))

    @property
    def taken(self) -> PageIds:
        """Ids of the pages that are not free, ascending."""
        return np.flatnonzero(self._slot_of == _TAKEN)

    def allocate(self, count: int) -> PageIds:
        """Take `count` pages, most recently freed first; num_free must suffice."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} of {self.num_pages} are free"
        num_taken = self.num_pages - self.num_free
        pages = self._stack[num_taken : num_taken + count]
        self._slot_of[pages] = _TAKEN
        self.num_free -= count
        return pages.copy()

    def free(self, pages: PageIds) -> None:
        """Return pages; asserts that each is taken and occurs once in `pages`.

        Raises:
            IndexError: a page id is at least twice the size of the pool.
        """
        count = len(pages)
        if not count:
            return
        end = self.num_pages - self.num_free
        num_taken = end - count
        assert num_taken >= 0, f"{count} pages freed, but only {end} are taken"
        assert pages.dtype == np.intp, f"page ids are intp, not {pages.dtype}"
        if count == 1:  # the last page of most prompts is not whole, and arrays of one element are slow
            page = int(pages[0])
            assert self._slot_of[page] == _TAKEN, f"freed twice, or not of the pool: {pages}"
            self._slot_of[page] = num_taken
            self._stack[num_taken] = page
            self.num_free += 1
            return
        # Compared as bytes, which is faster than arrays. A page that occurs twice keeps the later slot.
        assert self._slot_of[pages].tobytes() == _TAKEN_BYTES * count, f"freed twice, or not of the pool: {pages}"
        slots = np.arange(num_taken, end)
        self._slot_of[pages] = slots
        assert self._slot_of[pages].tobytes() == slots.tobytes(), f"a page is twice in one free: {pages}"
        self._stack[num_taken:end] = pages
        self.num_free += count

    def check(self, *, in_use: PageIds, cached: PageIds) -> None:
        """Assert that every page is exactly one of free, in use by a request, or cached by the tree."""
        num_taken = self.num_pages - self.num_free
        free = self._stack[num_taken:]
        slots = np.arange(num_taken, self.num_pages)
        assert np.array_equal(self._slot_of[free], slots), "the stack and its inverse disagree"
        assert self.num_pages - len(self.taken) == self.num_free, "a taken page has a place on the stack"
        places = np.bincount(np.concatenate((free, in_use, cached)), minlength=self.num_pages)
        assert len(places) == self.num_pages, f"a page id is beyond the pool of {self.num_pages} pages"
        assert (places >= 1).all(), f"lost pages: {np.flatnonzero(places == 0)}"
        assert (places <= 1).all(), f"pages in two places: {np.flatnonzero(places > 1)}"


class SharedAllocator:
    """Reference-counted ids in [0, num_ids); an id without holders is free."""

    def __init__(self, num_ids: int) -> None:
        assert num_ids >= 0, f"a pool cannot have {num_ids} ids"
        self.num_ids = num_ids
        self._free = list(range(num_ids))[::-1]
        self._holders = [0] * num_ids

    @property
    def num_free(self) -> int:
        """Ids without a holder."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free ids with one holder each; num_free must suffice."""
        assert 0 <= count <= self.num_free, f"{count} ids wanted, {self.num_free} of {self.num_ids} are free"
        taken = [self._free.pop() for _ in range(count)]
        for i in taken:
            self._holders[i] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """Add a holder to each id."""
        for i in ids:
            assert self._holders[i] > 0, f"{i} is free, nobody can share it"
            self._holders[i] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Remove a holder from each id; ids without holders become free."""
        for i in ids:
            assert self._holders[i] > 0, f"{i} is released more often than held"
            self._holders[i] -= 1
            if self._holders[i] == 0:
                self._free.append(i)

    def take(self, ids: Iterable[int]) -> None:
        """Add a holder to each id, free or not. Takes time linear in the pool per free id: for startup only."""
        for i in ids:
            if self._holders[i] == 0:
                self._free.remove(i)
            self._holders[i] += 1

    def is_shared(self, id_: int) -> bool:
        """Whether an id has more than one holder."""
        return self._holders[id_] > 1

    def check(self, held: Iterable[int]) -> None:
        """Assert that each id has as many holders as it occurs in `held`, and that all others are free."""
        counts = Counter(held)
        assert [counts[i] for i in range(self.num_ids)] == self._holders, "holders are lost or counted twice"
        assert sorted(self._free) == [i for i, count in enumerate(self._holders) if count == 0], "free ids are wrong"
