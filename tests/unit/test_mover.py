"""Moves between device and host: every byte comes back under every split, and what is damaged is never loaded."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycache.memory import carriers
from raycache.memory import mover as movers
from raycache.memory.checksum import checksum_of
from raycache.memory.component import CacheFormat, kv
from raycache.memory.mover import Loading, Mover
from raycache.memory.moves import Moves, Unit
from raycache.memory.streams import Passed
from raycache.parallel.sharding import Split
from tests.unit.hosted import DEVICE, Hosted, everything, whole_model

SPLITS = [Split(tp=tp, pp=pp, cp=cp) for tp, pp, cp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 4, 8))]
SPLITS = [split for split in SPLITS if split.world_size <= 16] + [Split(tp=3), Split(tp=8), Split(tp=16)]
WHOLE = Split()
UNITS = [
    *(Unit("full", device, host, 1000 + host) for device, host in [(3, 5), (4, 6), (5, 7), (0, 11), (8, 0)]),
    *(Unit("window", device, host, 1000 + host) for device, host in [(6, 2), (1, 7)]),
    *(Unit("state", device, host, 1000 + host) for device, host in [(4, 1), (0, 5)]),
]
ELSEWHERE = [unit._replace(device=(unit.device + 2) % DEVICE[unit.space]) for unit in UNITS]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Hosted]]:
    made: list[Hosted] = []

    def make(split: Split = WHOLE, *, has_fp8_latent: bool = False) -> Hosted:
        made.append(Hosted(tmp_path / f"arena{len(made)}", everything(has_fp8_latent=has_fp8_latent), split))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wipe(gang: Hosted) -> None:
    for rank in range(gang.split.world_size):
        for rows in gang.rows(rank).values():
            rows.fill_(0xA5)


def check_loaded(gang: Hosted, whole: dict[tuple[str, str], torch.Tensor], loaded: list[Unit]) -> None:
    """Where UNITS were saved and `loaded` read back: those are as they were, all others are wiped."""
    spaces = {component.name: component.space for component in gang.components}
    for rank in range(gang.split.world_size):
        for key, rows in gang.rows(rank).items():
            wanted, before = torch.full_like(rows, 0xA5), gang.part(whole, rank, key)
            for old, new in zip(UNITS, loaded, strict=False):
                if old.space == spaces[key[0]]:
                    wanted[:, new.device] = before[:, old.device]
            assert torch.equal(rows, wanted), f"{key} of rank {rank}"


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("has_fp8_latent", [False, True], ids=["plain", "fp8"])
def test_every_byte_comes_back_under_every_split(gang: Callable, split: Split, has_fp8_latent: bool) -> None:  # type: ignore[type-arg]
    ranks: Hosted = gang(split, has_fp8_latent=has_fp8_latent)
    whole = whole_model(ranks.components, seed=1)
    ranks.fill(whole)
    assert not any(ranks.save(1, UNITS))
    wipe(ranks)
    assert not any(ranks.load(1, ELSEWHERE))
    check_loaded(ranks, whole, ELSEWHERE)


def test_headers_tell_the_tag_and_the_checksum_of_each_envelope(gang: Callable) -> None:  # type: ignore[type-arg]
    ranks: Hosted = gang(Split(tp=2, pp=3))
    ranks.fill(whole_model(ranks.components, seed=2))
    ranks.save(1, UNITS)
    saved = {(unit.space, unit.host): unit.tag for unit in UNITS}
    for rank, space in itertools.product(range(6), ranks.layout.spaces):
        slab, headers = ranks.arena.slab(rank, space), ranks.arena.headers(rank, space)
        for host in range(len(slab)):
            tag = saved.get((space, host), 0) if slab.shape[1] else 0
            assert headers[host].tolist() == ([tag, checksum_of(slab[host].tobytes())] if tag else [0, 0])


def test_what_is_saved_is_what_the_device_held_until_the_wait_for_it(gang: Callable) -> None:  # type: ignore[type-arg]
    ranks: Hosted = gang()
    first, second = whole_model(ranks.components, seed=3), whole_model(ranks.components, seed=4)
    for number, whole in enumerate([first, second], start=1):
        ranks.fill(whole)
        shifted = [unit._replace(host=unit.host - 1) if number == 2 and unit.host else unit for unit in UNITS]
        ranks.movers[0].save(Moves.of(number, shifted if number == 2 else UNITS))
        ranks.movers[0].wait_saved(number)
    assert [ranks.posts.get(timeout=5)[1:] for _ in range(2)] == [("save", 1, False), ("save", 2, False)]
    ranks.movers[0].wait_saved(2)
    wipe(ranks)
    # Ids 7, 11 of the pages and 2, 7 of the window were not saved over by the second move.
    kept = [unit for unit in UNITS if (unit.space, unit.host) in {("full", 7), ("full", 11), ("window", 7)}]
    assert not any(ranks.load(1, kept))
    for key, rows in ranks.rows(0).items():
        space = next(one.space for one in ranks.components if one.name == key[0])
        for unit in kept:
            if unit.space == space:
                assert torch.equal(rows[:, unit.device], first[key][:, unit.device])


def flip(gang: Hosted, rank: int) -> None:
    gang.arena.slab(rank, "full")[7, -65] ^= 1


def retag(gang: Hosted, rank: int) -> None:
    gang.arena.headers(rank, "full")[7, 0] += 1


def clear(gang: Hosted, rank: int) -> None:
    gang.arena.headers(rank, "full")[7] = 0


@pytest.mark.parametrize("damage", [flip, retag, clear])
@pytest.mark.parametrize("rank", range(4))
def test_a_damaged_envelope_fails_the_load_of_all_who_read_it_and_nothing_is_loaded(
    gang: Callable,  # type: ignore[type-arg]
    damage: Callable[[Hosted, int], None],
    rank: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks: Hosted = gang(Split(tp=2, cp=2))
    whole = whole_model(ranks.components, seed=5)
    ranks.fill(whole)
    ranks.save(1, UNITS)
    wipe(ranks)
    damage(ranks, rank)
    # Latents are whole on both tp ranks and stored once: the neighbour reads this rank's half too.
    assert ranks.load(1, UNITS) == [rank // 2 == other // 2 for other in range(4)]
    assert "load 1 failed" in caplog.text and f"in the slab of rank {rank}" in caplog.text
    for mover_rank, pool in enumerate(ranks.pools):
        for layer in range(6):
            pool.gate(layer)
        if mover_rank // 2 == rank // 2:
            assert all((rows == 0xA5).all() for rows in ranks.rows(mover_rank).values())
    ranks.save(2, UNITS)
    ranks.fill(whole)
    ranks.save(3, UNITS)
    wipe(ranks)
    assert not any(ranks.load(2, UNITS)), "a later save mends it"
    check_loaded(ranks, whole, UNITS)


@pytest.mark.parametrize(
    "wrong",
    [
        Unit("full", 0, -1, 1),
        Unit("full", -1, 0, 1),
        Unit("full", 0, 12, 1),
        Unit("full", DEVICE["full"], 0, 1),
        Unit("elsewhere", 0, 0, 1),
    ],
    ids=str,
)
def test_a_move_that_cannot_be_done_is_posted_as_failed_and_hangs_nobody(
    gang: Callable,  # type: ignore[type-arg]
    wrong: Unit,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks: Hosted = gang()
    ranks.fill(whole_model(ranks.components, seed=6))
    assert ranks.save(1, UNITS) == [False]
    assert ranks.save(2, [wrong]) == [True]
    assert ranks.load(1, [*UNITS, wrong]) == [True]
    told = f"{wrong} is not among" if wrong.space == "full" else "KeyError: 'elsewhere'"
    assert caplog.text.count(told) == 2, "once for each lane"
    ranks.pools[0].gate(5)
    assert ranks.save(3, UNITS) == [False]
    assert ranks.load(2, UNITS) == [False]
    ranks.movers[0].wait_saved(3)


def test_a_layer_is_released_before_the_next_is_there_and_before_the_post(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = range(4)
    ranks = Hosted(tmp_path / "arena", [kv("kv", layers, heads=1, dim=8, fmt=CacheFormat("float32"))], Split())
    ranks.fill(whole_model(ranks.components, seed=7))
    ranks.save(1, UNITS[:5])
    may_copy, may_post, passed, posts = threading.Event(), threading.Event(), list[int](), list[tuple[str, int, bool]]()

    copy, turns = carriers.copy_runs, count()

    def copy_runs(*given: Any) -> None:
        if next(turns) == layers[-1]:
            may_copy.wait(timeout=20)
        copy(*given)

    def hold(lane: str, number: int, has_failed: bool) -> None:
        may_post.wait(timeout=20)
        posts.append((lane, number, has_failed))

    def forward() -> None:
        for layer in layers:
            ranks.pools[0].kv(layer)
            passed.append(layer)

    monkeypatch.setattr(carriers, "copy_runs", copy_runs)
    mover = Mover(ranks.pools[0], ranks.arena, ranks.layout, rank=0, post=hold)
    wipe(ranks)
    mover.load(Moves.of(1, UNITS[:5]))
    step = threading.Thread(target=forward)
    step.start()
    step.join(timeout=0.3)
    assert passed == [0, 1, 2], "all but the last layer, which is not copied"
    may_copy.set()
    step.join(timeout=20)
    assert passed == [0, 1, 2, 3] and not posts
    may_post.set()
    mover.close()
    assert posts == [("load", 1, False)]
    ranks.close()


def with_saved(directory: Path) -> Hosted:
    """One rank whose host tier has `UNITS`."""
    ranks = Hosted(directory / "arena", everything(), Split())
    ranks.fill(whole_model(ranks.components, seed=8))
    assert ranks.save(1, UNITS) == [False]
    return ranks


def test_a_load_has_copied_its_first_layers_when_the_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = with_saved(tmp_path)
    copied, copy = threading.Event(), carriers.copy_runs

    def copy_runs(*given: Any) -> None:
        copy(*given)
        copied.set()

    monkeypatch.setattr(carriers, "copy_runs", copy_runs)
    monkeypatch.setattr(movers, "BEGIN_S", 20.0)
    ranks.movers[0].load(Moves.of(1, UNITS))
    assert copied.is_set()
    ranks.close()


def test_a_load_that_cannot_begin_holds_up_the_step_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = with_saved(tmp_path)
    may_copy, copy = threading.Event(), carriers.copy_runs

    def copy_runs(*given: Any) -> None:
        may_copy.wait(timeout=20)
        copy(*given)

    monkeypatch.setattr(carriers, "copy_runs", copy_runs)
    mover = ranks.movers[0]
    mover.load(Moves.of(1, UNITS))
    assert ranks.posts.empty(), "it is not waited for"
    monkeypatch.setattr(movers, "BEGIN_S", 60.0)
    behind = threading.Thread(target=mover.load, args=[Moves.of(2, UNITS)])
    behind.start()
    behind.join(timeout=20)
    assert not behind.is_alive(), "nor one behind it"
    may_copy.set()
    for layer in (0, 5):
        ranks.pools[0].gate(layer)
    ranks.close()


def test_a_layer_waits_for_itself_alone() -> None:
    loading, passed = Loading(), list[int]()
    readers = [threading.Thread(target=lambda at=at: (loading.wait(at), passed.append(at))) for at in range(2)]
    for reader in readers:
        reader.start()
    loading.release([1], Passed())
    readers[1].join(timeout=20)
    readers[0].join(timeout=0.1)
    assert passed == [1]
    loading.end()
    readers[0].join(timeout=20)
    assert passed == [1, 0]


def test_what_has_not_begun_at_the_end_is_dropped_and_hangs_nobody(tmp_path: Path) -> None:
    ranks = Hosted(tmp_path / "arena", everything(), Split())
    ranks.fill(whole_model(ranks.components, seed=8))
    begun, may_end, posts = threading.Event(), threading.Event(), list[tuple[str, int, bool]]()

    def hold(lane: str, number: int, has_failed: bool) -> None:
        posts.append((lane, number, has_failed))
        begun.set()
        if number == 1:
            may_end.wait(timeout=20)

    mover = Mover(ranks.pools[0], ranks.arena, ranks.layout, rank=0, post=hold)
    for number in (1, 2, 3):
        mover.load(Moves.of(number, UNITS[:1]))
    assert begun.wait(timeout=20)
    threads = [threading.Thread(target=mover.close), threading.Thread(target=ranks.pools[0].gate, args=(5,))]
    for thread in threads:
        thread.start()
    may_end.set()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert posts[0] == ("load", 1, True), "it was never saved"
    ranks.close()


def test_an_error_of_post_reaches_the_rank_and_hangs_nobody(tmp_path: Path) -> None:
    ranks = Hosted(tmp_path / "arena", everything(), Split())
    ranks.fill(whole_model(ranks.components, seed=10))

    def refuse(lane: str, number: int, has_failed: bool) -> None:
        raise OSError("no board")

    mover = Mover(ranks.pools[0], ranks.arena, ranks.layout, rank=0, post=refuse)
    mover.save(Moves.of(1, UNITS))
    mover.wait_saved(1)
    with pytest.raises(OSError, match="no board"):
        mover.save(Moves.of(2, UNITS))
    mover.load(Moves.of(1, UNITS))
    ranks.pools[0].gate(5)
    mover.close()
    ranks.close()


def test_saves_and_loads_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    components = [kv("kv", range(3), heads=2, dim=16, fmt=CacheFormat("float32"))]
    ranks = Hosted(tmp_path / "arena", components, Split(tp=2), units={"full": 40})
    wholes = [whole_model(components, seed=seed, units={"full": 40}) for seed in range(2)]
    halves = [[Unit("full", at, 39 - at, at + 1) for at in range(first, 40, 2)] for first in range(2)]
    ranks.fill(wholes[0])
    assert ranks.save(1, halves[0]) == [False] * 2
    for turn in range(1, 30):
        ranks.fill(wholes[turn % 2])  # this half is saved now; the other one comes back as it was in the turn before
        for mover in ranks.movers:
            mover.save(Moves.of(turn + 1, halves[turn % 2]))
            mover.load(Moves.of(turn, halves[(turn - 1) % 2]))
        posts = {ranks.posts.get(timeout=20) for _ in range(4)}
        assert posts == {(rank, *post, False) for rank in (0, 1) for post in (("save", turn + 1), ("load", turn))}
        for rank in (0, 1):
            for key, rows in ranks.rows(rank).items():
                new, old = (ranks.part(wholes[at % 2], rank, key) for at in (turn, turn - 1))
                assert torch.equal(rows[:, turn % 2 :: 2], new[:, turn % 2 :: 2])
                assert torch.equal(rows[:, (turn - 1) % 2 :: 2], old[:, (turn - 1) % 2 :: 2])
    ranks.close()


def test_a_rank_without_layers_of_a_space_has_nothing_to_move_and_says_so(tmp_path: Path) -> None:
    ranks = Hosted(tmp_path / "arena", everything()[:1], Split(pp=3))  # layers 0 and 3: the last stage has none
    ranks.fill(whole_model(ranks.components, seed=9))
    assert ranks.save(1, UNITS[:5]) == [False] * 3
    assert ranks.load(1, UNITS[:5]) == [False] * 3
    assert not ranks.arena.headers(2, "full").any()
    ranks.pools[2].gate(5)
    ranks.close()


def test_killed_while_saving_each_envelope_is_the_old_one_the_new_one_or_nothing(tmp_path: Path) -> None:
    components = [kv("kv", range(4), heads=4, dim=64, fmt=CacheFormat("float32"))]
    num_units = 100
    ranks = Hosted(tmp_path / "arena", components, Split(), units={"full": num_units})
    wholes = [whole_model(components, seed=seed, units={"full": num_units}) for seed in range(6)]
    ranks.fill(wholes[0])
    ranks.save(1, units_of(0, num_units))
    torn = 0
    for seed in range(1, 6):
        ranks.fill(wholes[seed])
        child = os.fork()
        if not child:
            save_and_die(ranks, units_of(seed, num_units))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        torn += check_torn(ranks, wholes, seed)
    assert torn, "at least one child was killed before it was done"
    ranks.close()


def units_of(seed: int, num_units: int) -> list[Unit]:
    return [Unit("full", at, at, 1000 * (seed + 1) + at) for at in range(num_units)]


def save_and_die(ranks: Hosted, units: list[Unit]) -> None:
    """In a child: begin to save, and be killed once some of it is done. Without torch's threads, which fork loses."""
    try:
        mover = Mover(ranks.pools[0], ranks.arena, ranks.layout, rank=0, post=lambda lane, number, has_failed: None)
        mover.save(Moves.of(1, units))
        headers, wanted = ranks.arena.headers(0, "full"), units[30].tag
        while wanted not in headers[:, 0]:
            pass
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def check_torn(ranks: Hosted, wholes: list[dict[tuple[str, str], torch.Tensor]], seed: int) -> bool:
    """Whether some envelopes are not of the last save; each is what its tag says."""
    slab, headers = ranks.arena.slab(0, "full"), ranks.arena.headers(0, "full")
    for at, (tag, checksum) in enumerate(headers.tolist()):
        if tag == 0:
            continue
        writer = tag // 1000 - 1
        assert tag % 1000 == at and writer <= seed
        rows = [wholes[writer]["kv", field][:, at].flatten().numpy() for field in ("k", "v")]
        np.testing.assert_array_equal(slab[at], np.concatenate(rows))
        assert checksum == checksum_of(slab[at].tobytes())
    assert (headers[:, 0] == 0).sum() <= seed, "at most one envelope is in the making"
    return bool((headers[:, 0] // 1000 != seed + 1).any())
