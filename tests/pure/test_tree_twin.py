"""The tree with its allocator against a slow twin: dicts of whole prefixes, and sorting."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from raycache.cache.evict import Eviction, Leaving
from raycache.cache.tree import PrefixHandle, RadixTree
from raycache.memory.pages import PageAllocator


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def page_ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.intp)


Position = tuple[bytes, tuple[int, ...]]  # a root, and a prefix of whole pages
PAGE = 2  # tokens per page in the state machine


@dataclass(eq=False)
class Running:
    """A request: its root, its tokens, its handle, and the duplicates that it computed."""

    root: bytes
    tokens: list[int]
    handle: PrefixHandle
    duplicates: list[int] = field(default_factory=list)
    claim: tuple[int, float] = (0, 0.0)

    @property
    def position(self) -> Position:
        return self.root, tuple(self.tokens[: self.handle.length])

    @property
    def positions(self) -> list[Position]:
        return positions(self.root, self.position[1])


def positions(root: bytes, tokens: Sequence[int]) -> list[Position]:
    """All prefixes in whole pages, shortest first."""
    return [(root, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)]


@dataclass
class Use:
    """How a page was used, by every handle that ever covered it."""

    last: int = 0
    num_matches: int = 0
    claims: set[tuple[int, float]] = field(default_factory=set)

    def worth(self, eviction: Eviction, now_s: float) -> tuple[int, int]:
        in_force = [priority if now_s < until_s or until_s == 0 else 0 for priority, until_s in self.claims]
        ranks = {Eviction.LRU: 0, Eviction.LFU: self.num_matches, Eviction.PRIORITY: max(in_force, default=0)}
        return ranks[eviction], self.last


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=11)
roots = st.sampled_from([b"", b"salt"])
priorities = st.sampled_from([0, 0, 0, 1, 2, -1])
times_to_live = st.sampled_from([0.0, 1.0, 3.0])


class TreeAgainstDict(RuleBasedStateMachine):
    """The tree, against dicts from every cached position to its page and its uses, and a set of what was evicted."""

    running = Bundle("running")
    eviction = Eviction.LRU

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE, eviction=self.eviction, on_leave=self._see)
        self.pool = PageAllocator(24)
        self.page_of: dict[Position, int] = {}
        self.uses: dict[Position, Use] = {}
        self.evicted: set[Position] = set()
        self.leaving: list[Leaving] = []
        self.requests: list[Running] = []
        self.now = 0
        self.now_s = 0.0

    @rule(target=running, tokens=token_lists, root=roots, priority=priorities, ttl_s=times_to_live)
    def start(self, tokens: list[int], root: bytes, priority: int, ttl_s: float) -> Running:
        self.now += 1
        claim = self._claim(priority, ttl_s)
        handle = self.tree.match(packed(tokens), now=self.now, root=root, priority=claim[0], until_s=claim[1])
        request = Running(root, tokens, handle, claim=claim)
        self.requests.append(request)
        assert handle.length == self._cached_len(root, tokens)
        assert handle.root == root
        self._use(request.positions, claim, is_match=handle.length > 0)
        self._check_reason(request)
        return request

    @rule(tokens=token_lists, root=roots, priority=priorities, ttl_s=times_to_live)
    def match_lengths(self, tokens: list[int], root: bytes, priority: int, ttl_s: float) -> None:
        self.now += 1
        claim, length = self._claim(priority, ttl_s), self._cached_len(root, tokens)
        lengths = self.tree.match_lengths(packed(tokens), now=self.now, root=root, priority=claim[0], until_s=claim[1])
        assert lengths == (length, length)
        self._use(positions(root, tokens[:length]), claim, is_match=length > 0)

    @rule(request=running, more=token_lists, priority=priorities, ttl_s=times_to_live)
    def rematch(self, request: Running, more: list[int], priority: int, ttl_s: float) -> None:
        self.now += 1
        before = request.handle.length
        request.tokens, request.claim = [*request.position[1], *more], self._claim(priority, ttl_s)
        kwargs = dict(priority=request.claim[0], until_s=request.claim[1])
        self.tree.rematch(request.handle, packed(request.tokens), now=self.now, **kwargs)
        assert request.handle.length == max(before, self._cached_len(request.root, request.tokens))
        self._use(request.positions, request.claim, is_match=request.handle.length > before)
        self._check_reason(request)

    @rule(request=running, more=token_lists)
    def lengthen(self, request: Running, more: list[int]) -> None:
        self.now += 1
        request.tokens = [*request.position[1], *more]
        limit = len(request.tokens) // PAGE * PAGE
        self.tree.lengthen(request.handle, packed(request.tokens), limit=limit, now=self.now)
        known = [position for position in positions(request.root, request.tokens) if position in self.page_of]
        assert request.positions == known
        self._use(request.positions, request.claim)

    @rule(target=running, request=running)
    def clone(self, request: Running) -> Running:
        clone = Running(request.root, list(request.tokens), request.handle.clone(), claim=request.claim)
        assert (clone.handle.root, clone.handle.key) == (request.handle.root, request.handle.key)
        assert clone.handle.known_length == request.handle.known_length
        assert clone.handle.was_evicted == request.handle.was_evicted
        self.requests.append(clone)
        return clone

    @rule(request=running, more=token_lists, same_step=st.booleans(), same_claim=st.booleans(), priority=priorities)
    def extend(self, request: Running, more: list[int], same_step: bool, same_claim: bool, priority: int) -> None:
        self.now += not same_step
        start = request.handle.length
        request.tokens = [*request.position[1], *more]
        request.claim = request.claim if same_claim else (priority, 0.0)
        pages = self.pool.allocate(min(len(more) // PAGE, self.pool.num_free))
        kwargs = dict(priority=request.claim[0], until_s=request.claim[1])
        num_known = self.tree.extend(request.handle, packed(request.tokens), pages, now=self.now, **kwargs)
        assert request.handle.length == start + len(pages) * PAGE
        for i, (position, page) in enumerate(zip(request.positions[start // PAGE :], pages, strict=True)):
            assert (i < num_known) == (position in self.page_of)
            if i >= num_known:
                self.page_of[position] = int(page)
                self.uses[position] = Use()
                self.evicted.discard(position)
            else:
                request.duplicates.append(int(page))
        self._use(request.positions, request.claim)

    @rule(request=consumes(running))
    def release(self, request: Running) -> None:
        request.handle.release()
        self.requests.remove(request)
        self.pool.free(page_ids(*request.duplicates))

    @rule(passed_s=st.sampled_from([0.5, 2.0]))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.tree.tick(self.now_s)

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.tree.num_evictable
        evicted = self.tree.evict(num_pages)
        assert len(evicted) == min(num_pages, num_evictable)
        seen = [leaving.pages[leaving.num_kept :][::-1] for leaving in self.leaving]
        assert np.concatenate([page_ids(), *seen]).tolist() == evicted.tolist()
        self.leaving.clear()
        self._forget(evicted)

    @rule(tokens=token_lists, root=roots, first_page=st.integers(0, 3))
    def discard(self, tokens: list[int], root: bytes, first_page: int) -> None:
        prefix, locked = tuple(tokens[: (first_page + 1) * PAGE]), self._locked()
        below = {(r, p) for r, p in self.page_of if r == root and p[: len(prefix)] == prefix}
        gone = below - locked if len(prefix) == (first_page + 1) * PAGE else set()
        pages = self.tree.discard(packed(tokens), root=root, first_page=first_page)
        assert sorted(pages.tolist()) == sorted(self.page_of.pop(position) for position in gone)
        self.evicted = {position for position in self.evicted if self._is_below_what_is_known(position)}
        self.pool.free(pages)

    @precondition(lambda self: self.pool.num_free < 4)
    @rule()
    def clear(self) -> None:
        self._forget(self.tree.clear())
        self.evicted.clear()
        assert set(self.page_of) == self._locked()

    @invariant()
    def pages_balance(self) -> None:
        self.tree.check()
        assert not self.leaving
        duplicates = page_ids(*[page for request in self.requests for page in request.duplicates])
        self.pool.check(in_use=duplicates, cached=self.tree.trie.pages())

    @invariant()
    def tree_and_dict_agree(self) -> None:
        assert sorted(self.tree.trie.pages().tolist()) == sorted(self.page_of.values())
        assert self.tree.num_locked == len(self._locked())
        used = {root for root, _ in self.page_of} | {request.root for request in self.requests}
        assert len(self.tree.trie.roots) == len(used)
        for request in self.requests:
            assert request.handle.pages.tolist() == [self.page_of[position] for position in request.positions]

    @invariant()
    def keys_are_equal_where_positions_are(self) -> None:
        keys = {request.handle.key for request in self.requests}
        pairs = {(request.handle.key, request.position) for request in self.requests}
        assert len(keys) == len(pairs) == len({request.position for request in self.requests})

    def _claim(self, priority: int, ttl_s: float) -> tuple[int, float]:
        return priority, self.now_s + ttl_s if ttl_s else 0.0

    def _cached_len(self, root: bytes, tokens: list[int]) -> int:
        return max((len(p[1]) for p in positions(root, tokens[:-1]) if p in self.page_of), default=0)

    def _locked(self) -> set[Position]:
        return {position for request in self.requests for position in request.positions}

    def _use(self, used: list[Position], claim: tuple[int, float], *, is_match: bool = False) -> None:
        for position in used:
            use = self.uses[position]
            use.last = self.now
            use.num_matches += is_match
            use.claims.add(claim)

    def _check_reason(self, request: Running) -> None:
        end = request.handle.known_length + PAGE
        lacked = request.root, tuple(request.tokens[:end])
        assert request.handle.was_evicted == (end <= len(request.tokens) and lacked in self.evicted)

    def _is_below_what_is_known(self, position: Position) -> bool:
        return all(above in self.page_of or above in self.evicted for above in positions(*position))

    def _see(self, leaving: Leaving) -> None:
        path = positions(leaving.root, np.frombuffer(leaving.tokens, "<i4").tolist())
        assert leaving.pages.tolist() == [self.page_of[position] for position in path]
        assert (leaving.num_kept < len(path), leaving.point) == (True, None)
        self.leaving.append(leaving)

    def _forget(self, evicted: np.ndarray) -> None:
        """Each evicted page was, in its turn, the end of an unlocked prefix, and none such was worth less."""
        locked = self._locked()
        for page in evicted.tolist():
            parents = {(root, prefix[:-PAGE]) for root, prefix in self.page_of}
            ends = [position for position in self.page_of if position not in parents and position not in locked]
            victim = next(position for position in ends if self.page_of[position] == page)
            worth = {position: self.uses[position].worth(self.eviction, self.now_s) for position in ends}
            assert worth[victim] == min(worth.values())
            del self.page_of[victim], self.uses[victim]
            self.evicted.add(victim)
        self.pool.free(evicted)


class TreeByUses(TreeAgainstDict):
    eviction = Eviction.LFU


class TreeByPriority(TreeAgainstDict):
    eviction = Eviction.PRIORITY


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeByUses = TreeByUses.TestCase
TestTreeByPriority = TreeByPriority.TestCase
TestTreeAgainstDict.settings = TestTreeByUses.settings = TestTreeByPriority.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("machine", [TreeAgainstDict, TreeByUses, TreeByPriority])
def test_a_long_random_life_agrees_with_the_dict(machine: type[TreeAgainstDict], seed: int) -> None:
    """Goes where short examples do not: deep trees, evicted and cached again many times."""
    life, random = machine(), np.random.default_rng(seed)

    def draw(*choices: int | float) -> float:
        return choices[random.integers(len(choices))]

    def tokens() -> list[int]:
        return random.integers(0, 2, random.integers(1, 12)).tolist() if draw(0, 0, 1) else [0] * int(draw(5, 8, 11))

    for _ in range(1500):
        claim = dict(priority=int(draw(0, 0, 0, 1, 2, -1)), ttl_s=draw(0.0, 1.0, 3.0))
        if not life.requests or (len(life.requests) < 6 and draw(0, 0, 1)):
            life.start(tokens(), root=[b"", b"", b"salt"][random.integers(3)], **claim)
        request = life.requests[random.integers(len(life.requests))]
        match random.integers(13):
            case 0:
                life.rematch(request, tokens(), **claim)
            case 1:
                life.lengthen(request, tokens())
            case 2 if len(life.requests) < 8:
                life.clone(request)
            case 3 | 4 | 5:
                life.extend(request, tokens(), draw(True, False), draw(True, False), claim["priority"])
            case 6 | 7 | 8:
                life.release(request)
            case 9:
                life.tick(draw(0.5, 2.0))
            case 10:
                life.evict(int(draw(1, 1, 2, 5)))
            case 11 if draw(0, 0, 0, 1):
                life.discard(tokens(), root=[b"", b"salt"][random.integers(2)], first_page=random.integers(4))
            case 11 if draw(0, 0, 0, 0, 0, 0, 0, 1):
                life.clear()
            case 12:
                life.match_lengths(tokens(), root=[b"", b"salt"][random.integers(2)], **claim)
        life.pages_balance()
        life.tree_and_dict_agree()
        life.keys_are_equal_where_positions_are()
