"""Traces of the benchmark: the format, whole prefix trees, expansion into tokens, the bound of reuse."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.figures import percentile
from benchmarks.trace import (
    TRACE_BLOCK,
    TraceRequest,
    bound,
    choose,
    expand,
    prefix_groups,
    read_trace,
    reusable,
    scale,
    synthetic_trace,
)

IDS = range(100, 400)


def request(*blocks: int, tail: int = TRACE_BLOCK, time_s: float = 0.0, output_len: int = 320) -> TraceRequest:
    return TraceRequest(time_s, (len(blocks) - 1) * TRACE_BLOCK + tail, output_len, blocks)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def longest_reuse(prompts: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """The bound by its definition, comparing each prompt with all before it."""
    found = []
    for i, prompt in enumerate(prompts):
        shared = max((common_prefix(prompt, other) for other in prompts[:i]), default=0)
        found.append(min(shared, len(prompt) - 1) // page_size * page_size)
    return found


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}
    path.write_text(json.dumps(line) + "\n\n")
    assert read_trace(path) == [TraceRequest(1.5, 600, 7, (4, 9))]


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"timestamp": 0}', '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}']
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=r"trace.jsonl:1"):
        read_trace(path)


def test_groups_are_whole_trees() -> None:
    requests = [request(0, a, b) for a in range(5) for b in range(10, 13)] + [request(0), request(7, 1)]
    groups = prefix_groups(requests, most=4)
    assert sorted(map(len, groups)) == [1, 1, 3, 3, 3, 3, 3]
    assert Counter(itertools.chain(*groups)) == Counter(requests)
    for group in groups:
        assert len({r.blocks[:2] for r in group}) == 1


def test_chosen_requests_bring_all_that_share_their_second_block() -> None:
    trace = [request(0, a, 100 * a + b, time_s=a + 100 * b) for a in range(1, 60) for b in range(a % 4 + 1)]
    chosen = choose(trace, count=40, seed=3)
    second = {r.blocks[1] for r in chosen}
    assert chosen == sorted((r for r in trace if r.blocks[1] in second), key=lambda r: r.time_s)
    assert 40 <= len(chosen) <= 50
    assert chosen == choose(trace, count=40, seed=3) != choose(trace, count=40, seed=4)


def test_all_lengths_shrink_by_the_same_factor() -> None:
    small = scale(request(1, 2, 3, tail=100, output_len=330), block_tokens=32)
    assert (small.prompt_len, small.output_len) == (2 * 32 + 7, 21)
    assert scale(request(1, output_len=1), block_tokens=32).output_len == 1


def test_equal_blocks_become_equal_tokens_and_others_do_not() -> None:
    trace = [request(0, 1, 2), request(0, 1, 3, tail=200, time_s=5), request(4, 1, time_s=9)]
    first, second, third = expand(trace, block_tokens=32, token_ids=IDS)
    assert [len(p.tokens) for p in (first, second, third)] == [96, 64 + 13, 64]
    assert common_prefix(first.tokens, second.tokens) == 64
    assert first.tokens[32:64] == third.tokens[32:] and common_prefix(first.tokens, third.tokens) < 5
    assert [p.time_s for p in (first, second, third)] == [0, 5, 9]
    assert all(token in IDS for p in (first, second, third) for token in p.tokens)
    assert expand(trace, block_tokens=32, token_ids=IDS)[0] == first


def test_the_bound_is_what_all_earlier_prompts_share_in_whole_pages() -> None:
    draw = random.Random(5)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 40))] for _ in range(300)]
    for page_size in (1, 4, 7):
        assert list(reusable(prompts, page_size=page_size)) == longest_reuse(prompts, page_size)


def test_a_repeated_prompt_keeps_one_token_to_compute() -> None:
    assert list(reusable([[1] * 8, [1] * 8, [1] * 9], page_size=4)) == [0, 4, 8]
    assert bound([[1] * 8, [1] * 8], page_size=4) == 4 / 16


def test_scaling_keeps_the_bound_of_the_trace() -> None:
    trace = synthetic_trace(200)
    ids = [[block for block in r.blocks[: r.prompt_len // TRACE_BLOCK]] for r in trace]
    in_blocks = (
        sum(longest_reuse([[*i, -n] for n, i in enumerate(ids)], 1)) * TRACE_BLOCK / sum(r.prompt_len for r in trace)
    )
    tokens = [p.tokens for p in expand(trace, block_tokens=16, token_ids=IDS)]
    assert bound(tokens, page_size=16) == pytest.approx(in_blocks, abs=0.01)
    assert in_blocks > 0.2


def test_the_synthetic_trace_is_of_the_format_and_repeatable() -> None:
    trace = synthetic_trace(50, seed=2)
    assert trace == synthetic_trace(50, seed=2) and len(trace) == 50
    assert all(len(r.blocks) == -(-r.prompt_len // TRACE_BLOCK) for r in trace)
    assert [r.time_s for r in trace] == sorted(r.time_s for r in trace)


def test_percentiles_are_values_that_occur() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0], 99) == 3.0 and percentile([], 50) != percentile([], 50)
