"""Greedy tokens of a real model against transformers, for every split and every kind of hit.

    python -m benchmarks.exactness MODEL                          the whole matrix, some 20 minutes on two cores
    python -m benchmarks.exactness MODEL --prompts 4 --splits 1,1,1 3,1,2

For each split (tp, pp, cp): all prompts cold and batched together, again from the cache, some one by one, and all once
more after other prompts have pushed them out. A run is right when every token of every prompt equals transformers'
greedy tokens. The tp of the usual splits is the smallest that the model's heads allow.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from raycache import LLM, SamplingParams
from raycache.api.tokenizer import Tokenizer
from raycache.errors import ConfigError
from raycache.llm import Completion
from raycache.models.base import ModelConfig, check_split, read_config
from raycache.parallel.sharding import Split

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("LICENSE", "README.md", "CONTRIBUTING.md", "docs/adr/0001-layout.md", "docs/adr/0002-one-decider.md")


@dataclass(frozen=True)
class Case:
    """A prompt and what transformers continues it with."""

    prompt: list[int]
    wanted: list[int]


@dataclass(frozen=True)
class Outcome:
    """One pass over all prompts.

    Attributes:
        kind: of the pass.
        equal: prompts whose tokens are all equal.
        total: prompts.
        cached: prompt tokens that came from the cache.
        seconds: of the pass.
    """

    kind: str
    equal: int
    total: int
    cached: int
    seconds: float


def usual_splits(model: Path) -> list[tuple[int, int, int]]:
    """(tp, pp, cp) that suit a model."""
    config = read_config(model)
    tp = next((tp for tp in range(2, 65) if _is_served(config, Split(tp=tp))), 1)
    return [(1, 1, 1), (tp, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (tp, 1, 2), (1, 2, 2)]


def _is_served(config: ModelConfig, split: Split) -> bool:
    try:
        check_split(config, split)
    except ConfigError:
        return False
    return True


def make_prompts(model: Path, count: int, *, shortest: int = 50, longest: int = 1500) -> list[list[int]]:
    """Stretches of English text of evenly spread lengths, every third one sharing its beginning with the one before."""
    tokenizer = Tokenizer(model)
    head = tokenizer.encode("", add_special_tokens=True)
    text = tokenizer.encode("\n".join((_ROOT / name).read_text() for name in _SOURCES), add_special_tokens=False)
    lengths = [shortest + (longest - shortest) * i // max(count - 1, 1) for i in range(count)]
    draw = random.Random(5)
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        start = draw.randrange(len(text) - length)
        begin = prompts[-1][: len(prompts[-1]) * 2 // 3] if i % 3 == 2 else head
        prompts.append((begin + text[start : start + length])[:length])
    return prompts


def reference(model: Path, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> list[Case]:
    """Greedy tokens of transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    cases = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = oracle.generate(ids, max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
        cases.append(Case(list(prompt), out[0, len(prompt) :].tolist()))
    return cases


def run_split(model: Path, cases: Sequence[Case], *, tp: int, pp: int, cp: int) -> list[Outcome]:
    """All kinds of hits on one split."""
    sampling = SamplingParams(temperature=0, max_tokens=len(cases[0].wanted), ignore_eos=True)
    need = sum(-(-(len(case.prompt) + len(case.wanted)) // 64) for case in cases)
    outcomes = []

    def measure(kind: str, generate: Callable[[], list[Completion]], expected: Sequence[Case]) -> None:
        begin = time.monotonic()
        found = generate()
        llm.check()
        equal = sum(list(one.token_ids) == case.wanted for one, case in zip(found, expected, strict=True))
        cached = sum(one.cached_tokens for one in found)
        outcomes.append(Outcome(kind, equal, len(expected), cached, time.monotonic() - begin))

    with LLM(str(model), tp=tp, pp=pp, cp=cp, device="cpu", num_pages=need + 2, max_running=16) as llm:
        prompts = [case.prompt for case in cases]
        measure("cold, batched", lambda: llm.generate(prompts, sampling), cases)
        measure("from cache, batched", lambda: llm.generate(prompts, sampling), cases)
        few = cases[:: max(1, len(cases) // 3)]
        one_by_one = [case.prompt for case in few]
        measure(
            "from cache, alone", lambda: list(itertools.chain(*(llm.generate([p], sampling) for p in one_by_one))), few
        )
        # The same lengths with other tokens: most of what is cached has to go for them.
        fillers = [[(token + 7) % 40000 + 100 for token in case.prompt] for case in cases]
        llm.generate(fillers, SamplingParams(temperature=0, max_tokens=1))
        measure("after eviction", lambda: llm.generate(prompts[::-1], sampling), cases[::-1])
        assert llm.stats().evicted_pages > 0, "the pool was too large for eviction"
    return outcomes


def main() -> int:
    """Print one line per split and kind of hit; 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    parser.add_argument("--splits", nargs="+", metavar="TP,PP,CP", type=_split)
    options = parser.parse_args()
    prompts = make_prompts(options.model, options.prompts, longest=options.longest)
    cases = reference(options.model, prompts, new_tokens=options.new_tokens)
    print(f"{len(cases)} prompts of {len(prompts[0])} to {len(prompts[-1])} tokens, {options.new_tokens} new each")
    wrong = 0
    for tp, pp, cp in options.splits or usual_splits(options.model):
        for outcome in run_split(options.model, cases, tp=tp, pp=pp, cp=cp):
            wrong += outcome.total - outcome.equal
            print(
                f"tp={tp} pp={pp} cp={cp}  {outcome.kind:20} {outcome.equal:3} of {outcome.total} equal"
                f"  {outcome.cached:6} tokens cached  {outcome.seconds:6.1f} s",
                flush=True,
            )
    return 1 if wrong else 0


def _split(text: str) -> tuple[int, int, int]:
    tp, pp, cp = (int(size) for size in text.split(","))
    return tp, pp, cp


if __name__ == "__main__":
    sys.exit(main())
