"""What running sequences hold of the cache, and what they leave behind.

The only owner of the allocators and of the tree. A sequence is matched when it is admitted, asks for room before each
row, and says after each how far it is; whole pages go to the tree at once, so that others can use them.

    space     a sequence holds                                  a restore point at position p holds
    full      pages of all its tokens: own, or the tree's       (the tree's pages up to p)
    window    pages that the next query sees                    pages of the last window - 1 tokens before p
    state     the slot with the state after its last token      the slot with the state after p tokens

Window pages and state slots are never copied: holders are counted. A row reads the state from one slot and writes it
to another as soon as somebody else holds the first, so a restore point keeps the slot and the sequence goes on in a new
one.

With a host tier, what is computed is saved there by its write policy, and a prefix that the host has beyond the
device's is loaded: into own pages, which the tree adopts once the ranks say that they are whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction, Leaving
from raycache.cache.holding import PLAIN_USE, Holding, Load, Room, Use, WindowPages
from raycache.cache.host_moves import Cursor, WritePolicy
from raycache.cache.host_tier import HostTier
from raycache.cache.node import Parts
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_tier import StorageTier
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.component import FULL
from raycache.memory.moves import Moves
from raycache.memory.pages import PageAllocator, PageIds, SharedAllocator
from raycache.types import PackedTokens

_NO_ROOM_NEEDED = Room({})
_SAVED_TOGETHER = 8
"""Pages of an answer that are saved at a time: each save locks its prefix, which cuts the tree's runs there."""


