"""The columns of the matrix in which a tier fails: damage, loss, delay, too little room, and who goes while it loads.

The tokens stay right, and the reason that the request gives is the true one.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from raycache.memory.component import FULL
from raycache.types import Miss
from tests.matrix.home import (
    Change,
    copy_storage,
    file_url,
    first_piece,
    host_units,
    last_rank,
    open_home,
    page_digests,
    spoil_file,
    stored_keys,
)
from tests.matrix.ranks import Poison
from tests.matrix.scenarios import Scenario, Setting
from tests.matrix.tiers import ALL, store
from tests.matrix.trial import Asked, Trial

_BAD_PAGE = 5
_GOOD = 40
"""Tokens before the page that is damaged."""


def load_cut(at: Setting) -> Iterator[Trial]:
    """A request is cancelled while it loads, one gives way right after; one is cancelled while storage is asked."""
    with TemporaryDirectory() as directory:
        with open_home(at, storage=file_url(directory)) as home:
            trial = home.trial(num_pages=30)
            trial.ask("base")
            trial.forget_device()
            loading = trial.add("base")
            trial.executor.on_admit = lambda request_id, admit, row: trial.cancel(loading)
            trial.finish()
            trial.executor.on_admit = lambda request_id, admit, row: None
            trial.hit("base", tiers={"device": ALL})
            yield from _displaced(trial)
        with open_home(at, storage=file_url(directory)) as home:
            trial = home.trial()
            trial.cancel(trial.add("base"))
            trial.finish()
            trial.hit("base", cached=ALL)
            trial.settle()
            yield trial


def _displaced(trial: Trial) -> Iterator[Trial]:
    """A prompt loads, and gives its pages to a more urgent one before its answer is complete."""
    trial.forget_device()
    slow = trial.add("base", priority=1)
    urgent: list[Asked] = []

    def on_admit(request_id: str, *_: object) -> None:
        if not urgent:
            urgent.append(trial.add("other"))

    trial.executor.on_admit = on_admit
    trial.finish()
    trial.expect(slow.by_tier == {"host": ALL}, f"{slow.by_tier} was loaded")
    trial.expect(trial.engine.stats().preemptions > 0, "30 pages were enough for both")
    trial.settle()
    yield trial


def object_missing(at: Setting) -> Iterator[Trial]:
    """The object of one rank of one page is gone."""
    with TemporaryDirectory() as directory:
        source, target = Path(directory, "a"), Path(directory, "b")
        with open_home(at, storage=file_url(source)) as home:
            trial = home.trial()
            trial.ask("base")
            trial.settle()
            digest = page_digests(trial, "base")[_BAD_PAGE]
            yield trial
        missing = stored_keys(source, digest)[-1]
        copy_storage(source, target, lambda key, data: None if key == missing else (key, data))
        yield _meet(at, target, good=_GOOD, miss=Miss.EVICTED_STORAGE)


def storage_flip(at: Setting) -> Iterator[Trial]:
    """One bit of an object in the storage is another one; when the page was computed again it is stored again."""
    with TemporaryDirectory() as directory:
        storage = Path(directory)
        yield from _store_and_spoil(at, storage, is_cut=False)
        yield _meet(at, storage, good=_GOOD, miss=Miss.CHECKSUM)
        with open_home(at, storage=file_url(storage)) as home:
            trial = home.trial()
            trial.hit("base", tiers={"storage": ALL})
            trial.settle()
            yield trial


def truncated(at: Setting) -> Iterator[Trial]:
    """A file of the storage was cut in the middle of a page."""
    with TemporaryDirectory() as directory:
        yield from _store_and_spoil(at, Path(directory), is_cut=True)
        yield _meet(at, Path(directory), good=_GOOD, miss=Miss.CHECKSUM)


def host_flip(at: Setting) -> Iterator[Trial]:
    """One bit of the host's memory is another one: of a page, then of each part of the restore point."""
    with open_home(at) as home:
        trial = home.trial()
        trial.ask("base")
        for space in home.arena.layout.spaces:
            trial.forget_device()
            unit = host_units(trial, "base")[space][_BAD_PAGE if space == FULL else -1]
            home.flip(space, unit, rank=last_rank(home.arena, space))
            trial.hit("base", tiers={}, miss=Miss.CHECKSUM)
            trial.forget_device()
            trial.hit("base", tiers={"host": ALL})
        trial.settle()
        yield trial


def foreign(at: Setting) -> Iterator[Trial]:
    """The storage holds objects of another length, of other rows, and of other weights."""
    with TemporaryDirectory() as directory:
        source = Path(directory, "source")
        yield store(at, source)
        changes: dict[Change, Miss] = {
            lambda key, data: (key, data[:-1]): Miss.IDENTITY,
            lambda key, data: (key[:32] + b"other format" + key[44:], data): Miss.IDENTITY,
            lambda key, data: (sha256(key[:32]).digest() + key[32:], data): Miss.NEVER_SEEN,
        }
        for i, (change, miss) in enumerate(changes.items()):
            target = Path(directory, str(i))
            copy_storage(source, target, change)
            yield _meet(at, target, good=0, miss=miss)


