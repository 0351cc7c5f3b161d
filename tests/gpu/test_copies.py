"""Exchanges by copy engines on two GPUs: of any sizes, without a peer, and beside attention, against NCCL's way."""

from __future__ import annotations

import itertools
import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raycache.memory.component import FULL, kv
from raycache.parallel.context import ParallelContext
from raycache.parallel.copy_exchange import CopyExchange
from raycache.parallel.peer_group import PeerGroup
from tests.gpu import peer_ranks
from tests.gpu.peer_ranks import Work, num_ranks
from tests.oracle.attention import Batch, Case, Seat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs"),
]

MAX_TOKENS = 8192
HEADS, KEY_HEADS, DIM = 32, 8, 128
STEPS = {
    "chunk": [(40_960, 8192)],
    "chunks": [(9000, 1500), (300, 2100), (20_000, 77), (5000, 900)],
    "chunk beside decodes": [(700, 1), (30_000, 4000), (1100, 1), (64, 1), (2000, 33)],
    "new prompt beside": [(0, 1500), (30_001, 3001)],
    "again": [(40_960, 5003)],
}
"""(cached, new tokens) of each row."""
ERROR = 0.004
"""Of results merged in another order, in bfloat16."""


def each_rank(work: Work, *, timeout_s: float = 60.0) -> list[Any]:
    """What a function of this module returns on every rank, see `peer_ranks`."""
    return peer_ranks.each_rank(partial(in_group, work), timeout_s=timeout_s, cp=num_ranks())


def in_group(work: Work, ctx: ParallelContext) -> Any:
    assert isinstance(ctx.cp, PeerGroup), "see the warnings in the log"
    with torch.inference_mode():
        return work(ctx)


def copies_of(ctx: ParallelContext, area_bytes: int) -> CopyExchange:
    copies = ctx.cp.copies(area_bytes)
    assert copies is not None, "see the warnings in the log"
    return copies


def messages_of_random_sizes(ctx: ParallelContext) -> int:
    """How many were wrong; the areas become larger in between."""
    wrong, chosen = torch.zeros((), dtype=torch.int64, device=ctx.device), random.Random(3)
    for area_bytes in (1 << 20, 40 << 20):
        copies = copies_of(ctx, area_bytes)
        for number in range(100):
            # Of every pair of members, drawn in the same order on all.
            sizes = {
                (one, other): chosen.choice([0, 1, 1000, area_bytes // 8])
                for one in range(ctx.cp.size)
                for other in range(ctx.cp.size)
            }
            for to in copies.others:
                copies.send(to, message(ctx.cp.rank, to, number, sizes, ctx.device))
            copies.receive()
            for sender in copies.others:
                wanted = message(sender, ctx.cp.rank, number, sizes, ctx.device)
                (found,) = copies.received(sender, (tuple(wanted.shape), wanted.dtype))
                wrong += (found != wanted).any()
    return int(wrong)


def message(sender: int, to: int, number: int, sizes: dict[tuple[int, int], int], device: torch.device) -> Tensor:
    return torch.arange(sizes[sender, to], device=device) * (1 + sender) + 10 * number + to


def seconds_until_a_missing_peer_is_given_up(ctx: ParallelContext) -> float:
    """Rank 0 waits for the others, which send nothing, and leaves."""
    copies = copies_of(ctx, 1 << 20)
    if ctx.cp.rank:
        return 0.0
    for to in copies.others:
        copies.send(to, torch.ones(8, device=ctx.device))
    copies.receive()
    stream, begin_s = torch.cuda.current_stream(ctx.device), time.monotonic()
    time.sleep(1)
    assert not stream.query()
    ctx.cp.close()
    stream.synchronize()
    return time.monotonic() - begin_s


class Rounds:
    """Several layers of each step, one after the other, on this rank."""

    def __init__(self, ctx: ParallelContext) -> None:
        from raycache.attention.flashinfer import FlashInferBackend

        self._ctx = ctx
        self._backend = FlashInferBackend(ctx.device, max_pages=1024, max_tokens=MAX_TOKENS)

    def results(self, name: str, *, num_layers: int = 4) -> list[Tensor]:
        """Of each layer, [T_local, H, D]; and of the keys that were written."""
        case = Case(
            STEPS[name], cp=self._ctx.cp.size, share=64 // self._ctx.cp.size, dtype=torch.bfloat16, device="cuda"
        )
        component = kv("kv", (0,), heads=KEY_HEADS, dim=DIM, fmt=case.fmt)
        seat = Seat(Batch(case), self._ctx, [component])
        view, found = seat.pool.kv(0), []
        step = self._backend.plan(seat.inputs)
        generator = torch.Generator(self._ctx.device).manual_seed(7)
        seeded = torch.Generator(self._ctx.device).manual_seed(9 + self._ctx.cp.rank)
        for layer in range(num_layers):
            for pages in (view.k, view.v):
                pages.copy_(torch.randn(pages.shape, device=self._ctx.device, generator=generator))
            shape = len(seat.inputs.ids), HEADS + 2 * KEY_HEADS, DIM
            qkv = torch.randn(shape, device=self._ctx.device, generator=seeded).bfloat16() * (1 + 0.2 * layer)
            q, k, v = qkv.split([HEADS, KEY_HEADS, KEY_HEADS], 1)
            found.append(step.attend(view, q, k, v, scale=DIM**-0.5, sinks=None))
        slots = seat.inputs.places[FULL].slots
        return [*found, view.k.flatten(0, 1)[slots].clone()]


def largest_differences(ctx: ParallelContext) -> dict[str, float]:
    """Between copy engines and NCCL, of all layers of each step, relative; each way runs all steps in a row."""
    rounds, copies, send = Rounds(ctx), PeerGroup.copies, CopyExchange.send
    sent = []

    def sending(exchange: CopyExchange, *what: Any) -> None:
        sent.append(what)
        send(exchange, *what)

    CopyExchange.send = sending  # type: ignore[method-assign]
    by_copies = {}
    for _, name in itertools.product(range(2), STEPS):
        sent.clear()
        by_copies[name] = rounds.results(name)
        assert sent, "all by NCCL; see the warnings in the log"
    sent.clear()
    PeerGroup.copies = lambda self, area_bytes: None  # type: ignore[method-assign]
    by_nccl = {name: rounds.results(name) for name in STEPS}
    assert not sent
    PeerGroup.copies = copies  # type: ignore[method-assign]
    return {
        name: max(
            float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-9))
            for one, other in zip(by_copies[name], by_nccl[name], strict=True)
        )
        for name in STEPS
    }


def test_messages_of_all_sizes_arrive_whole() -> None:
    assert each_rank(messages_of_random_sizes) == [0] * num_ranks()


def test_a_rank_that_leaves_does_not_wait_for_a_missing_peer() -> None:
    assert each_rank(seconds_until_a_missing_peer_is_given_up)[0] < 10


def test_attention_beside_copies_is_that_beside_nccl() -> None:
    for found in each_rank(largest_differences):
        print(found)
        assert all(difference < ERROR for difference in found.values()), found
