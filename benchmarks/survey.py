"""How long GET /cache/tree, which draws the map of /ui, takes with many cached pages, and what it costs steps.

    python -m benchmarks.survey
    python -m benchmarks.survey --pages 1000000

The answer is made in slices between steps. Printed are the time of all slices, the longest of them, the steps that they
take, and the size of the answer, for two trees of so many pages: conversations of 50 pages behind 100 system messages,
and prompts of one page each, which is the worst that a tree of that size can be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from raycache.cache.tree import RadixTree
from raycache.decider.survey import Survey
from raycache.types import TreeQuery

_PAGE = 16
_SYSTEM_PAGES, _TURN_PAGES, _SYSTEMS = 20, 50, 100
_ROOT = b"tenant"


def conversations(num_pages: int) -> Iterator[NDArray[np.int32]]:
    """Prompts with a beginning in common, int32."""
    random = np.random.default_rng(0)
    systems = random.integers(0, 150_000, (_SYSTEMS, _SYSTEM_PAGES * _PAGE), np.int32)
    for number in range((num_pages - _SYSTEMS * _SYSTEM_PAGES) // _TURN_PAGES):
        yield np.concatenate([systems[number % _SYSTEMS], random.integers(0, 150_000, _TURN_PAGES * _PAGE, np.int32)])


def single_pages(num_pages: int) -> Iterator[NDArray[np.int32]]:
    """Prompts of one page, int32."""
    random = np.random.default_rng(0)
    yield from random.integers(0, 150_000, (num_pages, _PAGE), np.int32)


def filled(prompts: Iterator[NDArray[np.int32]]) -> tuple[RadixTree, int]:
    """A tree with the prompts, and its number of pages."""
    tree, used = RadixTree(_PAGE), 0
    for now, prompt in enumerate(prompts, 1):
        tokens = prompt.tobytes()
        handle = tree.match(tokens, now=now, root=_ROOT)
        missing = len(prompt) // _PAGE - handle.length // _PAGE
        tree.extend(handle, tokens, np.arange(used, used + missing, dtype=np.intp), now=now)
        used += missing
        handle.release()
    return tree, used


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.survey", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=1_000_000, help="(default: %(default)s)")
    options = parser.parse_args()
    for make in (conversations, single_pages):
        tree, used = filled(make(options.pages))
        cache = SimpleNamespace(device=SimpleNamespace(tree=tree), host=None)
        query = TreeQuery(200, 6, (("", "default"),), True)
        survey = Survey(cache, query, root=lambda salt: _ROOT, secret=b"s", step=0)  # type: ignore[arg-type]
        slices: list[float] = []
        is_open = True
        while is_open:
            begin_s = time.perf_counter()
            is_open = survey.go_on()
            slices.append(time.perf_counter() - begin_s)
        kilobytes = len(json.dumps(survey.answer.result(), default=str)) / 1000
        print(
            f"{make.__name__:14} {used:9,} pages: {sum(slices):6.2f} s in {len(slices):6,} slices, the longest "
            f"{1e3 * max(slices):.2f} ms, median {1e3 * float(np.median(slices)):.2f} ms; answer of {kilobytes:.0f} kB",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