def slow_storage(at: Setting) -> Iterator[Trial]:
    """The storage answers after the time that a request waits for it."""
    with TemporaryDirectory() as directory:
        yield store(at, Path(directory))
        with open_home(
            at,
            storage=f"faulty+{file_url(directory)}&seed=1&delay=1&delay_s=0.4",
            prefetch="timeout",
            timeout_s=0.01,
        ) as home:
            trial = home.trial()
            trial.hit("base", tiers={}, miss=Miss.TIMEOUT)
            yield trial


def host_full(at: Setting) -> Iterator[Trial]:
    """The host evicts a prompt for another one; then it is too small for any."""
    with open_home(at, pages=24, points=2) as home:
        trial = home.trial()
        trial.ask("base")
        trial.ask("other")
        trial.forget_device()
        trial.expect(trial.cache.tiers()["host"]["evicted_pages"] == 11, "other pages of the host had to go")
        if at.point_space:
            trial.hit("base", tiers={}, miss=Miss.STATE_MISSING, cut_by=at.point_space)
        else:
            trial.hit("base", tiers={"host": 24}, miss=Miss.EVICTED_HOST)
        trial.settle()
        yield trial
    with open_home(at, pages=8) as home:
        trial = home.trial()
        trial.ask("base")
        trial.settle()
        trial.evict_pages(trial.cache.device.pages.num_pages)
        trial.gang.tell(Poison())
        trial.expect(trial.cache.tiers()["host"]["unsaved_pages"] > 0, "8 pages were enough")
        trial.hit("base", tiers={}, miss=Miss.EVICTED_DEVICE)
        trial.settle()
        yield trial


def disk_full(at: Setting) -> Iterator[Trial]:
    """No file can grow: nothing is stored, and what was stored before is still found."""
    with TemporaryDirectory() as directory:
        with open_home(at, storage=file_url(directory)) as home:
            trial = home.trial()
            with _no_disk():
                trial.ask("base")
                trial.settle()
            counts = home.storage_counts()
            trial.expect(counts["disk_full"] > 0 and counts["objects"] == 0, f"the disk was not full: {counts}")
            yield trial
        yield _meet(at, Path(directory), good=0, miss=Miss.NEVER_SEEN)


@contextmanager
def _no_disk() -> Iterator[None]:
    """Files of this process, beyond those that are large already, cannot grow over 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def evicted_loading(at: Setting) -> Iterator[Trial]:
    """While a prompt loads, another one needs room: on the host, then on the device under write_back.

    At last what leaves the device for it wants the host's only restore point, which is the one to be loaded.
    """
    with open_home(at, pages=24, points=2) as home:
        trial = home.trial()
        trial.ask("base")
        trial.forget_device()
        asked, _ = trial.ask("base", "other")
        trial.expect(asked.by_tier == {"host": ALL}, f"{asked.by_tier} was loaded")
        trial.settle()
        yield trial
    with open_home(at, policy="write_back") as home:
        trial = home.trial(num_pages=30)
        for name in ("base", "other", "base", "other"):
            trial.ask(name)
        for asked in trial.asked[2:]:
            loaded = asked.by_tier.get("host", 0)
            trial.expect(asked.miss == "" and loaded > 0, f"{asked.request_id}: {asked.by_tier}, {asked.miss!r}")
        trial.settle()
        yield trial
    with open_home(at, policy="write_back", points=1) as home:
        trial = home.trial(restore_points=1, max_running=1)
        for name in ("base", "other", "base", "other"):
            trial.ask(name)
        trial.settle()
        failed = trial.cache.tiers()["host"]["failed_loads"]
        trial.expect(failed == 0, f"{failed} restore points were gone when they were loaded")
        yield trial


def _store_and_spoil(at: Setting, storage: Path, *, is_cut: bool) -> Iterator[Trial]:
    with open_home(at, storage=file_url(storage)) as home:
        trial = home.trial()
        trial.ask("base")
        trial.settle()
        arena = home.arena
        needle = first_piece(arena, FULL, host_units(trial, "base")[FULL][_BAD_PAGE], rank=last_rank(arena, FULL))
        yield trial
    spoil_file(storage, needle, is_cut=is_cut)


def _meet(at: Setting, storage: Path, *, good: int, miss: Miss) -> Trial:
    """Ask for what the storage has in part; then the host has all of it."""
    with open_home(at, storage=file_url(storage)) as home:
        trial = home.trial()
        trial.hit("base", tiers={"storage": 0 if at.point_space else good}, miss=miss)
        trial.forget_device()
        trial.hit("base", tiers={"host": ALL})
        trial.settle()
        return trial


FAULT_SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            load_cut,
            object_missing,
            storage_flip,
            truncated,
            host_flip,
            foreign,
            slow_storage,
            host_full,
            disk_full,
            evicted_loading,
        )
    }
)
"""Columns by name. Each gives its trials once they are done."""
