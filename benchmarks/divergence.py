"""Explanations of computed prompts: whether they are right, and what they cost.

python -m benchmarks.divergence truth conversation_trace.jsonl     10,000 requests whose longest shared prefix is known
python -m benchmarks.divergence cost conversation_trace.jsonl      CPU time per request, at full length
python -m benchmarks.divergence agents                             the same for agents, up to 142,000 tokens

Without a file, requests are those of benchmarks.trace.synthetic_trace.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.trace import TRACE_BLOCK, TraceRequest, block_of, expand, read_trace, synthetic_trace
from raycache.divergence.cause import Cause
from raycache.divergence.history import PromptHistory
from raycache.divergence.place import Asked
from raycache.divergence.text import TokenText
from raycache.types import Miss, RequestOutput

_PAGE = 16
_VOCAB = 50_000
_OUTPUT = np.array([1], dtype=">u4").tobytes()
_BATCH = 500
_AGENT_TURNS, _AGENT_TOKENS = 43, 142_000
_OUTPUT_LEN = 1  # the time per output token is that of take()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.divergence", description=__doc__)
    parser.add_argument("what", choices=["truth", "cost", "agents"])
    parser.add_argument("trace", metavar="FILE", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=20_000, help="of the cache that is played for truth")
    parser.add_argument("--history", type=int, default=64, help="MiB of the history for cost and agents")
    options = parser.parse_args()
    if options.what == "agents":
        return agents(history_mib=options.history)
    trace = read_trace(options.trace) if options.trace else synthetic_trace(options.requests)
    trace = trace[: options.requests]
    if options.what == "truth":
        outcome = check(trace, num_pages=options.pages)
        print(f"{outcome.requests} requests, causes {dict(outcome.causes)}, wrong: {len(outcome.wrong)}")
        print("\n".join(outcome.wrong[:20]))
        return 1 if outcome.wrong else 0
    return cost(trace, history_mib=options.history)


def words() -> TokenText:
    """A vocabulary of words, numbers and line ends, without special tokens."""
    draw = random.Random(0)
    kinds = (lambda: f" w{draw.randrange(10**6):x}", lambda: f" {draw.randrange(10**4)}", lambda: "\n", lambda: ": ")
    pieces = [draw.choices(kinds, (80, 15, 3, 2))[0]().encode() for _ in range(_VOCAB)]
    return TokenText(pieces.__getitem__, size=_VOCAB, is_special=lambda token_id: False)


# --- truth


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        wrong: a line for each wrong finding.
    """

    requests: int
    causes: Counter[str]
    wrong: list[str]


def check(trace: Sequence[TraceRequest], *, num_pages: int, is_wanted: bool = True) -> Outcome:
    """Compare each finding with the longest prefix shared with any request before, and what was evicted."""
    prompts = expand(trace, block_tokens=_PAGE, token_ids=range(_VOCAB))
    history = PromptHistory(words(), page_size=_PAGE, max_bytes=2**34)
    known, cache = _SortedPrompts(), _PageCache(num_pages)
    wrong: list[str] = []
    causes: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        shared, is_parted = known.add(prompt.tokens)
        cached = cache.add(prompt.tokens)
        reusable = min(shared, len(prompt.tokens) - 1) // _PAGE * _PAGE
        miss = Miss.EVICTED_DEVICE if cached < reusable else Miss.NEVER_SEEN
        with history.begin(prompt.tokens, salt="", tenant="", asked=Asked(), is_wanted=is_wanted) as watch:
            watch.take(RequestOutput("", (1,), cached_tokens=cached, miss=miss))
        found = watch.finding
        if cached < reusable:
            wanted = (Cause.CAPACITY, cached, reusable - cached)
        elif shared and is_parted:
            wanted = (Cause.NEW, shared, 0)
        elif 0 < min(shared, len(prompt.tokens) - 1) - cached < _PAGE:
            wanted = (Cause.GRANULARITY, cached, min(shared, len(prompt.tokens) - 1) - cached)
        else:
            wanted = None
        got = None if found is None else (found.cause, found.token, found.lost_tokens)
        causes["none" if found is None else found.cause.value] += 1
        if got != wanted:
            wrong.append(f"request {number}: {got} instead of {wanted}")
    return Outcome(len(prompts), causes, wrong)


