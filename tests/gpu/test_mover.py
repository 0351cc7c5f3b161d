"""Moves between a CUDA device and the host: the bytes, and their order with what the device computes meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycache.memory.component import CacheFormat, kv
from raycache.memory.moves import Moves, Unit
from raycache.memory.streams import PinnedSlabs
from raycache.parallel.sharding import Split
from tests.unit.hosted import DEVICE, Hosted, everything, whole_model

pytestmark = pytest.mark.gpu

SPLITS = [Split(), Split(tp=2), Split(tp=4, cp=2), Split(pp=3), Split(tp=2, pp=2, cp=2), Split(cp=8), Split(tp=16)]
UNITS = [
    *(Unit("full", device, host, 1000 + host) for device, host in [(3, 5), (4, 6), (5, 7), (0, 11), (8, 0)]),
    *(Unit("window", device, host, 1000 + host) for device, host in [(6, 2), (1, 7)]),
    *(Unit("state", device, host, 1000 + host) for device, host in [(4, 1), (0, 5)]),
]
LONG = 200_000_000  # cycles, a tenth of a second


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raycache-test-", dir="/dev/shm") as directory:
        yield Path(directory)


def of_one_rank(directory: Path) -> tuple[Hosted, list[Unit]]:
    components = [kv("kv", range(6), heads=4, dim=64, fmt=CacheFormat("bfloat16"))]
    return Hosted(directory / "arena", components, Split(), device="cuda"), UNITS[:5]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("has_fp8_latent", [False, True], ids=["plain", "fp8"])
def test_every_byte_comes_back_under_every_split(shared_memory: Path, split: Split, has_fp8_latent: bool) -> None:
    ranks = Hosted(shared_memory / "arena", everything(has_fp8_latent=has_fp8_latent), split, device="cuda")
    whole = whole_model(ranks.components, seed=1)
    ranks.fill(whole)
    assert not any(ranks.save(1, UNITS))
    for rank in range(split.world_size):
        for rows in ranks.rows(rank).values():
            rows.fill_(0xA5)
    loaded = [unit._replace(device=(unit.device + 2) % DEVICE[unit.space]) for unit in UNITS]
    assert not any(ranks.load(1, loaded))
    spaces = {component.name: component.space for component in ranks.components}
    for rank in range(split.world_size):
        for key, rows in ranks.rows(rank).items():
            before = ranks.part(whole, rank, key)
            wanted = torch.full_like(before, 0xA5)
            for old, new in zip(UNITS, loaded, strict=True):
                if old.space == spaces[key[0]]:
                    wanted[:, new.device] = before[:, old.device]
            assert torch.equal(rows.cpu(), wanted), f"{key} of rank {rank}"
    ranks.close()


def test_the_same_bytes_are_on_the_host_as_from_a_pool_on_the_cpu(shared_memory: Path) -> None:
    both = [
        Hosted(shared_memory / device, everything(has_fp8_latent=True), Split(tp=2, cp=2), device=device)
        for device in ("cpu", "cuda")
    ]
    for ranks in both:
        ranks.fill(whole_model(ranks.components, seed=2))
        assert not any(ranks.save(1, UNITS))
    for rank in range(4):
        for space in both[0].layout.spaces:
            on_cpu, on_cuda = (ranks.arena.headers(rank, space) for ranks in both)
            assert (on_cpu == on_cuda).all() and on_cpu.any(), "tags and checksums"
    for ranks in both:
        ranks.close()


def test_a_save_copies_what_was_written_before_it_and_may_be_waited_for(shared_memory: Path) -> None:
    ranks, units = of_one_rank(shared_memory)
    whole = whole_model(ranks.components, seed=3)
    new = {key: rows.cuda() for key, rows in whole.items()}
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for key, rows in ranks.rows(0).items():
        rows.copy_(new[key], non_blocking=True)  # the device comes to it after the sleep
    ranks.movers[0].save(Moves(1, units))
    ranks.movers[0].wait_saved(1)
    for rows in ranks.rows(0).values():
        rows.zero_()
    assert ranks.posted("save", 1) == [False]
    assert ranks.load(1, units) == [False]
    for key, rows in ranks.rows(0).items():
        for unit in units:
            assert torch.equal(rows[:, unit.device].cpu(), whole[key][:, unit.device])
    ranks.close()


def test_a_load_comes_after_earlier_readers_of_its_pages_and_before_later_ones(shared_memory: Path) -> None:
    ranks, units = of_one_rank(shared_memory)
    old, saved = (whole_model(ranks.components, seed=seed) for seed in (4, 5))
    ranks.fill(saved)
    ranks.save(1, units)
    ranks.fill(old)
    torch.cuda.synchronize()
    rows, ids = ranks.rows(0)["kv", "k"], torch.tensor([unit.device for unit in units], device="cuda")
    torch.cuda._sleep(LONG)
    before = rows[:, ids]  # read after the sleep
    ranks.movers[0].load(Moves(1, units))
    after = []
    for layer in range(6):
        ranks.pools[0].kv(layer)
        after.append(rows[layer, ids])
    for found, whole in ((before, old), (torch.stack(after), saved)):
        assert torch.equal(found.cpu(), whole["kv", "k"][:, ids.cpu()])
    assert ranks.posted("load", 1) == [False]
    ranks.close()


def test_a_damaged_page_fails_the_load_and_leaves_the_device_as_it_was(shared_memory: Path) -> None:
    ranks, units = of_one_rank(shared_memory)
    ranks.fill(whole_model(ranks.components, seed=6))
    ranks.save(1, units)
    for rows in ranks.rows(0).values():
        rows.fill_(0xA5)
    ranks.arena.slab(0, "full")[7, 100] ^= 1
    assert ranks.load(1, units) == [True]
    for layer in range(6):
        ranks.pools[0].kv(layer)
    assert all((rows == 0xA5).all() for rows in ranks.rows(0).values())
    assert ranks.load(2, units[:2]) == [False]
    ranks.close()


def test_slabs_are_pinned_once_and_until_the_end(shared_memory: Path) -> None:
    ranks, _ = of_one_rank(shared_memory)
    slab = torch.from_numpy(ranks.arena.slab(0, "full"))
    assert slab[0].is_pinned() and slab[-1].is_pinned()
    again = PinnedSlabs([ranks.arena.slab(0, "full")])
    again.close()
    assert slab.is_pinned(), "who pinned it first keeps it"
    ranks.movers[0].close()
    assert not slab.is_pinned()
    ranks.close()
