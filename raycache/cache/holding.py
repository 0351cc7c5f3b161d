"""What a running sequence holds of the cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from raycache.cache.host_moves import Cursor
from raycache.cache.node import Parts
from raycache.cache.tree import PrefixHandle
from raycache.memory.component import FULL


@dataclass(slots=True)
class WindowPages:
    """Pages of one window space.

    Attributes:
        first: number of the first page in the sequence that is held.
        ids: of the pages from there on; -1 for those that the row in flight leaves behind at once.
    """

    first: int
    ids: deque[int]

    @property
    def held(self) -> list[int]:
        """The ids without gaps."""
        return [page for page in self.ids if page >= 0]

    @property
    def end(self) -> int:
        """Number of the first page that was not written yet."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Room:
    """Where a row goes.

    Attributes:
        new_pages: space -> pages to append to the tables of the sequence; -1 for those that nobody will read.
        read_state, write_state: slots; -1 for none.
        draft_states: slots, one per draft.
    """

    new_pages: dict[str, list[int]]
    read_state: int = -1
    write_state: int = -1
    draft_states: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Load:
    """A prefix on its way from the host.

    Attributes:
        handle: of the host's prefix.
        first: number of the first page to load.
        num_device: tokens before it that the device had.
        parts: device units for the restore point at the handle's end, with a holder: no row writes there.
        host_parts: its units on the host, held there.
        number: of the moves, 0 before they are planned.
    """

    handle: PrefixHandle
    first: int
    num_device: int
    parts: Parts
    host_parts: Parts
    number: int = 0

    @property
    def position(self) -> int:
        """Where the sequence goes on."""
        return self.handle.length


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses the cache, and how.

    Attributes:
        root: seed of the chain of its prefixes: model, adapter and tenant.
        priority, until_s: for eviction by priority; see `RadixTree.match`.
    """

    root: bytes = b""
    priority: int = 0
    until_s: float = 0.0


PLAIN_USE = Use()


@dataclass(slots=True, eq=False)
class Holding:
    """What one running sequence holds.

    Attributes:
        handle: the locked prefix in the tree.
        pages: of the sequence, in order.
        own: those of them that the tree did not adopt.
        windows: space -> pages.
        state: slot after the last computed token; -1 for none.
        next_states: those that the row in flight writes: after its last token that is no draft, and after each draft.
        next_len: tokens of the sequence after the first of those.
        checkpoint: (position, parts) of the last page boundary that it passed.
        use: who it belongs to.
        cursor: its place in the host tier, if there is one.
        load: what is being loaded for it.
        is_started: whether it runs, and did not only look.
        num_saved, saved_point: pages, and position in pages of the last restore point, that were handed to the host.
    """

    handle: PrefixHandle
    pages: list[int]
    own: set[int] = field(default_factory=set)
    windows: dict[str, WindowPages] = field(default_factory=dict)
    state: int = -1
    next_states: tuple[int, ...] = ()
    next_len: int = 0
    checkpoint: tuple[int, Parts] | None = None
    use: Use = PLAIN_USE
    cursor: Cursor | None = None
    load: Load | None = None
    is_started: bool = False
    num_saved: int = 0
    saved_point: int = 0

    def tables(self) -> dict[str, list[int]]:
        """Space -> page ids from the sequence's begin on, -1 for those that are not held."""
        return {FULL: list(self.pages)} | {
            space: [-1] * window.first + list(window.ids) for space, window in self.windows.items()
        }
