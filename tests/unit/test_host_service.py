"""The owner of a host tier: what it keeps over its own death, and that nothing of it stays in shared memory."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycache.errors import ConfigError
from raycache.host.directory import SHARED_MEMORY, Lease, are_ranks_gone, new_name
from raycache.host.service import HostService, open_arena
from raycache.host.spec import HostSpec
from raycache.memory.component import CacheFormat, index_keys, kv, latent, recurrent
from raycache.parallel.sharding import Split

_FMT = CacheFormat("bfloat16", has_fp8_latent=True)
_PARTS = (
    kv("kv", [0, 3], heads=2, dim=4, fmt=_FMT),
    latent([1, 5], rank=128, rope_dim=4, fmt=_FMT),
    index_keys([1, 5], dim=3, fmt=_FMT),
    kv("window", [2], heads=4, dim=2, fmt=_FMT, window=20),
    recurrent([4], heads=4, key_dim=3, value_dim=2, fmt=_FMT, conv=[("x", 8, 2)], conv_kernel=4),
)


def spec(pages: int = 8, storage: str = "", parts: int = len(_PARTS)) -> HostSpec:
    sizes = {"full": pages, "window": 6, "state": 3}
    kept = {part.space for part in _PARTS[:parts]}
    return HostSpec(
        components=_PARTS[:parts],
        num_layers=6,
        page_size=8,
        split=Split(tp=2, pp=1, cp=1),
        sizes={space: count for space, count in sizes.items() if space in kept},
        catalog_bytes=4096,
        storage=storage,
    )


@pytest.fixture
def directory() -> Iterator[Path]:
    path = SHARED_MEMORY / new_name()
    yield path
    assert not path.exists(), "the test closes its service"


def start_owner(directory: Path, storage: str) -> subprocess.Popen[str]:
    """Another process owns the host tier until it is killed."""
    script = (
        "import pathlib, sys, time; from tests.unit.test_host_service import spec, HostService;"
        "service = HostService(pathlib.Path(sys.argv[1])); service.open(spec(storage=sys.argv[2]), epoch=3);"
        "service.resize(4 << 20); service._arena.slab(1, 'full')[5] = 77; print('open', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(directory), storage]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def is_gone_within(seconds: float, path: Path) -> bool:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not path.exists()


def test_a_spec_is_read_as_it_was_written() -> None:
    assert HostSpec.read(spec(storage="file:///x").packed()) == spec(storage="file:///x")


def test_an_owner_goes_on_where_the_killed_one_before_was(directory: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}?size=8MiB"
    before = start_owner(directory, url)
    before.kill()
    before.wait()
    service = HostService(directory)
    try:
        assert service.spec() is not None and service.spec().sizes == spec().sizes
        assert service.status()["bytes_limit"] == 4 << 20, "as it was resized, not as in the URL"
        # What an engine of other free memory and other settings would ask for now is not what there is.
        opened = service.open(spec(pages=99), epoch=4)
        assert (opened.spec.sizes, opened.spec.storage, opened.is_fresh) == (spec().sizes, url, False)
        arena = open_arena(service.path)
        assert (arena.slab(1, "full")[5] == 77).all() and arena.epoch == 4
    finally:
        service.close()


def test_there_is_one_owner_at_a_time(directory: Path) -> None:
    service = HostService(directory)
    try:
        with pytest.raises(ConfigError, match="another process still uses"):
            Lease(directory, "owner", timeout_s=0.1)
    finally:
        service.close()
    with pytest.raises(ConfigError, match="is gone"):
        Lease(directory, "owner")


def test_an_arena_of_another_model_is_made_anew(directory: Path) -> None:
    service = HostService(directory)
    try:
        service.open(spec())
        open_arena(service.path).slab(0, "full")[0] = 1
        service.open(spec(pages=4, parts=3))
        fresh = open_arena(service.path)
        assert fresh.sizes == {"full": 4} and not fresh.slab(0, "full").any()
    finally:
        service.close()


def test_an_arena_that_was_left_half_made_is_made_anew(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = HostService(directory)
    service.open(spec())
    service.path.write_bytes(b"half")
    service._lease.close()
    with caplog.at_level(logging.WARNING):
        service = HostService(directory)
    try:
        assert "cannot be taken over" in caplog.text and service.spec() is None
        service.open(spec())
        assert open_arena(service.path).sizes == spec().sizes
    finally:
        service.close()


def test_a_storage_that_cannot_work_does_not_cost_the_one_in_use(directory: Path, tmp_path: Path) -> None:
    service = HostService(directory)
    try:
        with pytest.raises(ConfigError, match="try again when the engine runs"):
            service.attach("file:///nowhere?size=8MiB")
        service.open(spec())
        assert service.status() == {}
        for order in (service.detach, service.scrub, lambda: service.resize(1 << 20)):
            with pytest.raises(ConfigError, match="attach one first"):
                order()
        name = service.attach(f"file://{tmp_path / 'a'}?size=8MiB")
        with pytest.raises(ConfigError, match="unknown scheme"):
            service.attach("ftp://host/x")
        with pytest.raises(ConfigError, match="already attached"):
            service.attach(f"file://{tmp_path / 'a'}?size=16MiB")
        assert service.status()["name"] == name == f"file:{tmp_path / 'a'}"
        assert service.attach(f"file://{tmp_path / 'b'}?size=8MiB") == f"file:{tmp_path / 'b'}"
        assert service.scrub()["bad"] == 0
        assert service.detach() == f"file:{tmp_path / 'b'}" and service.status() == {}
    finally:
        service.close()


def test_passwords_in_urls_are_for_the_owner_alone(directory: Path) -> None:
    service = HostService(directory)
    try:
        service.open(spec(storage="redis://user:secret@127.0.0.1:1/0"))
        assert b"secret" in (directory / "spec").read_bytes()
        assert (directory / "spec").stat().st_mode & 0o077 == 0 and directory.stat().st_mode & 0o077 == 0
    finally:
        service.close()


@pytest.mark.long
def test_nothing_stays_when_all_who_used_it_are_dead(directory: Path, tmp_path: Path) -> None:
    owner = start_owner(directory, f"file://{tmp_path / 'store'}?size=8MiB")
    rank = Lease(directory, "ranks")
    owner.kill()
    owner.wait()
    assert not are_ranks_gone(directory, timeout_s=0.1)
    assert not is_gone_within(8, directory), "a rank still uses it"
    rank.close()
    assert are_ranks_gone(directory, timeout_s=1)
    assert is_gone_within(40, directory)
