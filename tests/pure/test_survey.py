"""The largest prefixes of a tree against those of a plain trie, and in slices between which the tree changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.cache import survey
from raycache.cache.survey import Wanted, largest_prefixes
from raycache.cache.tree import RadixTree
from raycache.decider.survey import _UNITS, Survey
from raycache.types import CacheAction, CacheCommand, TreeQuery
from tests.oracle.tiered import Setup, Tiered

S = 2
_ROOTS = (b"alice", b"bob", b"carol")
_Prompt = tuple[bytes, list[int]]
"""Root and a number for each page."""


def put(tree: RadixTree, prompt: _Prompt, *, now: int) -> None:
    root, pages = prompt
    tokens = np.repeat(np.array(pages, "<i4"), S).tobytes()
    handle = tree.match(tokens, now=now, root=root)
    missing = len(pages) - handle.length // S
    if missing:
        first = 100 * now  # ids that nothing else has
        tree.extend(handle, tokens, np.arange(first, first + missing, dtype=np.intp), now=now)
    handle.release()


def filled(prompts: Sequence[_Prompt]) -> RadixTree:
    tree = RadixTree(S)
    for now, prompt in enumerate(prompts, 1):
        put(tree, prompt, now=now)
    return tree


def wanted(**changes: Any) -> Wanted:
    everything: dict[str, Any] = {
        "limit": 10_000,
        "depth": 100,
        "roots": None,
        "named": {},
        "shown": b"",
        "secret": b"s",
    }
    return Wanted(**everything | changes)


def drained(work: Any) -> dict[str, Any]:
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: dict[str, Any] = end.value
            return answer


def every(prefix: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for below in prefix["prefixes"]:
        yield below
        yield from every(below)


def plain(prefix: dict[str, Any]) -> Any:
    """A prefix without ids and use, in a form that two can be compared in."""
    below = sorted((plain(each) for each in prefix["prefixes"]), key=repr)
    return prefix["start"], prefix["tokens"], prefix["pages"], prefix["ends"], below


def expected(prompts: Sequence[_Prompt]) -> Any:
    """The same from sets of sequences."""

    def below(known: set[tuple[int, ...]], path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return sorted(one for one in known if len(one) == len(path) + 1 and one[:-1] == path)

    def described(known: set[tuple[int, ...]], path: tuple[int, ...]) -> Any:
        start, whole = len(path) - 1, path
        while len(following := below(known, whole)) == 1:
            (whole,) = following
        pages = sum(one[: len(path)] == path for one in known)
        ends = sum(one[: len(path)] == path and not below(known, one) for one in known)
        return (start * S, (len(whole) - start) * S, pages, ends, sorted(map(of(known), following), key=repr))

    def of(known: set[tuple[int, ...]]) -> Callable[[tuple[int, ...]], Any]:
        return lambda path: described(known, path)

    roots = []
    for root in {root for root, pages in prompts if pages}:
        known = {tuple(pages[:n]) for own, pages in prompts if own == root for n in range(1, len(pages) + 1)}
        ends = sum(not below(known, one) for one in known)
        roots.append((0, 0, len(known), ends, sorted(map(of(known), below(known, ())), key=repr)))
    return 0, 0, sum(root[2] for root in roots), sum(root[3] for root in roots), sorted(roots, key=repr)


_PROMPTS = st.lists(
    st.tuples(st.sampled_from(_ROOTS), st.lists(st.integers(0, 2), min_size=1, max_size=7)), max_size=12
)


@given(_PROMPTS)
def test_all_prefixes_are_those_of_a_plain_trie(prompts: list[_Prompt]) -> None:
    tree = filled(prompts)
    answer = drained(largest_prefixes(tree, wanted()))
    assert plain(answer) == expected(prompts)
    assert answer["pages"] == tree.num_cached and answer["is_complete"]
    assert all(each["others"] == {"prefixes": 0, "pages": 0} for each in (answer, *every(answer)))
    ids = [each["id"] for each in every(answer)]
    assert len(set(ids)) == len(ids)
    tree.check()


@given(_PROMPTS, st.integers(1, 6), st.integers(1, 4))
def test_a_limit_leaves_the_largest_and_the_sum_of_the_rest(prompts: list[_Prompt], limit: int, depth: int) -> None:
    tree = filled(prompts)
    whole = {each["id"]: each for each in every(drained(largest_prefixes(tree, wanted(depth=depth))))}
    answer = drained(largest_prefixes(tree, wanted(limit=limit, depth=depth)))
    found = {each["id"]: each for each in every(answer)}
    assert (
        sorted((each["pages"] for each in found.values()), reverse=True)
        == (sorted((each["pages"] for each in whole.values()), reverse=True)[:limit])
    )
    for prefix in (answer, *found.values()):
        own = prefix["tokens"] // S
        assert prefix["pages"] == own + prefix["others"]["pages"] + sum(each["pages"] for each in prefix["prefixes"])
        assert (prefix["others"]["pages"] > 0) == (prefix["others"]["prefixes"] > 0)


@given(_PROMPTS, st.lists(st.one_of(st.integers(1, 5), *[_PROMPTS.filter(bool)]), max_size=30), st.integers(1, 9))
def test_the_tree_may_change_between_slices(prompts: list[_Prompt], changes: list[Any], units: int) -> None:
    tree = filled(prompts)
    work, now = largest_prefixes(tree, wanted(limit=5, depth=4)), len(prompts)
    most = tree.num_cached
    answer = None
    for change in changes:
        try:
            for _ in range(units):
                next(work)
        except StopIteration as end:
            answer = end.value
            break
        if isinstance(change, int):
            tree.evict(change)
        else:
            for prompt in change:
                now += 1
                put(tree, prompt, now=now)
        most += tree.num_cached
    answer = answer or drained(work)
    assert 0 <= answer["pages"] <= most and len(list(every(answer))) <= 5
    assert all(each["others"]["pages"] >= 0 for each in (answer, *every(answer)))
    tree.check()


def test_only_own_tokens_are_shown_and_only_own_trees_are_looked_at() -> None:
    prompts: list[_Prompt] = [(root, [7, 8, number]) for number, root in enumerate(_ROOTS)]
    tree = filled([*prompts, (b"alice", [7, 8, 9])])
    named = {b"alice": "Alice", b"bob": "Bob"}
    answer = drained(largest_prefixes(tree, wanted(named=named, shown=b"alice")))
    roots = {root["tenant"]: root for root in answer["prefixes"]}
    assert set(roots) == {"Alice", "Bob", None}
    heads = {tenant: [each.get("head") for each in every(root)] for tenant, root in roots.items()}
    assert sorted(heads["Alice"]) == [[0, 0], [7, 7], [9, 9]] and heads["Bob"] == heads[None] == [None]
    assert all("head" not in root for root in roots.values())
    own = drained(largest_prefixes(tree, wanted(roots=[b"bob", b"nobody"], named=named, shown=b"bob")))
    assert [root["tenant"] for root in own["prefixes"]] == ["Bob"] and own["pages"] == 3
    # The same tokens of two tenants have different ids, and other ids under another secret.
    first, second = ({each["id"] for each in every(roots[name])} for name in ("Alice", "Bob"))
    other = drained(largest_prefixes(tree, wanted(secret=b"another")))
    assert not first & second and not (first | second) & {each["id"] for each in every(other)}


def test_use_and_locks_are_summed_up() -> None:
    tree = filled([(b"", [1, 2, 3]), (b"", [1, 2, 4, 5])])
    handle = tree.match(np.repeat(np.array([1, 2, 3, 0], "<i4"), S).tobytes(), now=9)
    (root,) = drained(largest_prefixes(tree, wanted()))["prefixes"]
    (shared,) = root["prefixes"]
    assert (shared["pages"], shared["locked_pages"], shared["last_used"], shared["ends"]) == (5, 3, 9, 2)
    assert {(each["pages"], each["locked_pages"], each["last_used"]) for each in shared["prefixes"]} == {
        (1, 1, 9),
        (2, 0, 2),
    }
    handle.release()


def test_too_large_a_tree_is_said_to_be_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[_Prompt] = [(b"", [1, number, number]) for number in range(40)]
    tree = filled(prompts)
    assert drained(largest_prefixes(tree, wanted()))["is_complete"]
    monkeypatch.setattr(survey, "_MOST_BRANCHES", 10)
    answer = drained(largest_prefixes(tree, wanted()))
    assert not answer["is_complete"] and answer["pages"] == 1 + 10 * 2
    assert {each["last_used"] for each in every(answer)} == set(range(31, 41))  # the newest
    monkeypatch.setattr(survey, "MOST_NODES", 7)
    answer = drained(largest_prefixes(tree, wanted()))
    assert not answer["is_complete"] and answer["pages"] == 1 + 5 * 2  # beside the root and the shared page


# --- between steps ----------------------------------------------------------------------------------------------------


def tiered() -> Tiered:
    tiers = Tiered(Setup(device_pages=64, host_pages=64, has_storage=False))
    for number in range(6):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, *([number] * (4 + 4 * number))]
        tiers.ask(prompt, salt="ab"[number % 2], name=str(number))
    return tiers


def command(*tenants: tuple[str, str], is_all: bool = True) -> CacheCommand:
    return CacheCommand(CacheAction.TREE, tree=TreeQuery(100, 5, tenants, is_all))


def test_a_query_is_answered_while_nothing_else_runs() -> None:
    tiers = tiered()
    asked = tiers.engine.admin(command(("a", "Ann"), ("b", "")))
    tiers.settle()
    answer, stats = asked.result(0), tiers.engine.stats()
    assert answer["step"] == stats.steps and set(answer["tiers"]) == {"device", "host"}
    assert answer["tiers"]["device"]["pages"] == stats.pages_cached
    assert answer["tiers"]["host"]["pages"] == stats.tiers["host"]["pages_cached"]
    for tree in answer["tiers"].values():
        (ann,) = [root for root in tree["prefixes"] if root["tenant"] == "Ann"]
        (system,) = ann["prefixes"]
        assert (system["tokens"], system["head"], len(system["prefixes"])) == (8, [1, 2, 3, 4], 3)
        assert all("head" not in each for root in tree["prefixes"] if root is not ann for each in every(root))
    own = tiers.engine.admin(command(("a", "Ann"), is_all=False))
    tiers.settle()
    assert [root["tenant"] for root in own.result(0)["tiers"]["device"]["prefixes"]] == ["Ann"]


def test_answers_of_requests_do_not_depend_on_queries_beside_them() -> None:
    quiet, asked = tiered(), tiered()
    queries = []
    for number in range(4):
        queries += [asked.engine.admin(command(("a", ""))) for _ in range(3)]
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, number]
        alone, beside = (tiers.ask(prompt, max_tokens=9, salt="a") for tiers in (quiet, asked))
        assert (alone.token_ids, alone.cached_by_tier) == (beside.token_ids, beside.cached_by_tier)
    assert all(query.result(0)["tiers"]["device"]["pages"] > 0 for query in queries)
    assert quiet.cache.counts() == asked.cache.counts()


def test_a_slice_ends_with_its_time() -> None:
    tiers = tiered()
    looks = []

    def clock() -> float:
        looks.append(0)
        return float(len(looks))  # a second passes between two looks

    work = Survey(
        tiers.cache, TreeQuery(100, 5, (("a", ""),), True), root=tiers.engine.root, secret=b"s", step=1, clock=clock
    )
    assert work.go_on() and len(looks) == 2 and not work.answer.done()  # no work: its time was over at once
    nodes = tiers.cache.device.tree.trie.num_nodes
    units = len(list(largest_prefixes(tiers.cache.device.tree, wanted())))
    assert units >= 2 * nodes and _UNITS <= 16  # a unit is at most one node on the way down or up
