"""Moves between a CUDA device and the host: the bytes, and their order with what the device computes meanwhile."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from raycache.memory.carriers import LOAD_BUFFER_BYTES
from raycache.memory.checksum import checksum_of
from raycache.memory.component import CacheFormat, index_keys, kv
from raycache.memory.moves import Moves, Unit
from raycache.memory.streams import MOST_COPIES, CopyEngine, PinnedSlabs
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
    ranks.movers[0].save(Moves.of(1, units))
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
    ranks.movers[0].load(Moves.of(1, units))
    after = []
    for layer in range(6):
        ranks.pools[0].kv(layer)
        after.append(rows[layer, ids])
    for found, whole in ((before, old), (torch.stack(after), saved)):
        assert torch.equal(found.cpu(), whole["kv", "k"][:, ids.cpu()])
    assert ranks.posted("load", 1) == [False]
    ranks.close()


def test_a_damaged_page_fails_the_load_and_touches_no_other_page(shared_memory: Path) -> None:
    ranks, units = of_one_rank(shared_memory)
    whole = whole_model(ranks.components, seed=6)
    ranks.fill(whole)
    ranks.save(1, units)
    for rows in ranks.rows(0).values():
        rows.fill_(0xA5)
    ranks.arena.slab(0, "full")[7, 100] ^= 1
    assert ranks.load(1, units) == [True]
    for layer in range(6):
        ranks.pools[0].kv(layer)
    others = [device for device in range(DEVICE["full"]) if device not in {unit.device for unit in units}]
    assert all((rows[:, others] == 0xA5).all() for rows in ranks.rows(0).values())
    assert ranks.load(2, units[:2]) == [False]
    for key, rows in ranks.rows(0).items():
        ids = [unit.device for unit in units[:2]]
        assert torch.equal(rows[:, ids].cpu(), whole[key][:, ids])
    ranks.close()


def test_a_page_of_another_tag_fails_the_load_before_anything_is_copied(shared_memory: Path) -> None:
    ranks, units = of_one_rank(shared_memory)
    ranks.fill(whole_model(ranks.components, seed=6))
    ranks.save(1, units)
    for rows in ranks.rows(0).values():
        rows.fill_(0xA5)
    ranks.arena.headers(0, "full")[units[-1].host, 0] += 1
    assert ranks.load(1, units) == [True]
    ranks.pools[0].kv(5)
    assert all((rows == 0xA5).all() for rows in ranks.rows(0).values())
    ranks.close()


@pytest.mark.parametrize("row_bytes", [1, 3, 6, 20, 40, 176])
def test_pieces_that_are_not_aligned_to_16_bytes_come_back(shared_memory: Path, row_bytes: int) -> None:
    """Each rank holds one token of a page: its pieces are as long as one row of one layer."""
    components = [
        kv("kv", range(6), heads=1, dim=row_bytes, fmt=CacheFormat("float8_e4m3fn")),
        index_keys([2, 5], dim=5, fmt=CacheFormat("bfloat16")),
    ]
    ranks = Hosted(shared_memory / "arena", components, Split(cp=8), device="cuda")
    comes_back(ranks, UNITS[:5], seed=7)
    ranks.close()


@pytest.mark.parametrize("num_units", [1, 2, 16, 6000])
def test_one_unit_and_thousands_come_back(shared_memory: Path, num_units: int) -> None:
    """Thousands fill the buffers between pool and host several times, the last time in part."""
    components = [kv("kv", range(6), heads=4, dim=64, fmt=CacheFormat("bfloat16"))]
    ranks = Hosted(shared_memory / "arena", components, Split(), units={"full": num_units}, device="cuda")
    assert num_units < 6000 or ranks.layout.unit_bytes("full") * num_units > 2 * LOAD_BUFFER_BYTES
    hosts = random.Random(num_units).sample(range(num_units), num_units)
    comes_back(ranks, [Unit("full", device, host, host + 1) for device, host in enumerate(hosts)], seed=8)
    ranks.close()


def comes_back(ranks: Hosted, units: Sequence[Unit], *, seed: int) -> None:
    """Save, wipe, load into the pages that were saved from."""
    whole = whole_model(ranks.components, seed=seed, units=ranks.pools[0].sizes)
    ranks.fill(whole)
    assert not any(ranks.save(1, units))
    everyone = range(ranks.split.world_size)
    for rank in everyone:
        for rows in ranks.rows(rank).values():
            rows.fill_(0xA5)
    assert not any(ranks.load(1, units))
    ids = [unit.device for unit in units]
    for rank in everyone:
        for key, rows in ranks.rows(rank).items():
            wanted = torch.full_like(rows, 0xA5)
            wanted[:, ids] = ranks.part(whole, rank, key).to(rows.device)[:, ids]
            assert torch.equal(rows, wanted), f"{key} of rank {rank}"


@pytest.mark.parametrize("num_bytes", [256, 1024, 1088, 5056, 20_480, 1_048_640])
def test_checksums_of_the_device_are_those_of_the_host_in_whatever_parts_they_come(num_bytes: int) -> None:
    from raycache.memory.checksum_kernels import STRIPE, DeviceChecksums, Stripes  # Triton is there only with a GPU

    device, num_stripes = torch.device("cuda"), num_bytes // STRIPE
    rows = torch.randint(0, 256, (3, num_bytes + 192), dtype=torch.uint8)
    cuts = sorted({0, num_stripes, *random.Random(num_bytes).sample(range(num_stripes), min(num_stripes, 7))})
    runs = [Stripes(STRIPE * first, first, end - first) for first, end in itertools.pairwise(cuts)]
    checksums = DeviceChecksums(num_bytes, device)
    sums = checksums.zeros(3)
    for some in (runs[1::2], runs[::2]):
        if some:
            checksums.add(sums, rows.to(device), torch.tensor(some, device=device), num_programs=7)
    wanted = [checksum_of(row[:num_bytes].numpy().data) for row in rows]
    assert checksums.finish(sums).cpu().numpy().view("u8").tolist() == wanted


@pytest.mark.parametrize("has_batches", [False, True])
def test_copies_one_by_one_and_in_calls_of_many_are_the_same(has_batches: bool) -> None:
    count = 2 * MOST_COPIES + 100
    source = torch.randint(0, 256, (count, 4096), dtype=torch.uint8).pin_memory()
    there, back = torch.zeros_like(source, device="cuda"), torch.zeros_like(source).pin_memory()
    order, stream = torch.randperm(count).numpy(), torch.cuda.Stream()
    lengths = np.full(count, 4000)
    engine = CopyEngine(has_batches=has_batches)
    rows = np.arange(count) * 4096
    torch.cuda.synchronize()
    for copies in (
        (there.data_ptr() + rows, source.data_ptr() + order * 4096, lengths),
        (back.data_ptr() + rows[::-1], there.data_ptr() + rows, lengths),
    ):
        engine.copy(np.stack(copies).astype(np.uint64), stream)
    stream.synchronize()
    assert torch.equal(back[:, :4000].flip(0), source[order][:, :4000]) and not back[:, 4000:].any()


def test_loads_and_saves_beside_a_step_change_nothing_of_either(shared_memory: Path) -> None:
    """While matrices are multiplied on the step's stream, as in a decode, pages come and go on the lanes' own."""
    num_units, tokens = 400, torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45
    components = [kv("kv", range(6), heads=4, dim=64, fmt=CacheFormat("bfloat16"))]
    ranks = Hosted(shared_memory / "arena", components, Split(), units={"full": num_units}, device="cuda")
    whole = whole_model(components, seed=9, units={"full": num_units})
    halves = [[Unit("full", at, at, at + 1) for at in range(first, num_units, 2)] for first in range(2)]

    def decode() -> torch.Tensor:
        hidden = tokens
        for _ in range(500):
            hidden = hidden @ weights
        return hidden

    wanted = decode()
    ranks.fill(whole)
    assert ranks.save(1, halves[0]) == [False]
    for rows in ranks.rows(0).values():
        rows[:, ::2].zero_()
    ranks.movers[0].load(Moves.of(1, halves[0]))
    ranks.movers[0].save(Moves.of(2, halves[1]))
    found = decode()
    assert {ranks.posts.get(timeout=20) for _ in range(2)} == {(0, "load", 1, False), (0, "save", 2, False)}
    assert torch.equal(found, wanted)
    for key, rows in ranks.rows(0).items():
        assert torch.equal(rows.cpu(), whole[key])
        rows[:, 1::2].zero_()
    assert ranks.load(2, halves[1]) == [False]
    for key, rows in ranks.rows(0).items():
        assert torch.equal(rows.cpu(), whole[key])
    ranks.close()


def test_slabs_are_pinned_once_and_until_the_end(shared_memory: Path) -> None:
    ranks, _ = of_one_rank(shared_memory)
    slab = torch.from_numpy(ranks.arena.slab(0, "full"))
    assert slab[0].is_pinned() and slab[-1].is_pinned()
    again = PinnedSlabs([ranks.arena.slab(0, "full")], device=torch.device("cuda"))
    again.close()
    assert slab.is_pinned(), "who pinned it first keeps it"
    ranks.movers[0].close()
    assert not slab.is_pinned()
    ranks.close()
