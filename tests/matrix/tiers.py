"""The columns of the matrix below the device: from which tier a prefix comes. What goes wrong there is in faults.py.

Whenever a tier is asked, the pools of the device are full of NaN: what a load leaves out shows. Every request is
checked for what came from which tier, and for the reason why it was not more. The prompt "base" has 13 whole pages
that can be reused; models with windows or states continue only from restore points, here those after 104 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import numpy as np

from raycache.cache.costs import ENOUGH
from raycache.cache.host_tier import WritePolicy
from raycache.cache.storage_tier import StorageTier
from raycache.types import Miss
from tests.matrix.home import copy_storage, file_url, open_home
from tests.matrix.scenarios import Scenario, Setting
from tests.matrix.streams import draw_settings, run_stream
from tests.matrix.table import label
from tests.matrix.trial import Trial

ALL = 104
"""Tokens of the prompt "base" that can be reused."""

_FAULTS = "&drop=0.1&lose=0.05&corrupt=0.05&foreign=0.02&unavailable=0.05&partial=0.05"


def host_hit(at: Setting) -> Iterator[Trial]:
    """The device forgets; a prompt, and then its answer, come from the host."""
    with open_home(at) as home:
        trial = home.trial()
        trial.ask("base")
        trial.forget_device()
        trial.hit("base", tiers={"host": ALL})
        trial.hit("base", tiers={"device": ALL})  # what was loaded is whole, and stays so
        trial.forget_device()
        trial.hit("turn", tiers={"host": 112}, miss=Miss.NEVER_SEEN)
        trial.settle()
        yield trial


def storage_hit(at: Setting) -> Iterator[Trial]:
    """Everything stops; the prompt comes from the storage, and after that from the host."""
    with TemporaryDirectory() as directory:
        yield store(at, Path(directory))
        with open_home(at, storage=file_url(directory)) as home:
            trial = home.trial()
            trial.hit("base", tiers={"storage": ALL})
            trial.forget_device()
            trial.hit("base", tiers={"host": ALL})
            trial.settle()
            yield trial


def all_tiers(at: Setting) -> Iterator[Trial]:
    """The first pages are on the device, more of them on the host, all in the storage."""
    with TemporaryDirectory() as directory:
        yield store(at, Path(directory))
        with open_home(at, storage=file_url(directory)) as home:
            trial = home.trial()
            storage = trial.cache.storage
            assert isinstance(storage, StorageTier), "just opened"
            storage.is_attached = False
            trial.hit("base", length=41, tiers={}, miss=Miss.NEVER_SEEN)
            trial.hit("base", length=81, tiers={"device": 40}, miss=Miss.NEVER_SEEN)
            trial.forget_device()
            trial.hit("base", length=41, tiers={"host": 40})
            storage.is_attached = True
            trial.hit("base", tiers={"device": 40, "host": 40, "storage": 24})
            trial.settle()
            yield trial


def other_splits(at: Setting) -> Iterator[Trial]:
    """What every split that came before has stored is read; what this one stores is there for those that come."""
    own = at.storages / at.corpus.family / label(at.gang.split)
    if not own.exists():
        own.mkdir(parents=True)
        yield store(at, own)
    for other in sorted(own.parent.iterdir()):
        with TemporaryDirectory() as directory:
            copy_storage(other, Path(directory, "copy"))
            with open_home(at, storage=file_url(Path(directory, "copy"))) as home:
                trial = home.trial()
                asked = trial.hit("base", tiers={"storage": ALL})
                trial.expect(asked.error <= at.corpus.atol, f"what {other.name} has written is off by {asked.error}")
                trial.settle()
                yield trial


def slower_than_computing(at: Setting) -> Iterator[Trial]:
    """Computing is taken to be faster than anything that moves."""
    with open_home(at) as home:
        trial = home.trial()
        trial.ask("base")
        for _ in range(ENOUGH):
            trial.forget_device()
            trial.hit("base", tiers={"host": ALL})  # how long it takes is known then
        trial.forget_device()
        trial.set_pace(compute_s=1e-9)
        trial.hit("base", tiers={}, miss=Miss.SLOWER)
        trial.settle()
        yield trial


def write_policies(at: Setting) -> Iterator[Trial]:
    """What is written at its second use, and what is written when it leaves."""
    with open_home(at, policy="write_through_selective") as home:
        trial = home.trial()
        for num_saved in (0, 13):
            trial.ask("base")
            trial.settle()
            found = trial.cache.tiers()["host"]["saved_pages"]
            trial.expect(found == num_saved, f"{found} pages were saved, expected {num_saved}")
        trial.forget_device()
        trial.hit("base", tiers={"host": ALL})
        trial.settle()
        yield trial
    with open_home(at, policy="write_back") as home:
        trial = home.trial()
        trial.ask("base")
        trial.settle()
        trial.expect(trial.cache.tiers()["host"]["saved_pages"] == 0, "pages were saved that stay on the device")
        trial.evict_pages(trial.cache.device.pages.num_pages)
        trial.forget_device()
        trial.hit("base", tiers={"host": ALL})
        trial.settle()
        yield trial


def restart(at: Setting) -> Iterator[Trial]:
    """A new decider finds what another one has left; that one ends in the middle of its work, and a third goes on."""
    with open_home(at) as home:
        trial = home.trial()
        trial.ask("base")
        trial.settle()
        yield trial
        trial = home.trial(max_step_tokens=48)
        trial.hit("base", tiers={"host": ALL})
        trial.add("fork")
        while 100 not in trial.asked[-1].computed:
            trial.step()
        trial.executor.close()
        yield trial
        trial = home.trial()
        trial.hit("base", tiers={"host": ALL})
        trial.ask("fork")
        trial.settle()
        yield trial


def mixed_tiers(at: Setting, policy: WritePolicy) -> Iterator[Trial]:
    """Random streams of requests in little room on every tier, above a storage that fails now and then.

    Between two streams the device forgets; then a new decider goes on.
    """
    seed = list(WritePolicy).index(policy)
    random = np.random.default_rng(seed)
    with (
        TemporaryDirectory() as directory,
        open_home(
            at,
            pages=40,
            points=4,
            storage=f"faulty+{file_url(directory)}&seed={seed}{_FAULTS}",
            policy=policy.value,
        ) as home,
    ):
        num_loaded = 0.0
        for _ in range(2):
            trial = home.trial(**{**draw_settings(random), "num_pages": int(random.choice((28, 34, 48)))})
            for _ in range(2):
                run_stream(trial, random, point_space=at.point_space)
                trial.forget_device()
            num_loaded += trial.cache.tiers()["host"]["loaded_pages"]
            yield trial
        trial.expect(num_loaded > 0, f"nothing was loaded under {policy.value}")


def store(at: Setting, storage: Path) -> Trial:
    """Have the prompt "base" stored, and stop everything."""
    with open_home(at, storage=file_url(storage)) as home:
        trial = home.trial()
        trial.hit("base", tiers={}, miss=Miss.NEVER_SEEN)
        trial.settle()
        return trial


TIER_SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            host_hit,
            storage_hit,
            all_tiers,
            other_splits,
            slower_than_computing,
            write_policies,
            restart,
        )
    }
    | {f"mixed_{policy.name.lower()}": partial(mixed_tiers, policy=policy) for policy in WritePolicy}
)
"""Columns by name. Each gives its trials once they are done."""
