"""Host memory and a storage below the ranks of a gang, and damage to both.

They outlive deciders, as they do in service: every trial of a home is a new decider on the same memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from raycache.cache.host_tier import HostTier
from raycache.cache.keys import unpacked
from raycache.cache.storage_commands import Fetch
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.host.link import HostLink
from raycache.host.service import HostService, open_arena
from raycache.host.spec import host_spec
from raycache.memory.arena import Arena
from raycache.memory.component import FULL
from raycache.models.base import read_config
from raycache.storage.base import Header
from raycache.storage.file import FileStorage
from raycache.storage.segment import Segment
from tests.matrix.ranks import Host
from tests.matrix.scenarios import Setting
from tests.matrix.trial import Trial

BOUND = 16 << 20
"""Of a storage, in bytes: more than all dialogues take."""

Units = dict[str, list[int]]
"""Component space -> host units."""


class Home:
    """The tiers below a gang. Use `open_home`.

    Args:
        at: the family and the gang.
        config: of the ranks' pools and the tiers.
        pages, points: that the host has room for.
    """

    def __init__(self, at: Setting, config: Config, *, pages: int, points: int) -> None:
        self._gang, self._corpus, self._config = at.gang, at.corpus, config
        self._trials: list[Trial] = []
        directory = Path(tempfile.mkdtemp(prefix="raycache-matrix-", dir="/dev/shm"))
        for name in ("owner", "ranks"):  # made beforehand, so that no process is started that watches over it
            (directory / name).touch()
        deployment = Deployment(config, read_config(at.corpus.model_dir), "cpu")
        sizes = {FULL: pages} | {space: points * width for space, width in deployment.part_widths.items()}
        self._spec = host_spec(deployment, sizes=sizes)
        self._service = HostService(directory)

    def trial(self, **settings: int) -> Trial:
        """A new decider, which finds what those before have left on the host."""
        epoch = len(self._trials) + 1
        opened = self._service.open(self._spec, epoch=epoch).spec
        link = HostLink(
            self._service.path, opened.sizes, self._service.work, has_storage=bool(opened.storage), epoch=epoch
        )
        trial = Trial(self._gang, self._corpus, self._config, host=link, **settings)
        self._trials.append(trial)
        return trial

    @property
    def arena(self) -> Arena:
        """The host's memory, mapped."""
        return open_arena(self._service.path)

    def storage_counts(self) -> dict[str, float]:
        """Fields of `StorageStats`."""
        return self._service.status()

    def blind(self) -> None:
        """Have the ranks trust whatever the host holds."""
        self._gang.ask(Host(self._service.path, is_blind=True))
        self._gang.answers()

    def flip(self, space: str, unit: int, *, rank: int, at: int = -1, bit: int = 0) -> None:
        """Flip one bit of an envelope, by default in its last byte."""
        self.arena.slab(rank, space)[unit, at] ^= 1 << bit

    def close(self) -> None:
        """Stop everything; the storage keeps what it has."""
        for trial in self._trials:
            trial.engine._scheduler.close()
        if not self._gang.is_broken:
            self._gang.ask(Host(None))
            self._gang.answers()
        self._service.close()


@contextmanager
def open_home(
    at: Setting,
    *,
    pages: int = 96,
    points: int = 16,
    storage: str = "none",
    policy: str = "write_through",
    prefetch: str = "wait_complete",
    timeout_s: float = 10.0,
) -> Iterator[Home]:
    """Tiers for some trials.

    Args:
        at: the family and the gang.
        pages, points: that the host has room for.
        storage: URL, see `file_url`.
        policy, prefetch, timeout_s: see `Config`.
    """
    config = replace(
        at.config,
        host_memory="1MiB",  # any: sizes are given
        write_policy=policy,
        storage=storage,
        prefetch=prefetch,
        prefetch_timeout_s=timeout_s,
    )
    home = Home(at, config, pages=pages, points=points)
    try:
        yield home
    finally:
        home.close()


def file_url(directory: str | Path) -> str:
    """Of a storage in a directory."""
    return f"file://{directory}?size={BOUND}B"


def host_units(trial: Trial, name: str) -> Units:
    """What the host holds of a dialogue's prompt: its pages, and what the restore point at their end has."""
    handle = _host(trial).tier.tree.match(_packed(trial, name), root=trial.engine.root(""), now=1 << 20)
    found = {FULL: handle.pages.tolist()} | {space: list(ids) for space, ids in handle.parts.items()}
    handle.release()
    return found


def page_digests(trial: Trial, name: str) -> list[bytes]:
    """Chain digests of the pages that the host holds of a dialogue's prompt."""
    host, tokens = _host(trial), _packed(trial, name)
    handle = host.tier.tree.match(tokens, root=trial.engine.root(""), now=1 << 20)
    digests = unpacked(host.digests(handle.pages))
    handle.release()
    return digests


def last_rank(arena: Arena, space: str) -> int:
    """The last rank that holds anything of a space."""
    return max(rank for rank in range(arena.layout.split.world_size) if arena.slab(rank, space).shape[1])


def first_piece(arena: Arena, space: str, unit: int, *, rank: int) -> bytes:
    """What the storage keeps as the first object of a unit of a rank."""
    piece = arena.layout.pieces(rank, space)[0]
    return bytes(arena.slab(rank, space)[unit, piece.offset : piece.offset + piece.num_bytes])


def _host(trial: Trial) -> HostTier:
    assert isinstance(trial.cache.host, HostTier), "asked for with a host tier only"
    return trial.cache.host


def _packed(trial: Trial, name: str) -> bytes:
    return np.asarray(trial.corpus.dialogues[name].prompt, np.int32).tobytes()


def spoil_file(storage: Path, needle: bytes, *, is_cut: bool) -> None:
    """Flip a bit of the object that begins with some bytes, or cut its file there. Nobody may have it open."""
    for path in sorted(storage.glob("*.segment")):
        data = bytearray(path.read_bytes())
        if (found := data.find(needle)) >= 0:
            if is_cut:
                path.write_bytes(data[:found])
            else:
                data[found] ^= 1
                path.write_bytes(data)
            return
    raise AssertionError("no file holds it")


Change = Callable[[bytes, bytes], tuple[bytes, bytes] | None]
"""(key, payload) -> both as they are to be stored, or None for not at all."""


def copy_storage(source: Path, target: Path, change: Change = lambda key, data: (key, data)) -> None:
    """Copy all objects, some of them changed. Nobody may have them open."""
    headers = list(_headers(source))
    before, after = FileStorage(source, max_bytes=BOUND), FileStorage(target, max_bytes=BOUND)
    for header in headers:
        data = bytearray(header.num_bytes)
        assert before.get([header.key], into=[data]) == [Fetch.HIT], "it was undamaged"
        if (wanted := change(header.key, bytes(data))) is not None:
            assert after.put([wanted[0]], payloads=[wanted[1]]) == [True], "it fits"
    before.close()
    after.close()


def stored_keys(storage: Path, digest: bytes) -> list[bytes]:
    """Keys of the objects of a page, sorted by what part of it they are."""
    return sorted(header.key for header in _headers(storage) if header.key.startswith(digest))


def _headers(storage: Path) -> Iterator[Header]:
    for path in sorted(storage.glob("*.segment")):
        segment = Segment.open(path)
        assert segment is not None, "it is whole"
        yield from (header for _, header in segment.recover() if isinstance(header, Header))
        segment.close()
