"""Groups of ranks, in threads: built from handles, refused across epochs, lost when a member goes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import MagicMock

import msgpack
import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.errors import ConfigError, RankLostError
from raycache.parallel.collectives import Group, TorchGroup
from raycache.parallel.context import (
    DECIDER,
    GroupHandle,
    ParallelContext,
    Store,
    build_group,
    group_handles,
)
from raycache.parallel.sharding import Coords, Split
from raycache.wire.control import FRAME, broadcast_plan, receive_plan, receive_results, send_result
from raycache.wire.plan import Row, StepPlan

CPU = torch.device("cpu")
HOST = "127.0.0.1"
T = TypeVar("T")


@pytest.fixture
def store() -> Store:
    return Store(HOST)


def world_handle(store: Store, members: Sequence[int], *, epoch: int = 1, timeout_s: float = 20) -> GroupHandle:
    return GroupHandle("world", "world", tuple(members), "gloo", *store.address, epoch, timeout_s)


def together(handle: GroupHandle, work: Callable[[Group, int], T]) -> list[T]:
    """Let all members of a group do the same work, each in its own thread."""

    def member(rank: int) -> T:
        group = build_group(handle, member=rank, epoch=handle.epoch, host=HOST, device=CPU)
        try:
            return work(group, rank)
        finally:
            group.close()

    with ThreadPoolExecutor(len(handle.members)) as pool:
        return list(pool.map(member, handle.members))


# --- handles ----------------------------------------------------------------------------------------------------------


def test_handles_name_every_row_of_every_axis() -> None:
    split = Split(tp=2, pp=2, cp=2)
    handles = group_handles(split, backend="nccl", store=(HOST, 1), epoch=3, timeout_s=5.0)
    by_kind: dict[str, list[tuple[int, ...]]] = {}
    for name, handle in handles.items():
        assert handle.name == name
        assert (handle.store_host, handle.store_port, handle.epoch, handle.timeout_s) == (HOST, 1, 3, 5.0)
        by_kind.setdefault(handle.kind, []).append(handle.members)
    assert by_kind == {
        "control": [(DECIDER, *range(8))],
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "cp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "tp_cp": [(0, 1, 2, 3), (4, 5, 6, 7)],
    }
    assert {handle.kind for handle in handles.values() if handle.backend == "gloo"} == {"control"}


def test_a_handle_travels_as_plain_data() -> None:
    handle = GroupHandle("tp.0", "tp", (0, 1), "gloo", HOST, 1234, 7, 1.5)
    assert GroupHandle.from_wire(msgpack.unpackb(msgpack.packb(handle.to_wire()))) == handle


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_handle_of_another_epoch_is_refused_at_once(store: Store, epoch: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankLostError, match=f"epoch {epoch} refused, this gang is epoch 2"):
        build_group(world_handle(store, (0, 1), epoch=epoch), member=0, epoch=2, host=HOST, device=CPU)
    assert time.monotonic() - start < 10, "half of the deadline"


def test_a_gang_of_another_epoch_is_not_even_looked_for() -> None:
    handles = group_handles(Split(tp=2), backend="gloo", store=(HOST, 1), epoch=3, timeout_s=20)  # nobody is there
    start = time.monotonic()
    with pytest.raises(RankLostError, match="epoch 3 refused, this gang is epoch 4"):
        ParallelContext.join(Split(tp=2), rank=0, host=HOST, device=CPU, handles=handles, epoch=4)
    assert time.monotonic() - start < 10, "half of the deadline"


def test_who_is_no_member_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="rank 5 is not a member"):
        build_group(world_handle(store, (0, 1)), member=5, epoch=1, host=HOST, device=CPU)


def test_a_member_that_does_not_come_is_missed_at_the_deadline(store: Store) -> None:
    handle = world_handle(store, (0, 1), timeout_s=1)
    start = time.monotonic()
    with pytest.raises(RankLostError, match="did not form within 1 s"):
        build_group(handle, member=0, epoch=1, host=HOST, device=CPU)
    assert time.monotonic() - start < 30


def test_groups_of_two_epochs_do_not_meet_in_one_store(store: Store) -> None:
    old = world_handle(store, (0, 1), epoch=1, timeout_s=2)
    new = world_handle(store, (0, 1), epoch=2, timeout_s=2)

    def join(rank: int) -> str:
        handle = old if rank else new
        try:
            build_group(handle, member=rank, epoch=handle.epoch, host=HOST, device=CPU)
        except RankLostError as error:
            return error.cause
        return "met"

    with ThreadPoolExecutor(2) as pool:
        assert all("did not form" in cause for cause in pool.map(join, (0, 1)))


def test_the_store_listens_on_its_own_address_alone(store: Store) -> None:
    wanted = f":{store.address[1]:04X}"
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(wanted) and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F{wanted}"]


# --- collectives ------------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_the_identity() -> None:
    group, tensor = Group(), torch.arange(6.0).view(1, 6)
    assert (group.rank, group.size) == (0, 1)
    assert torch.equal(group.all_reduce(tensor), tensor)
    assert torch.equal(group.all_gather(tensor), tensor[None])
    assert torch.equal(group.all_to_all(tensor), tensor)
    assert torch.equal(group.broadcast(tensor, root=0), tensor)
    group.ibroadcast(tensor, root=0)()
    group.close()


def test_a_handle_of_one_member_needs_no_store() -> None:
    handle = GroupHandle("tp.0", "tp", (3,), "gloo", "nowhere.invalid", 1, 1, 1.0)
    assert build_group(handle, member=3, epoch=1, host=HOST, device=CPU).size == 1


def started(group: Group, tensor: Tensor) -> Tensor:
    """Two gathers at once; what the second one gave."""
    outs = [tensor.new_empty((group.size, *tensor.shape)) for _ in range(2)]
    waits = [group.iall_gather(given, out=out) for given, out in zip((tensor + 1, tensor), outs, strict=True)]
    for wait in waits:
        wait()
    assert torch.equal(outs[0], outs[1] + 1)
    return outs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_any_dtype(store: Store, size: int, dtype: torch.dtype) -> None:
    def make(rank: int) -> Tensor:
        return torch.arange(size * 4).view(size, 4).to(dtype) + 10 * rank

    def work(group: Group, rank: int) -> dict[str, Tensor]:
        mine = make(rank)
        # Views with strides, as models give them.
        strided = torch.stack([mine, mine], -1)[..., 0]
        found = {
            "all_gather": group.all_gather(strided),
            "all_to_all": group.all_to_all(strided),
            "empty": group.all_gather(mine[:0]),
            "started": started(group, strided),
            "broadcast": group.broadcast(make(rank), root=1),
        }
        summed = make(rank)
        found["all_reduce"] = group.all_reduce(summed)
        assert found["all_reduce"] is summed
        return found

    every = together(world_handle(store, range(size)), work)
    for rank, found in enumerate(every):
        assert torch.equal(found["all_gather"], torch.stack([make(r) for r in range(size)]))
        assert torch.equal(found["started"], found["all_gather"])
        assert torch.equal(found["all_to_all"], torch.stack([make(r)[rank] for r in range(size)]))
        assert found["empty"].shape == (size, 0, 4)
        assert torch.equal(found["broadcast"], make(1))
        assert torch.equal(found["all_reduce"], sum((make(r) for r in range(size)), torch.zeros(1, dtype=dtype)))


@pytest.mark.parametrize("shape", [(3, 50), (300, 300)], ids=["sent to all at once", "passed on"])
def test_all_members_of_a_sum_or_gather_get_the_same(store: Store, shape: tuple[int, int]) -> None:
    parts = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    wanted = parts.double().sum(0)

    def work(group: Group, rank: int) -> tuple[Tensor, Tensor]:
        strided = parts[rank].T.contiguous().T
        return group.all_gather(strided), group.all_reduce(strided)

    for gathered, summed in (every := together(world_handle(store, range(4)), work)):
        assert torch.equal(gathered, parts)
        assert torch.equal(summed, every[0][1])
        torch.testing.assert_close(summed.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "num_bytes", "calls"),
    [
        (4, 16, ["alltoall_base", "alltoall_base"]),
        (4, 20, ["_allgather_base", "allreduce"]),
        (2, 16, ["_allgather_base", "allreduce"]),
    ],
)
def test_small_tensors_take_one_exchange_between_many(size: int, num_bytes: int, calls: list[str]) -> None:
    backend = MagicMock()
    group = TorchGroup(backend, rank=0, size=size, direct_bytes=64)
    group.all_gather(torch.zeros(num_bytes // 4))
    group.all_reduce(torch.zeros(num_bytes // 4))
    assert [name for name, _, _ in backend.method_calls] == calls


def test_messages_of_a_pair_arrive_in_order(store: Store) -> None:
    def work(group: Group, rank: int) -> list[int]:
        if rank == 0:
            sent = [group.isend(torch.tensor([i]), to=1) for i in range(20)]
            for wait in sent:
                wait()
            return []
        return [int(group.recv(torch.zeros(1, dtype=torch.int64), source=0)) for _ in range(20)]

    assert together(world_handle(store, (0, 1)), work)[1] == list(range(20))


def test_messages_of_several_peers_can_be_waited_for_in_any_order(store: Store) -> None:
    def work(group: Group, rank: int) -> list[list[int]]:
        if rank:
            for turn in range(5):
                group.send(torch.tensor([rank, turn]), to=0)
            return []
        found = []
        for order in ((1, 2, 3), (3, 2, 1), (2, 3, 1), (1, 3, 2), (3, 1, 2)):
            parts = {source: torch.zeros(2, dtype=torch.int64) for source in (1, 2, 3)}
            waits = {source: group.irecv(part, source=source) for source, part in parts.items()}
            for source in order:
                waits[source]()
                found.append(parts[source].tolist())
        return found

    expected = [[1, 0], [2, 0], [3, 0], [3, 1], [2, 1], [1, 1], [2, 2], [3, 2], [1, 2]]
    expected += [[1, 3], [3, 3], [2, 3], [3, 4], [1, 4], [2, 4]]
    assert together(world_handle(store, (0, 1, 2, 3)), work)[0] == expected


def test_a_peer_that_leaves_is_noticed_long_before_the_deadline(store: Store) -> None:
    start = time.monotonic()

    def work(group: Group, rank: int) -> str:
        if rank == 1:
            time.sleep(0.3)
            return ""
        with pytest.raises(RankLostError, match="gone or late") as lost:
            group.recv(torch.zeros(4), source=1)
        return lost.value.cause

    together(world_handle(store, (0, 1), timeout_s=60), work)
    assert time.monotonic() - start < 30


def test_a_peer_that_is_silent_is_lost_at_the_deadline(store: Store) -> None:
    done = threading.Event()

    def work(group: Group, rank: int) -> float:
        start = time.monotonic()
        if rank == 1:
            done.wait(20)
            return 0.0
        with pytest.raises(RankLostError, match="gone or late"):
            group.all_reduce(torch.zeros(4))
        done.set()
        return time.monotonic() - start

    waited = together(world_handle(store, (0, 1), timeout_s=2), work)[0]
    assert 1 < waited < 10


# --- the wire of plans and answers ------------------------------------------------------------------------------------

in_both_ways = pytest.mark.parametrize("is_on_one_node", [False, True])


def control_handle(split: Split, store: Store, *, is_on_one_node: bool) -> GroupHandle:
    return group_handles(
        split, backend="gloo", store=store.address, epoch=1, timeout_s=20, is_on_one_node=is_on_one_node
    )["control"]


@pytest.mark.parametrize("num_tokens", [1, FRAME // 4 - 10, FRAME // 4, 40_000])
@in_both_ways
def test_a_plan_of_any_length_reaches_all_ranks_and_all_cp_ranks_answer(
    store: Store, is_on_one_node: bool, num_tokens: int
) -> None:
    split = Split(tp=2, cp=2)
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, num_tokens).astype("<i4").tobytes()
    row = Row(0, 0, tokens, output_position=0)
    plans = [StepPlan(step, [row, row]) for step in (1, 2, 3)]
    handle = control_handle(split, store, is_on_one_node=is_on_one_node)

    def work(group: Group, member: int) -> Any:
        if member == DECIDER:
            answers = []
            for plan in plans:
                sent = broadcast_plan(plan, group)
                answers.append([answer.tolist() for answer in receive_results(plan, group, split=split)])
                sent()
            return answers
        received = []
        for _ in plans:
            received.append(receive_plan(group))
            at = split.coords(member)
            if at.tp == 0:
                # The sampled token of row 0 is on the cp rank that has its last token, that of row 1 on the next one.
                count = sum(1 for turn in range(2) if (at.cp - turn) % 2 == 0)
                send_result(received[-1], np.full((count, 1), 100 + member, np.int64), group)
        return received

    answers, *received = together(handle, work)
    assert [[plan.pack() for plan in mine] for mine in received] == [[plan.pack() for plan in plans]] * 4
    assert answers == [[[[100]], [[102]]]] * 3


@in_both_ways
def test_ranks_exchange_something_at_different_times_while_a_long_plan_arrives(
    store: Store, is_on_one_node: bool
) -> None:
    """As draft models do: rank 0 begins when no plan has come, the others when its first part has."""
    split = Split(tp=4)
    handle = control_handle(split, store, is_on_one_node=is_on_one_node)
    meeting = threading.Barrier(4, timeout=10)
    may_send, plan = threading.Event(), StepPlan(1, [Row(0, 0, bytes(3 * FRAME), output_position=0)])

    def work(group: Group, member: int) -> StepPlan | None:
        if member == DECIDER:
            may_send.wait(timeout=20)
            broadcast_plan(plan, group)()
            return None
        begins_s = time.monotonic() + (0.0 if member == 0 else 1.0)
        has_met = False

        def meet() -> None:
            nonlocal has_met
            may_send.set()
            meeting.wait()
            has_met = True

        def meanwhile() -> bool:
            if not has_met and time.monotonic() > begins_s:
                meet()
            return not has_met

        received = receive_plan(group, meanwhile=meanwhile)
        if not has_met:
            meet()
        return received

    assert [None if each is None else each.pack() for each in together(handle, work)] == [None] + 4 * [plan.pack()]


@in_both_ways
def test_an_answer_to_another_step_is_a_lost_rank(store: Store, is_on_one_node: bool) -> None:
    split = Split()
    handle = control_handle(split, store, is_on_one_node=is_on_one_node)

    def work(group: Group, member: int) -> None:
        if member == DECIDER:
            sent = broadcast_plan(StepPlan(8), group)
            with pytest.raises(RankLostError, match="rank 0 .* lost at step 8: it sent the result of step 7"):
                receive_results(StepPlan(8), group, split=split)
            sent()
            return
        receive_plan(group)
        send_result(StepPlan(7), np.empty((0, 1), np.int64), group)

    together(handle, work)


@in_both_ways
def test_plans_can_be_in_flight_while_the_last_stage_waits_for_its_answer_to_be_taken(
    store: Store, is_on_one_node: bool
) -> None:
    split = Split(pp=3)
    handle = control_handle(split, store, is_on_one_node=is_on_one_node)
    plans = [StepPlan(step) for step in range(1, 10)]

    def work(group: Group, member: int) -> list[int]:
        if member == DECIDER:
            sent = [broadcast_plan(plan, group) for plan in plans[:3]]
            for i, plan in enumerate(plans):
                receive_results(plan, group, split=split)
                sent[i]()
                sent += [broadcast_plan(later, group) for later in plans[i + 3 : i + 4]]
            return []
        steps = []
        for _ in plans:
            plan = receive_plan(group)
            steps.append(plan.step)
            if member == 2:
                send_result(plan, np.empty((0, 1), np.int64), group)
        return steps

    assert together(handle, work)[1:] == [list(range(1, 10))] * 3


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_ranks_of_a_gang_join_all_their_groups_in_one_process(store: Store) -> None:
    split = Split(tp=2, pp=2)
    handles = group_handles(split, backend="gloo", store=store.address, epoch=4, timeout_s=30)

    def member(rank: int) -> list[float]:
        if rank == DECIDER:
            build_group(handles["control"], member=DECIDER, epoch=4, host=HOST, device=CPU).close()
            return []
        ctx = ParallelContext.join(split, rank=rank, host=HOST, device=CPU, handles=handles, epoch=4)
        at = ctx.coords
        assert at == split.coords(rank)
        assert (ctx.tp.rank, ctx.pp.rank, ctx.cp.rank) == (at.tp, at.pp, at.cp)
        assert (ctx.is_first_stage, ctx.is_last_stage) == (at.pp == 0, at.pp == 1)
        sums = [group.all_reduce(torch.tensor([float(rank)])).item() for group in (ctx.tp, ctx.pp, ctx.cp)]
        ctx.close()
        return sums

    with ThreadPoolExecutor(5) as pool:
        _, *found = pool.map(member, range(-1, 4))
    for rank, sums in enumerate(found):
        members = [split.axis_members(axis, rank) for axis in ("tp", "pp", "cp")]
        assert sums == [*map(sum, members)]


def test_a_single_rank_is_first_and_last_stage() -> None:
    ctx = ParallelContext.single(CPU)
    assert ctx.coords == Coords(pp=0, cp=0, tp=0)
    assert ctx.is_first_stage and ctx.is_last_stage
    ctx.close()


def test_nothing_is_left_in_the_default_group_of_torch() -> None:
    code = (
        "import torch.distributed as dist; from raycache.parallel import context;"
        "context.Store('127.0.0.1'); assert not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@in_both_ways
def test_a_rank_that_takes_no_plan_does_not_keep_later_ones_from_the_others(store: Store, is_on_one_node: bool) -> None:
    handle = replace(control_handle(Split(tp=2), store, is_on_one_node=is_on_one_node), timeout_s=10)
    has_all = threading.Event()

    def work(group: Group, rank: int) -> list[int]:
        numbers = list(range(12))
        if rank == DECIDER:
            for sent in [group.ibroadcast(torch.tensor([number]), root=0) for number in numbers]:
                sent()
            return numbers
        if rank == 1:
            assert has_all.wait(30)
        found = [int(group.broadcast(torch.zeros(1, dtype=torch.int64), root=0)) for _ in numbers]
        has_all.set()
        return found

    assert together(handle, work) == [list(range(12))] * 3
