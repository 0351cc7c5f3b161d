"""Random requests over tiers that fail in every way, checked token by token against a model without a cache.

    python -m tests.pure.tiers_soak --requests 10000

A story is a setup drawn from a seed, and what happens to it: requests that share prefixes, some cancelled; saves and
loads that fail or are late; a storage that loses, damages and refuses; gangs and engines that are killed. At its end
nothing moves, nothing is locked and nothing is lost.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

import numpy as np

from raycache.cache.evict import Eviction
from raycache.cache.host_tier import WritePolicy
from raycache.cache.kv_events import Publisher
from raycache.cache.prefetches import Waiting
from raycache.errors import RankLostError
from raycache.types import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from tests.oracle.tiered import Setup, Tiered
from tests.oracle.twin import VOCAB, continuation
from tests.oracle.twin_host import Trouble
from tests.oracle.twin_storage import StorageTrouble

KINDS = {"dense": (0, False), "window": (6, False), "state": (0, True), "both": (5, True)}
FLOWS = {"alone": (1, False), "ahead": (1, True), "stages": (3, False)}
"""Stages of the pipeline, and whether steps are planned ahead."""

CELLS = list(product(WritePolicy, Eviction, Waiting, KINDS, FLOWS))
"""Every policy, with every kind of model and pipeline."""

Cell = tuple[WritePolicy, Eviction, Waiting, str, str]

_MOST_IDLE_STEPS = 3000
_TEXTS = 3
_FIGURES = (
    "saved_pages",
    "loaded_pages",
    "failed_saves",
    "failed_loads",
    "evicted_pages",
    "prefetched_pages",
    "prefetched_points",
    "persisted_pages",
    "refused_prefetches",
    "unavailable_requests",
)


def setup_of(cell: Cell, random: Random) -> Setup:
    """A setup for one cell; everything else is drawn."""
    policy, eviction, waiting, kind, flow = cell
    window, has_state = KINDS[kind]
    stages, plans_ahead = FLOWS[flow]
    is_bad = random.random() < 0.7

    def part(most: float) -> float:
        return random.choice([0.0, most * random.random()]) if is_bad else 0.0

    return Setup(
        page_size=random.choice([1, 2, 3, 4]),
        device_pages=random.randint(8, 24),
        host_pages=random.choice([4, 12, 30, 80]),
        device_points=random.randint(0, 4),
        host_points=random.choice([1, 3, 12]),
        window=window,
        has_state=has_state,
        stages=stages,
        plans_ahead=plans_ahead,
        max_step_tokens=random.choice([3, 7, 16, 40]),
        max_running=random.randint(1, 5),
        max_model_len=48,
        interval=random.choice([0, 0, 8]),
        most_drafts=random.choice([0, 0, 2, 5]),
        are_from_ranks=random.random() < 0.5,
        policy=policy,
        eviction=eviction,
        waiting=waiting,
        has_storage=random.random() < 0.8,
        prefetch_timeout_s=random.choice([0.0, 1000.0, 1000.0]),
        prefetch_share=random.choice([0.3, 1.0]),
        most_objects=random.choice([6, 1000, 1000]),
        trouble=Trouble(part(0.3), part(0.3), random.choice([0, 2, 6])),
        storage_trouble=StorageTrouble(
            part(0.3), part(0.2), part(0.2), part(0.3), part(0.3), part(0.1), most_ticks=random.choice([0, 3, 9])
        ),
        seed=random.getrandbits(32),
    )


@dataclass
class Wanted:
    """A request under way, and what is right for it."""

    request: GenerateRequest
    tokens: list[int]
    got: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    num_losses: int = 0  # of gangs, since it was added


class Story:
    """One setup, and what happens to it.

    Args:
        setup: of the engine.
        random: of what happens.
        has_damage: whether bits flip on the host; without, and without other troubles, no load may fail.
        has_deaths: whether gangs and engines die.
        publisher: of the KV events, if there are any.
    """

    def __init__(
        self,
        setup: Setup,
        random: Random,
        *,
        has_damage: bool = True,
        has_deaths: bool = True,
        publisher: Publisher | None = None,
    ) -> None:
        self.tiers, self.random = Tiered(setup, publisher=publisher), random
        self.has_damage, self.has_deaths = has_damage, has_deaths
        self.wanted: dict[str, Wanted] = {}
        self.counts: Counter[str] = Counter()
        self._arrivals = self._losses = 0

    def run(self, num_requests: int) -> Counter[str]:
        """Let it happen, and check what is left; what was seen."""
        while self._arrivals < num_requests:
            self._happen()
            self.tiers.engine.check()
        self.finish()
        return self.counts

    def finish(self) -> None:
        """All requests end, all moves end, and everything is where it should be."""
        engine = self.tiers.engine
        for _ in range(_MOST_IDLE_STEPS):
            if not engine.has_work:
                break
            self.step()
            engine.check()
        assert not self.wanted and not engine.has_work, f"never ends: {sorted(self.wanted)} {engine.stats()}"
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_in_use, stats.pages_locked) == (0, 0, 0, 0)
        if not self.has_damage:
            assert self.tiers.num_bad_loads == 0, "a slot of the host was used again while somebody counted on it"
            assert self.tiers.storage.num_unheld == 0, "a slot of the host was used again before it was persisted"
        self._take_stats()
        self.check_nothing_is_held()

    def check_nothing_is_held(self) -> None:
        """Clearing all tiers leaves all pages and slots free."""
        tiers = self.tiers
        assert tiers.storage_tier.counts()["prefetching_pages"] == 0
        assert tiers.host.counts()["pages_moving"] == 0
        tiers.forget("device", "host")
        tiers.engine.check()
        stats, counts = tiers.engine.stats(), tiers.host.counts()
        assert stats.pages_free == stats.pages_total and counts["pages_free"] == counts["pages_total"]
        assert all(free == total for total, free in stats.spaces.values())
        assert tiers.catalog().recover() == []

    def add(self, prompt: Sequence[int], sampling: SamplingParams, *, salt: str = "", priority: int = 0) -> None:
        """Queue a request."""
        name = f"r{self._arrivals}"
        self._arrivals += 1
        self.counts["requests"] += 1
        request = GenerateRequest(name, prompt, sampling, priority, cache_salt=salt)
        # One without digests, one with its own, one with those of another tenant, and again.
        chains = (b"", self.tiers.chain(prompt, salt), self.tiers.chain(prompt, salt + "'s"))
        chain = chains[self._arrivals % len(chains)]
        request = replace(request, cache_priority=self.random.randint(-1, 2), page_chain=chain)
        tokens, _ = continuation(prompt, sampling, max_len=self.tiers.engine.info.max_model_len)
        self.wanted[name] = Wanted(request, tokens)
        self.tiers.drafter.texts.append([*prompt, *tokens])
        del self.tiers.drafter.texts[:-50]
        self.tiers.engine.add(request)

    def step(self) -> None:
        """One step of the engine."""
        self._take(self.tiers.engine.step())
        self._losses = 0

    def kill_gang(self) -> None:
        """Ranks die under the engine."""
        self._lose_a_step()
        self.tiers.start_gang()
        self.counts["gangs lost"] += 1

    def kill_engine(self) -> None:
        """The engine dies; its clients ask the next one to go on."""
        if self.random.random() < 0.5:
            self._lose_a_step()
        self._take_stats()
        self.tiers.start_engine()
        self.counts["engines lost"] += 1
        for name, wanted in list(self.wanted.items()):
            if wanted.is_cancelled:
                del self.wanted[name]
                continue
            self.tiers.engine.add(replace(wanted.request, output=tuple(wanted.got)))

    def _happen(self) -> None:
        kind = self.random.choices(
            ["add", "step", "cancel", "gang", "engine", "damage", "evict", "clear"], [30, 60, 3, 1, 1, 3, 2, 4]
        )[0]
        match kind:
            case "add":
                self._add_some()
            case "step":
                self.step()
            case "cancel" if self.wanted:
                name = self.random.choice(sorted(self.wanted))
                self.wanted[name].is_cancelled = True
                self.tiers.engine.cancel(name)
            case "gang" if self.has_deaths and self._losses < 2:
                self._losses += 1
                self.kill_gang()
            case "engine" if self.has_deaths:
                self.kill_engine()
            case "damage" if self.has_damage:
                self.tiers.memory.damage(self.random)
            case "evict":
                self.tiers.engine.evict(self.random.choice(["full", "window", "state"]))
            case "clear":
                self.tiers.forget("device", "host")

    def _add_some(self) -> None:
        random = self.random
        text = np.random.default_rng(random.randrange(_TEXTS)).integers(1, VOCAB, 60).tolist()
        suffix = [random.randrange(1, VOCAB) for _ in range(random.randint(0, 3))]
        limit = self.tiers.engine.info.max_model_len - 1
        prompt = (text[: random.randint(0, 40)] + suffix)[:limit] or [1]
        scores = random.choice([None] * 12 + [0])
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=random.random() < 0.5,
            max_tokens=random.choice([1, 2, 7, 20]),
            prompt_logprobs=scores,
            presence_penalty=random.choice([0.0] * 9 + [0.5]),
        )
        self.add(prompt, sampling, salt=random.choice(["", "", "", "b"]), priority=random.choice([0, 0, 0, 1]))

    def _lose_a_step(self) -> None:
        self.tiers.executor.is_lost = True
        for _ in range(3):
            try:
                self._take(self.tiers.engine.step())
            except RankLostError:
                for wanted in self.wanted.values():
                    wanted.num_losses += 1
                return

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            wanted = self.wanted[output.request_id]
            wanted.got += output.token_ids
            assert wanted.got == wanted.tokens[: len(wanted.got)], f"wrong tokens: {wanted}"
            assert sum(output.cached_by_tier.values()) == output.cached_tokens
            if output.finish_reason is None:
                continue
            if output.finish_reason is FinishReason.CANCELLED:
                assert wanted.is_cancelled
            elif output.finish_reason is FinishReason.ERROR:
                assert wanted.num_losses >= 3, output  # it may be the cause
            else:
                assert output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), output
                assert wanted.got == wanted.tokens, f"cut short: {wanted}"
            del self.wanted[output.request_id]
            self.counts["ended"] += 1
            self.counts[f"tokens {output.finish_reason}"] += len(wanted.got)

    def _take_stats(self) -> None:
        stats = self.tiers.engine.stats()
        self.counts["prompt tokens"] += stats.prompt_tokens
        for tier, count in stats.cached_by_tier.items():
            self.counts[f"cached {tier}"] += count
        for miss, count in stats.misses.items():
            self.counts[f"miss {miss}"] += count
        for tier, figures in stats.tiers.items():
            self.counts.update({f"{tier} {name}": int(figures[name]) for name in _FIGURES if name in figures})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--per-story", type=int, default=40, help="requests of one setup")
    parser.add_argument("--seed", type=int, default=0, help="number of the first story")
    parser.add_argument("--flow", choices=FLOWS, help="only this pipeline; ahead: steps are planned while others run")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if options.flow in (None, cell[-1])]
    total: Counter[str] = Counter()
    start_s = time.monotonic()
    number = options.seed
    while total["requests"] < options.requests:
        random = Random(number)
        cell = cells[number % len(cells)]
        story = Story(setup_of(cell, random), random, has_damage=random.random() < 0.3)
        try:
            total += story.run(options.per_story)
        except BaseException:
            print(f"story {number}, {cell}: {story.tiers.setup}")
            raise
        total["stories"] += 1
        number += 1
    print(f"{time.monotonic() - start_s:.1f} s")
    for name, count in sorted(total.items()):
        print(f"{count:>9} {name}")


if __name__ == "__main__":
    main()
