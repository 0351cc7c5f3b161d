"""The arena: what one process writes another one finds, and what does not fit is refused before it is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raycache.errors import ConfigError
from raycache.memory.arena import HEAD_BYTES, Arena
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.sharding import Split
from tests.oracle.staged import staged
from tests.unit.hosted import HOST, NUM_LAYERS, PAGE_SIZE, everything

SPLIT = Split(tp=2, pp=3)


def layout_of(split: Split = SPLIT, *, has_fp8_latent: bool = False) -> EnvelopeLayout:
    components = everything(has_fp8_latent=has_fp8_latent)
    return EnvelopeLayout(components, num_layers=NUM_LAYERS, page_size=PAGE_SIZE, split=staged(split, NUM_LAYERS))


def create(path: Path, layout: EnvelopeLayout, *, description: bytes = b"of a model") -> Arena:
    return Arena.create(path, layout, sizes=HOST, catalog_bytes=5000, description=description)


def regions(arena: Arena, layout: EnvelopeLayout) -> list[np.ndarray]:
    """All that can be written, as bytes."""
    found = [np.frombuffer(arena.catalog, np.uint8)]
    for rank in range(layout.split.world_size):
        for space in layout.spaces:
            found += [part.reshape(-1).view(np.uint8) for part in (arena.headers(rank, space), arena.slab(rank, space))]
    return found


def test_what_is_written_is_found_by_who_opens_it_and_nothing_overlaps(tmp_path: Path) -> None:
    layout = layout_of()
    arena = create(tmp_path / "arena", layout)
    assert all(not part.any() for part in regions(arena, layout)) and arena.epoch == 0
    for i, part in enumerate(regions(arena, layout)):
        part[:] = i + 1
    arena.epoch = 2**63 + 7
    other = Arena.open(tmp_path / "arena", layout, sizes=HOST, catalog_bytes=5000)
    assert (other.epoch, other.description, len(other.catalog)) == (2**63 + 7, b"of a model", 5000)
    for i, part in enumerate(regions(other, layout)):
        assert (part == i + 1).all()
    other.slab(1, "full")[3, 4] = 99
    assert arena.slab(1, "full")[3, 4] == 99


def test_its_size_is_said_before_it_is_made_and_its_memory_is_taken_at_once(tmp_path: Path) -> None:
    layout = layout_of()
    wanted = Arena.num_bytes(layout, sizes=HOST, catalog_bytes=5000)
    units = sum(HOST[space] * (layout.unit_bytes(space) + 16 * SPLIT.world_size) for space in layout.spaces)
    parts = 2 * SPLIT.world_size * len(layout.spaces)
    assert units + HEAD_BYTES + 5000 <= wanted < units + HEAD_BYTES + 5000 + 4096 * (parts + 1)
    create(tmp_path / "arena", layout)
    stat = (tmp_path / "arena").stat()
    assert stat.st_size == wanted and stat.st_blocks * 512 >= wanted


def test_slabs_begin_on_pages(tmp_path: Path) -> None:
    layout = layout_of()
    arena = create(tmp_path / "arena", layout)
    for rank in range(SPLIT.world_size):
        for space in layout.spaces:
            assert arena.slab(rank, space).shape == (HOST[space], layout.envelope_bytes(rank, space))
            assert arena.slab(rank, space).ctypes.data % 4096 == 0
            assert arena.headers(rank, space).shape == (HOST[space], 2)


@pytest.mark.parametrize(
    ("split", "has_fp8_latent", "sizes", "catalog_bytes"),
    [
        (Split(tp=3, pp=2), False, HOST, 5000),
        (SPLIT, True, HOST, 5000),
        (SPLIT, False, {**HOST, "full": 11}, 5000),
        (SPLIT, False, HOST, 5001),
    ],
    ids=["split", "row format", "size", "catalog"],
)
def test_an_arena_of_another_geometry_is_refused(
    tmp_path: Path, split: Split, has_fp8_latent: bool, sizes: dict[str, int], catalog_bytes: int
) -> None:
    create(tmp_path / "arena", layout_of())
    other = layout_of(split, has_fp8_latent=has_fp8_latent)
    with pytest.raises(ConfigError, match="another model, split or size.*remove it"):
        Arena.open(tmp_path / "arena", other, sizes=sizes, catalog_bytes=catalog_bytes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: HEAD_BYTES + 9], "is damaged"),
        (lambda data: data[:100], "is no arena"),
        (lambda data: b"", "is no arena"),
        (lambda data: bytes(len(data)), "is no arena"),  # killed before it was finished
        (lambda data: data.replace(b"RCarena1", b"RCarena0"), "is no arena"),
        (lambda data: data.replace(b"of a model", b"of b model"), "is damaged"),
        (lambda data: data + b"\0", "is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "arena"
    create(path, layout_of())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        Arena.open(path, layout_of(), sizes=HOST, catalog_bytes=5000)


def test_a_missing_file_and_one_that_is_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot open the arena.*No such file"):
        Arena.open(tmp_path / "arena", layout_of(), sizes=HOST, catalog_bytes=5000)
    create(tmp_path / "arena", layout_of())
    with pytest.raises(ConfigError, match="is there already"):
        create(tmp_path / "arena", layout_of())
    with pytest.raises(ConfigError, match="cannot make the arena.*make .*nowhere writable"):
        create(tmp_path / "nowhere" / "arena", layout_of())


def test_a_description_that_does_not_fit_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="description has 65536 bytes"):
        create(tmp_path / "arena", layout_of(), description=bytes(HEAD_BYTES))
    assert not (tmp_path / "arena").exists()


def test_memory_that_is_not_there_is_refused_with_figures_and_leaves_nothing_behind() -> None:
    path = Path(f"/dev/shm/raycache-test-{os.getpid()}")
    sizes = {**HOST, "full": 2**40}
    with pytest.raises(ConfigError, match=r"GiB wanted, .* GiB free in /dev/shm; use a smaller --host-memory"):
        Arena.create(path, layout_of(), sizes=sizes, catalog_bytes=0, description=b"")
    assert not path.exists()


def test_a_closed_arena_keeps_the_memory_of_views_that_are_left(tmp_path: Path) -> None:
    arena = create(tmp_path / "arena", layout_of())
    slab = arena.slab(0, "full")
    arena.unlink()
    arena.close()
    arena.close()
    slab[:] = 7
    assert (slab == 7).all() and not (tmp_path / "arena").exists()


def test_the_arena_is_usable_without_torch() -> None:
    code = "import sys, raycache.memory.arena; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