class SequenceCache:
    """Decides where sequences live.

    Args:
        sizes: of the pools.
        is_kept: whether what sequences compute is kept for others; if not, nothing is matched either.
        eviction: what goes first on the device.
        host: the tier below, or None.
        storage: the tier below that, or None.
        costs: what moving and computing take.
    Attributes:
        host, storage, costs: as given.
        num_evicted: pages of the sequence that were freed to make room.
        num_evicted_unsaved: those of them that the host did not have, if there is one.
        num_points_evicted: restore points that were given up to make room.
    """

    def __init__(
        self,
        sizes: SpaceSizes,
        *,
        is_kept: bool,
        eviction: Eviction = Eviction.LRU,
        host: HostTier | None = None,
        storage: StorageTier | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.page_size = sizes.page_size
        self.is_kept = is_kept
        self.host, self.storage = host, storage
        self.costs = costs or Costs()
        self.num_evicted = 0
        self.num_evicted_unsaved = 0
        self.num_points_evicted = 0
        self._is_saved = np.zeros(sizes.num_pages, np.bool_)
        self._windows = {space: window for space, (window, _) in sizes.windows.items()}
        self._state_space = next(iter(sizes.states), "")
        self._pages = PageAllocator(sizes.num_pages)
        self._shared = {space: SharedAllocator(count) for space, (_, count) in sizes.windows.items()}
        self._shared |= {space: SharedAllocator(count) for space, count in sizes.states.items()}
        self._saving: list[Parts] = []  # of restore points on their way to the host: holders of their own
        self._tree = RadixTree(
            sizes.page_size,
            point_spaces=tuple(self._shared),
            eviction=eviction,
            on_drop=self._release_parts,
            on_leave=self._on_leave if host is not None and host.policy is WritePolicy.BACK else None,
        )

    @property
    def has_points(self) -> bool:
        """Whether sequences can be continued only from restore points."""
        return bool(self._shared)

    @property
    def num_pages(self) -> int:
        """Pages of the sequence, in all."""
        return self._pages.num_pages

    @property
    def num_obtainable(self) -> int:
        """Pages of the sequence that are free or can be made so."""
        return self._pages.num_free + self._tree.num_evictable

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def begin(self, tokens: PackedTokens, *, is_matched: bool, now: int, use: Use = PLAIN_USE) -> Holding:
        """Lock the longest prefix that can be continued.

        Args:
            tokens: of the sequence so far, packed.
            is_matched: whether it may reuse anything.
            now: step number, the LRU clock.
            use: who it belongs to.
        """
        known = tokens if is_matched and self.is_kept else tokens[:4]
        handle = self._tree.match(known, now=now, root=use.root, priority=use.priority, until_s=use.until_s)
        holding = Holding(handle, handle.pages.tolist(), use=use)
        if self.host is not None:
            holding.cursor = self.host.open(known, root=use.root, now=now)
        parts = handle.parts
        for space, ids in parts.items():
            self._shared[space].share(ids)
        for space, window in self._windows.items():
            ids = deque(parts.get(space, ()))
            holding.windows[space] = WindowPages(self._first_page(handle.length, window), ids)
        if parts and self._state_space:
            holding.state = parts[self._state_space][0]
        return holding

    def start(self, holding: Holding, tokens: PackedTokens, *, may_load: bool, now: int) -> int:
        """A sequence is about to run: prepare to load what the host has beyond the device.

        Args:
            holding: as it was begun.
            tokens: of the sequence, packed.
            may_load: whether loading is wanted.
            now: step number.
        Returns:
            Where the sequence goes on, in tokens: `make_room` comes next, then `use`, and `plan_load`.
        """
        if may_load and holding.cursor is not None and holding.cursor.found.length > holding.handle.length:
            self._prepare_load(holding, tokens, now=now)
        return holding.handle.length if holding.load is None else holding.load.position

    def use(self, holding: Holding, tokens: PackedTokens, *, now: int) -> None:
        """A sequence that has room runs: what a second one uses now is saved.

        Not before it has room: one that tries again and again would save the same pages each time.
        """
        holding.is_started = True
        if self.host is not None and self.host.policy is not WritePolicy.BACK and holding.load is None:
            self._save(holding, tokens, now=now)

    def load_more(self, holding: Holding, tokens: PackedTokens, num_computed: int, *, now: int) -> int:
        """Prepare to load what the host has got behind a sequence that runs; only for models without restore points.

        Returns:
            As `start`; `num_computed` if there is nothing.
        """
        if self.host is None or self._shared or holding.cursor is None:
            return num_computed
        found = holding.cursor.found
        self.host.rematch(found, tokens, now=now)
        if found.length <= num_computed:
            return num_computed
        first = holding.handle.length // self.page_size
        holding.load = Load(found.clone(), first, holding.handle.length, {}, {})
        self.host.hold({})
        return found.length

    def drop_load(self, holding: Holding) -> None:
        """Let go of what a load needs: it is over, or is not made."""
        load, holding.load = holding.load, None
        if load is not None and self.host is not None:
            load.handle.release()
            self.host.let_go(load.host_parts)
            self._release_parts(load.parts)

    def plan_load(self, holding: Holding) -> int:
        """Plan the moves of a load that was prepared, once the row behind it has room; their number."""
        load = holding.load
        assert load is not None and self.host is not None, "there is something to load"
        stop = load.position // self.page_size
        load.number = self.host.load(
            load.handle,
            first=load.first,
            pages=holding.pages[load.first : stop],
            parts=load.parts,
            host_parts=load.host_parts,
        )
        return load.number

    def finish_load(
        self, holding: Holding, tokens: PackedTokens, *, is_whole: bool, is_bad: bool = False, now: int
    ) -> None:
        """The ranks have said what became of a load; the next is `advance`, or `end` where it is not whole.

        Args:
            holding: of the sequence.
            tokens: of the sequence, packed.
            is_whole: whether the loads of the step are what was saved.
            is_bad: whether it was this one that was not, so that the host has to forget it.
            now: step number.
        """
        load = holding.load
        assert load is not None and self.host is not None, "only what was planned comes back"
        if not is_whole:
            self.drop_load(holding)
            if holding.cursor is not None:  # it locks what is to go
                self.host.close(holding.cursor)
                holding.cursor = None
            if not is_bad:
                return
            last = load.position // self.page_size - 1  # whose restore point may be what is bad
            self.host.discard(tokens, root=holding.use.root, first_page=min(load.first, last))
            return
        self._is_saved[holding.pages[load.first : load.position // self.page_size]] = True
        self._adopt(holding, tokens, load.position, now=now)
        if load.parts and self._tree.keep(holding.handle, load.parts):
            load.parts = {}
        self.drop_load(holding)

    def make_room(
        self, holding: Holding, start: int, stop: int, *, num_drafts: int = 0, num_next_drafts: int = 0
    ) -> Room | None:
        """Room for the tokens [start, stop) of a sequence; None, with nothing taken, if there is too little.

        What others could reuse is evicted for it. The last `num_drafts` tokens may turn out to be wrong; the sequence
        goes on behind any of them then. A draft model guesses on `num_next_drafts` places more.
        """
        next_len = stop - num_drafts
        stop += num_next_drafts
        missing = -(-stop // self.page_size) - len(holding.pages)
        if missing <= 0 and not self._shared:
            return _NO_ROOM_NEEDED  # nearly every decode step of a dense model
        needed = {FULL: missing}
        skipped = {}
        for space, window in self._windows.items():
            held = holding.windows[space]
            first = max(held.end, self._first_page(next_len, window))
            skipped[space] = first - held.end
            needed[space] = max(0, -(-stop // self.page_size) - first)
        if self._state_space:
            is_kept = holding.state < 0 or self._shared[self._state_space].is_shared(holding.state)
            needed[self._state_space] = num_drafts + is_kept
        if not all(self._make_free(space, count) for space, count in needed.items()):
            return None
        holding.next_len = next_len
        return self._take(holding, needed, skipped, num_drafts=num_drafts)

    def advance(
        self, holding: Holding, tokens: PackedTokens, num_computed: int, *, is_kept: bool, is_point: bool, now: int
    ) -> None:
        """A sequence has computed its first `num_computed` tokens.

        Args:
            holding: of the sequence.
            tokens: of the sequence, packed, at least so many.
            num_computed: in tokens.
            is_kept: whether its whole pages go to the tree.
            is_point: whether this should become a restore point.
            now: step number.
        """
        if not self._shared and num_computed - holding.handle.length < self.page_size:
            return  # no whole page more
        if holding.next_states:
            old, written = holding.state, holding.next_states
            holding.state, holding.next_states = written[num_computed - holding.next_len], ()
            self._shared[self._state_space].release({old, *written} - {-1, holding.state})
        for space, window in self._windows.items():
            self._leave_window(space, holding.windows[space], self._first_page(num_computed, window))
        if not (is_kept and self.is_kept):
            return
        self._adopt(holding, tokens, num_computed, now=now)
        if holding.checkpoint is not None and holding.checkpoint[0] < holding.handle.length:
            self._replace_checkpoint(holding, None)  # the prefix ends elsewhere now: nobody could use it
        if self.has_points and num_computed == holding.handle.length:
            self._replace_checkpoint(holding, (num_computed, self._parts(holding, num_computed)))
            if is_point:
                self._keep_checkpoint(holding)
        self._save_new(holding, tokens, now=now)

    def end(self, holding: Holding, tokens: PackedTokens = b"", *, now: int = 0) -> None:
        """Give everything back; the last page boundary becomes a restore point.

        Args:
            holding: of the sequence.
            tokens: of the sequence, packed; what the host lacks of them is saved.
            now: step number.
        """
        self._keep_checkpoint(holding)
        self._replace_checkpoint(holding, None)
        if holding.is_started and self.host is not None and self.host.policy is WritePolicy.THROUGH:
            self._save(holding, tokens, now=now)
        self.drop_load(holding)
        if holding.cursor is not None and self.host is not None:
            self.host.close(holding.cursor)
        self._pages.free(np.asarray(sorted(holding.own), np.int32))
        holding.handle.release()
        for space, window in holding.windows.items():
            self._shared[space].release(window.held)
        if self._state_space:
            self._shared[self._state_space].release({holding.state, *holding.next_states} - {-1})

    def evict(self, space: str) -> bool:
        """Give up one page of the sequence, or the restore point that comes next, of what nobody holds.

        Returns:
            Whether there was one.
        """
        if space != FULL:
            return space in self._shared and self._tree.evict_point(space)
        evicted = self._tree.evict(1)
        self._pages.free(evicted)
        return len(evicted) > 0

    def clear(self) -> None:
        """Forget everything that no running sequence holds, on the device."""
        self._pages.free(self._tree.clear())

    def tick(self, now_s: float) -> None:
        """Set the clock that priorities expire by, in seconds."""
        self._tree.tick(now_s)
        if self.host is not None:
            self.host.tick(now_s)

    # --- moves between tiers ------------------------------------------------------------------------------------------

    @property
    def has_moves(self) -> bool:
        """Whether pages are on their way between tiers."""
        return (self.host is not None and self.host.has_moves) or (
            self.storage is not None and self.storage.num_open > 0
        )

    def take_moves(self) -> tuple[list[Moves], list[Moves], bool]:
        """See `HostTier.take_moves`."""
        return ([], [], False) if self.host is None else self.host.take_moves()

    def save_prefixes(self, then: Callable[[], None]) -> Iterator[bool]:
        """Copy to the host what it lacks of all that the device holds.

        Args:
            then: called once for each prefix that is copied, when it is there or has failed.
        Returns:
            True after each prefix that is being copied; False when moves should end before the next one.
        """
        if self.host is None:
            return
        for node in self._tree.ends():
            handle = self._tree.lock(node)
            if handle is not None and not self.host.can_take(handle.length // self.page_size, handle.parts):
                handle.release()
                yield False
                handle = self._tree.lock(node)
            if handle is not None and self._copy_prefix(handle, self.host, then):
                yield True

    def device_len(self, tokens: PackedTokens, *, use: Use, now: int) -> int:
        """Tokens of a prompt that the device has and could continue."""
        handle = self._tree.match(tokens, now=now, root=use.root, priority=use.priority, until_s=use.until_s)
        handle.release()
        return handle.length

    def num_loadable(self, holding: Holding) -> int:
        """Tokens that a sequence that was begun would gain from the host."""
        return 0 if holding.cursor is None else max(0, holding.cursor.found.length - holding.handle.length)

    # --- counts and checks --------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Balances of the sequence's pages, by name of EngineStats."""
        free, cached = self._pages.num_free, self._tree.num_cached
        return {
            "pages_total": self._pages.num_pages,
            "pages_free": free,
            "pages_in_use": self._pages.num_pages - free - cached,
            "pages_cached": cached,
            "pages_locked": self._tree.num_locked,
            "evicted_pages": self.num_evicted,
            "restore_points": self._tree.num_points,
            "evicted_restore_points": self.num_points_evicted,
        }

    def tiers(self) -> dict[str, dict[str, float]]:
        """Figures of the tiers below the device."""
        if self.host is None:
            return {}
        found = {"host": self.host.counts() | self.costs.figures()}
        found["host"]["evicted_unsaved_pages"] = self.num_evicted_unsaved
        return found if self.storage is None else {**found, "storage": self.storage.counts()}

    def shared_counts(self) -> dict[str, tuple[int, int]]:
        """(total, free) of each window and state space."""
        return {space: (allocator.num_ids, allocator.num_free) for space, allocator in self._shared.items()}

    def components(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Tier -> component space -> (total, free) units."""
        device = {FULL: (self._pages.num_pages, self._pages.num_free), **self.shared_counts()}
        return {"device": device} if self.host is None else {"device": device, "host": self.host.components()}

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert that every page and slot is free, or held by exactly those who know of it."""
        self._tree.check()
        if self.host is not None:
            self.host.check()
        own = [page for holding in holdings for page in holding.own]
        self._pages.check(in_use=np.asarray(own, np.int32), cached=self._tree.cached_pages())
        is_idle = not holdings and (self.host is None or not self.host.has_moves)
        assert self._tree.num_locked == 0 or not is_idle, "pages are locked and nothing runs"
        parts = self._tree.point_parts() + self._saving
        parts += [holding.checkpoint[1] for holding in holdings if holding.checkpoint is not None]
        parts += [holding.load.parts for holding in holdings if holding.load is not None]
        for space, allocator in self._shared.items():
            held = [i for part in parts for i in part.get(space, ())]
            for holding in holdings:
                if space == self._state_space:
                    held += {holding.state, *holding.next_states} - {-1}
                else:
                    held += holding.windows[space].held
            allocator.check(held)

    # --- how ----------------------------------------------------------------------------------------------------------

    def _prepare_load(self, holding: Holding, tokens: PackedTokens, *, now: int) -> None:
        """Take what the restore point needs on the device; pages of the sequence come with the room for the row."""
        assert holding.cursor is not None and self.host is not None, "there is a host tier"
        found = holding.cursor.found
        host_parts = dict(found.parts)
        needed = {space: len(ids) for space, ids in host_parts.items()}
        if self.has_points and not needed:
            return  # the restore point made room for others since it was matched
        self.host.hold(host_parts)  # what leaves the device now may need room on the host
        if not all(self._make_free(space, count) for space, count in needed.items()):
            self.host.let_go(host_parts)
            return
        # Pages that the device knows beyond its last restore point need not be loaded.
        self._tree.lengthen(holding.handle, tokens, limit=found.length, now=now)
        holding.pages += holding.handle.pages_from(len(holding.pages)).tolist()
        parts = {space: tuple(self._shared[space].allocate(count)) for space, count in needed.items()}
        for space, window in self._windows.items():
            held = holding.windows[space]
            self._shared[space].release(held.held)
            holding.windows[space] = WindowPages(self._first_page(found.length, window), deque(parts[space]))
        if self._state_space:
            if holding.state >= 0:
                self._shared[self._state_space].release([holding.state])
            holding.state = parts[self._state_space][0]
        for space, taken in parts.items():
            self._shared[space].share(taken)
        holding.load = Load(found.clone(), len(holding.pages), holding.handle.length, parts, host_parts)

    def _save_new(self, holding: Holding, tokens: PackedTokens, *, now: int) -> None:
        """Under write_through, hand pages over once they are computed: those of prompts at once, of answers some at a
        time."""
        if self.host is None or self.host.policy is not WritePolicy.THROUGH or holding.cursor is None:
            return
        stop = holding.handle.length // self.page_size
        new = stop - holding.num_saved
        if new >= _SAVED_TOGETHER or (new and not holding.num_saved) or (holding.handle.parts and new):
            self._save(holding, tokens, now=now)

    def _save(self, holding: Holding, tokens: PackedTokens, *, now: int) -> None:
        """Copy the tree's pages of a sequence to the host, with the restore point at the end of its handle."""
        stop, parts = holding.handle.length // self.page_size, holding.handle.parts
        point = stop if parts else holding.saved_point
        if holding.cursor is None or (stop, point) == (holding.num_saved, holding.saved_point):
            return
        holding.num_saved, holding.saved_point = stop, point
        self._copy(holding.cursor, holding.handle, tokens, now=now)

    def _copy_prefix(self, handle: PrefixHandle, host: HostTier, then: Callable[[], None]) -> bool:
        tokens = self._tree.tokens(handle)
        cursor = host.open(tokens, root=handle.root, now=0)
        is_planned = self._copy(cursor, handle, tokens, now=0, then=then)
        host.close(cursor)
        handle.release()
        return is_planned

    def _copy(
        self,
        cursor: Cursor,
        prefix: PrefixHandle,
        tokens: PackedTokens,
        *,
        now: int,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save a prefix that the device holds, with its restore point; whether there was anything that could be saved,
        of which `then` is told the end."""
        assert self.host is not None, "asked for with a host tier only"
        handle, stop = prefix.clone(), prefix.length // self.page_size
        moved: list[PageIds] = []
        held = dict(prefix.parts)
        for space, ids in held.items():
            self._shared[space].share(ids)
        self._saving.append(held)

        def pages(first: int) -> PageIds:
            moved.append(handle.pages_from(first))
            return moved[-1]

        def release(is_done: bool) -> None:
            for ids in moved if is_done else ():
                self._is_saved[ids] = True
            handle.release()
            self._saving.remove(held)
            self._release_parts(held)
            if is_planned:
                then()

        is_planned = self.host.save(cursor, tokens, pages, stop=stop, parts=held, release=release, now=now)
        if not is_planned:
            release(False)
        return is_planned

    def _on_leave(self, leaving: Leaving) -> None:
        assert self.host is not None, "asked for with a host tier only"
        self._is_saved[leaving.pages] |= self.host.save_leaving(leaving)

    def _first_page(self, position: int, window: int) -> int:
        """The first page that a query at `position` sees through a window."""
        return max(0, position - window + 1) // self.page_size

    def _make_free(self, space: str, count: int) -> bool:
        if space == FULL:
            missing = count - self._pages.num_free
            if missing > 0:
                evicted = self._tree.evict(missing)
                self._pages.free(evicted)
                self.num_evicted += len(evicted)
                self.num_evicted_unsaved += int(np.count_nonzero(~self._is_saved[evicted]))
            return self._pages.num_free >= count
        allocator = self._shared[space]
        while allocator.num_free < count and self._tree.evict_point(space):
            self.num_points_evicted += 1
        return allocator.num_free >= count

    def _take(
        self, holding: Holding, needed: Mapping[str, int], skipped: Mapping[str, int], *, num_drafts: int
    ) -> Room:
        new_pages = {}
        if needed[FULL] > 0:
            new_pages[FULL] = self._pages.allocate(needed[FULL]).tolist()
            holding.pages += new_pages[FULL]
            self._is_saved[new_pages[FULL]] = False
            holding.own.update(new_pages[FULL])
        for space, held in holding.windows.items():
            taken = self._shared[space].allocate(needed[space])
            if skipped[space]:
                # What is held lies before the window of whatever comes after this row, but the row itself sees it.
                held.ids.extend([-1] * skipped[space])
            held.ids.extend(taken)
            if skipped[space] or taken:
                new_pages[space] = [-1] * skipped[space] + taken
        room = Room(new_pages)
        if self._state_space:
            room.read_state = holding.state
            taken = self._shared[self._state_space].allocate(needed[self._state_space])
            holding.next_states = tuple(taken if len(taken) > num_drafts else [holding.state, *taken])
            room.write_state, *drafts = holding.next_states
            room.draft_states = tuple(drafts)
        return room

    def _leave_window(self, space: str, held: WindowPages, first: int) -> None:
        while held.first < first and held.ids:
            page = held.ids.popleft()
            held.first += 1
            if page >= 0:
                self._shared[space].release([page])

    def _adopt(self, holding: Holding, tokens: PackedTokens, num_computed: int, *, now: int) -> None:
        """Hand the whole pages that were computed to the tree."""
        known, whole = holding.handle.length // self.page_size, num_computed // self.page_size
        if whole > known:
            pages = np.asarray(holding.pages[known:whole], np.int32)
            adopted = self._tree.extend(holding.handle, tokens, pages, now=now)
            holding.own.difference_update(pages[adopted].tolist())

    def _parts(self, holding: Holding, num_computed: int) -> dict[str, Sequence[int]]:
        """What the next token needs beside the pages of the sequence, with a holder added."""
        end = num_computed // self.page_size  # behind it are places for guesses
        parts: dict[str, Sequence[int]] = {
            space: tuple(window.ids)[: end - window.first] for space, window in holding.windows.items()
        }
        if self._state_space:
            parts[self._state_space] = (holding.state,)
        for space, ids in parts.items():
            self._shared[space].share(ids)
        return parts

    def _replace_checkpoint(self, holding: Holding, checkpoint: tuple[int, Parts] | None) -> None:
        if holding.checkpoint is not None:
            self._release_parts(holding.checkpoint[1])
        holding.checkpoint = checkpoint

    def _keep_checkpoint(self, holding: Holding) -> None:
        """Put the checkpoint, where the sequence's prefix ends, into the tree."""
        if holding.checkpoint is None:
            return
        assert holding.checkpoint[0] == holding.handle.length, "a checkpoint that the prefix has left behind"
        if self._tree.keep(holding.handle, holding.checkpoint[1]):
            holding.checkpoint = None

    def _release_parts(self, parts: Parts) -> None:
        for space, ids in parts.items():
            self._shared[space].release(ids)