class _SortedPrompts:
    """Prompts with their outputs in the order of their tokens: what shares most with a new one is next to it."""

    def __init__(self) -> None:
        self._prompts: list[bytes] = []

    def add(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Return the tokens shared with the nearest prompt, and whether both go on behind them."""
        new = np.array(tokens, dtype=">u4").tobytes()
        place = bisect_left(self._prompts, new)
        near = self._prompts[max(0, place - 1) : place + 1]
        self._prompts.insert(place, new + _OUTPUT)
        shared = max((_num_shared(new, other) for other in near), default=0)
        # A prompt that is the beginning of the new one comes before all that go on from it.
        ways_on = [min(len(new), len(other)) > 4 * shared for other in near if _num_shared(new, other) == shared]
        return shared, any(ways_on)


def _num_shared(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other)) // 4
    unequal = np.flatnonzero(np.frombuffer(one, "u4", length) != np.frombuffer(other, "u4", length))
    return int(unequal[0]) if len(unequal) else length


class _PageCache:
    """Pages by all tokens up to their end; the least recently used goes first, of a prompt its end."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def add(self, tokens: Sequence[int]) -> int:
        """Return the tokens that are reused, and keep the prompt's pages."""
        keys = [hash(tokens[:end]) for end in range(_PAGE, len(tokens) + 1, _PAGE)]
        most = (len(tokens) - 1) // _PAGE
        hits = next((index for index, key in enumerate(keys[:most]) if key not in self._pages), most)
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
        return hits * _PAGE


# --- cost


def cost(trace: Sequence[TraceRequest], *, history_mib: int) -> int:
    """CPU time of what is done for each request, at full length."""
    blocks: OrderedDict[int, array[int]] = OrderedDict()

    def tokens_of(request: TraceRequest) -> array[int]:
        tokens = array("i")
        for block in request.blocks:
            if block not in blocks:
                blocks[block] = array("i", block_of(block, TRACE_BLOCK, range(_VOCAB)))
            blocks.move_to_end(block)
            tokens += blocks[block]
        while len(blocks) > 20_000:
            blocks.popitem(last=False)
        return tokens[: request.prompt_len]

    prompts = ((tokens_of(request), _OUTPUT_LEN) for request in trace)
    _measure("conversations", prompts, history_mib=history_mib)
    return 0


def agents(*, history_mib: int) -> int:
    """Sessions of _AGENT_TURNS turns: those that go on as they were, and those whose first line changes each turn."""
    for name, is_volatile in (("agents", False), ("agents with a changing first line", True)):
        _measure(name, _sessions(8, is_volatile=is_volatile), history_mib=history_mib)
    return 0


def _sessions(count: int, *, is_volatile: bool) -> Iterator[tuple[array[int], int]]:
    draw = random.Random(1)
    system = draw.choices(range(_VOCAB), k=12_000)
    sessions = [list(system) for _ in range(count)]
    for turn in range(_AGENT_TURNS):
        for number, session in enumerate(sessions):
            session += draw.choices(range(_VOCAB), k=(_AGENT_TOKENS - 12_000) // _AGENT_TURNS)
            line = [1, 2, 3, (turn * count + number) % _VOCAB, 4] if is_volatile else []
            yield array("i", line + session), _OUTPUT_LEN


def _measure(name: str, prompts: Iterator[tuple[array[int], int]], *, history_mib: int) -> None:
    """Send prompts in batches that are made before the time is taken; the history is full after some of them."""
    history = PromptHistory(words(), page_size=_PAGE, max_bytes=history_mib * 2**20)
    batches_us: list[float] = []
    num_requests, num_tokens = 0, 0
    while batch := list(islice(prompts, _BATCH)):
        outputs = [[RequestOutput("", (token,)) for token in range(output_len)] for _, output_len in batch]
        asked = Asked()
        begin_s = time.process_time()
        for (prompt, _), increments in zip(batch, outputs, strict=True):
            with history.begin(prompt, salt="", tenant="", asked=asked) as watch:
                for output in increments:
                    watch.take(output)
        batches_us.append(1e6 * (time.process_time() - begin_s) / len(batch))
        num_requests += len(batch)
        num_tokens += sum(len(prompt) for prompt, _ in batch)
    print(
        f"{name}: {num_requests} requests of {num_tokens / num_requests:,.0f} tokens; "
        f"CPU time of each {statistics.fmean(batches_us):.1f} us, in the fastest batch {min(batches_us):.1f}; "
        f"history {history.seen.num_bytes / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
