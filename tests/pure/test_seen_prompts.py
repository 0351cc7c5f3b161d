"""The tree of seen prompts against a plain list of them: the longest known prefix, and the bound of its memory."""

from __future__ import annotations

import gc
import random
import tracemalloc

import numpy as np
import pytest

from raycache.divergence.seen import NODE_BYTES, SeenPrompts, Source


def shared(one: list[int], other: list[int]) -> int:
    """Tokens at the beginning that two prompts share, one by one."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def prompts(draw: random.Random, *, count: int) -> list[list[int]]:
    """Prompts that continue and leave earlier ones anywhere; few different tokens, so that they meet by chance too."""
    found = [[0]]
    for _ in range(count):
        base = draw.choice(found[-20:])
        kept = base[: draw.choice((0, draw.randint(0, len(base)), len(base)))]
        found.append(kept + [draw.randrange(3) for _ in range(draw.choice((1, 5, 400)))])
    return found[1:]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_known_prefix_and_how_it_went_on(seed: int) -> None:
    draw = random.Random(seed)
    seen, before = SeenPrompts(2**24), {"": [], "salt": []}
    for prompt in prompts(draw, count=150):
        salt = draw.choice(("", "salt"))
        source = Source(0.0)
        match = seen.add(salt, prompt, source)
        longest = max((shared(prompt, other) for other in before[salt]), default=0)
        assert match.length == longest
        ways_on = [other[longest:] for other in before[salt] if shared(prompt, other) == longest]
        if match.node is not None:
            assert np.concatenate(seen.rest(match)).tolist() in ways_on
        elif 0 < match.length < len(prompt):
            assert not any(ways_on)
        assert (match.leaf is None) == (match.length == len(prompt) and any(ways_on))
        if match.leaf is not None and draw.random() < 0.5:
            output = [draw.randrange(3) for _ in range(draw.randint(1, 9))]
            seen.extend(match.leaf, output, source)
            prompt = prompt + output
        before[salt].append(prompt)
    check(seen)


def test_the_least_recently_used_prompt_goes_first() -> None:
    seen = SeenPrompts(64 * 1024)
    common, tails = list(range(100)), {name: [1000 + name] * 2000 for name in range(20)}
    for name in range(20):
        seen.add("", common + tails[name], Source(0.0))
        seen.add("", common + tails[0], Source(0.0))  # always the last used one
    check(seen)
    assert seen.add("", common + tails[0], Source(0.0)).length == 2100
    assert seen.add("", common + tails[1], Source(0.0)).length == 100


@pytest.mark.parametrize("max_bytes", [2**18, 2**20, 2**23])
def test_memory_stays_below_the_bound(max_bytes: int) -> None:
    draw = random.Random(0)
    made = prompts(draw, count=3000)
    gc.collect()
    tracemalloc.start()
    seen = SeenPrompts(max_bytes)
    for number, prompt in enumerate(made):
        array = np.array(prompt * (1 + number % 7), dtype=np.int32)
        source = Source(0.0)
        match = seen.add(str(number % 5), array, source)
        if match.leaf is not None:
            seen.extend(match.leaf, prompt[:50], source)
    del array, match, source
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    check(seen)
    assert seen.num_bytes <= max_bytes
    assert taken <= max_bytes, (taken, seen.num_bytes)


def test_of_a_prompt_that_would_fill_the_memory_the_beginning_is_kept() -> None:
    seen = SeenPrompts(2**16)
    seen.add("", [1] * 100, Source(0.0))
    seen.add("", [2] * 10**6, Source(0.0))
    assert seen.num_bytes <= 2**16
    assert seen.add("", [2] * 10**6, Source(0.0)).length == 2**16 // 16
    assert seen.add("", [1] * 100, Source(0.0)).length == 100


def check(seen: SeenPrompts) -> None:
    """Edges join, leaves are those without children, and the bytes are those of all nodes."""
    size, leaves = 0, 0
    pending = list(seen._roots.values())
    while pending:
        node = pending.pop()
        size += node.num_bytes + len(node.tail) + NODE_BYTES
        assert node.num_bytes >= len(node.edge)
        leaves += not node.children
        assert (not node.children) == (node in seen._leaves)
        assert not (node.children and node.tail)
        assert (node.latest in node.children.values()) if node.children else node.latest is None
        for first, child in node.children.items():
            assert child.parent is node and np.frombuffer(child.edge, np.int32)[0] == first
        pending += node.children.values()
    assert (size, leaves) == (seen.num_bytes, len(seen._leaves))
