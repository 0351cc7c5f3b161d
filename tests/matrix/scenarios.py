"""The columns of the matrix: kinds of hits.

Every column begins with an engine that knows nothing and pools full of NaN. What must be reused is known: pages are of
8 tokens, and models with windows or recurrent states can be continued only from restore points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from raycache.config import Config
from raycache.memory.component import FULL, CacheFormat
from raycache.models.base import components, read_config
from tests.matrix.contents import Contents
from tests.matrix.gang import Gang
from tests.matrix.sequences import Corpus
from tests.matrix.streams import draw_settings, run_stream
from tests.matrix.trial import Trial


@dataclass(frozen=True)
class Setting:
    """A family on a gang.

    Attributes:
        gang: that holds it.
        corpus: of the family.
        config: of the ranks' pools.
        contents: what the cache must hold.
        storages: directory with what every split has stored, see tiers.other_splits.
    """

    gang: Gang
    corpus: Corpus
    config: Config
    contents: Contents
    storages: Path

    @property
    def point_space(self) -> str:
        """The component space that restore points are kept for; "" if every page can be continued from."""
        found = {part.space for part in components(read_config(self.corpus.model_dir), CacheFormat("float32"))} - {FULL}
        assert len(found) <= 1, f"which of {found} cuts a match first?"
        return next(iter(found), "")

    def trial(self, **settings: int) -> Trial:
        """A new engine."""
        return Trial(self.gang, self.corpus, self.config, host=None, **settings)


def cold(at: Setting) -> Iterator[Trial]:
    """Nothing is known."""
    trial = at.trial()
    trial.hit("base", cached=0)
    trial.hit("other", cached=0)
    yield trial


def exact(at: Setting) -> Iterator[Trial]:
    """The same prompt again, twice: 106 of its 107 tokens may be reused, 13 pages."""
    trial = at.trial()
    trial.ask("base")
    trial.hit("base", cached=104)
    trial.hit("base", cached=104)
    yield trial


def partial(at: Setting) -> Iterator[Trial]:
    """Prompts that leave a known one after 37 and 83 tokens; restore points at every 32."""
    trial = at.trial(restore_interval=32)
    trial.ask("base")
    trial.hit("short", cached=32)
    trial.hit("fork", cached=64 if at.point_space else 80, cut_by=at.point_space)
    yield trial


def branch(at: Setting) -> Iterator[Trial]:
    """The second prompt finds a branching point, and leaves a restore point there for the third."""
    trial = at.trial()
    trial.ask("base")
    trial.hit("fork", cached=0 if at.point_space else 80, cut_by=at.point_space)
    trial.hit("twin", cached=80)
    yield trial


def evicted(at: Setting) -> Iterator[Trial]:
    """Restore points, or the last pages, of a known prompt are gone, but not those of its branching point."""
    trial = at.trial()
    trial.ask("base")
    trial.ask("fork")  # leaves a restore point after 80 tokens
    if at.point_space:
        for _ in range(2):  # those of base: at the end of its prompt and of its answer
            trial.expect(trial.cache.device.tree.evict_point(at.point_space), "there is no restore point to evict")
        trial.engine.check()
        trial.hit("base", cached=80, cut_by=at.point_space)
        yield trial
        trial = at.trial()
        trial.ask("base")
        trial.ask("fork")
    free = trial.cache.counts()["pages_free"]
    trial.evict_pages(3)  # of the 14 pages of base, which were used least recently, 11 are left
    trial.expect(trial.cache.counts()["pages_free"] == free + 3, "3 pages cannot be evicted")
    trial.engine.check()
    trial.hit("base", cached=80 if at.point_space else 88, cut_by=at.point_space)
    yield trial


def edges(at: Setting) -> Iterator[Trial]:
    """Prompts that end at, before and behind the edges of pages and windows, each a prefix of the next."""
    trial = at.trial()
    for length, cached in ((1, 0), (8, 0), (9, 8), (24, 8), (25, 24), (96, 24), (97, 96), (104, 96)):
        asked = trial.add("base", length=length, num_tokens=3)
        trial.finish()
        trial.expect(asked.cached == cached, f"{asked.cached} of {length} tokens cached, expected {cached}")
    yield trial


def interrupted(at: Setting) -> Iterator[Trial]:
    """A prompt is cancelled between chunks, an answer while it is decoded; a prompt gives way to a more urgent one."""
    trial = at.trial(max_step_tokens=24, num_pages=30)
    asked = trial.add("base")
    while 47 not in asked.computed:
        trial.step()
    trial.cancel(asked)
    trial.hit("base", cached=48)
    asked = trial.add("fork")
    while 132 not in asked.computed:
        trial.step()
    trial.cancel(asked)
    trial.hit("fork", cached=128)
    slow = trial.add("other", priority=1)
    while 140 not in slow.computed:
        trial.step()
    trial.ask("twin")
    trial.expect(trial.engine.stats().preemptions > 0, "30 pages were enough for both")
    yield trial


def turns(at: Setting) -> Iterator[Trial]:
    """A conversation goes on: the second prompt is the first with its answer, all but the last token of it cached."""
    trial = at.trial()
    trial.ask("base")
    trial.hit("turn", cached=112)
    trial.hit("turn", cached=128)
    yield trial


def chunked(at: Setting) -> Iterator[Trial]:
    """Prefill in chunks of one page to all, with and without restore points inside, then a hit on what they left."""
    for chunk, interval in ((8, "none"), (24, 32), (56, "none"), (512, "none")):
        trial = at.trial(max_step_tokens=chunk, restore_interval=interval)
        trial.ask("base", num_tokens=2)
        trial.ask("base", num_tokens=2)
        trial.expect(trial.asked[1].cached == 104, f"{trial.asked[1].cached} tokens cached after chunks of {chunk}")
        yield trial


def batched(at: Setting) -> Iterator[Trial]:
    """Requests that share prefixes arrive together and while others decode; then again in a third of the pages."""
    trial = at.trial(max_step_tokens=40, restore_interval=32)
    for names in (("other", "base", "base", "fork"), ("short", "twin"), ("base",), ("turn",)):
        for name in names:
            trial.add(name)
        for _ in range(3):
            trial.step()
    trial.finish()
    trial.expect(all(asked.cached >= 32 for asked in trial.asked[3:]), "shared prefixes were computed again")
    yield trial
    trial = at.trial(max_step_tokens=72, num_pages=40, restore_points=1, max_running=2)
    trial.ask("other", "base", "fork", "short", "twin", "turn")
    stats = trial.engine.stats()
    trial.expect(stats.evicted_pages > 0, "40 pages were enough")
    trial.expect(stats.evicted_restore_points > 0 or not at.point_space, "one restore point was enough")
    yield trial


def mixed(at: Setting) -> Iterator[Trial]:
    """Random streams of requests in little room, with cancellations and evictions."""
    for seed in range(3):
        random = np.random.default_rng(seed)
        trial = at.trial(**draw_settings(random))
        run_stream(trial, random, point_space=at.point_space)
        yield trial


def stored(at: Setting) -> Iterator[Trial]:
    """What the ranks keep of a prompt: every page and state, also what no later token looks at."""
    trial = at.trial(max_step_tokens=48)
    trial.ask("base")
    at.contents.compare(trial)
    yield trial


Scenario = Callable[[Setting], Iterator[Trial]]

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        f.__name__: f
        for f in (cold, exact, partial, edges, branch, evicted, turns, chunked, batched, interrupted, mixed, stored)
    }
)
"""Columns by name. Each gives its trials once they are done."""
