"""Exchanges by copy engines, with threads for engines: nothing is overwritten or read too early; attention beside."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention import flashinfer_copied
from raycache.attention.base import AttentionStep, Capabilities
from raycache.attention.flashinfer_full import Layers
from raycache.attention.flashinfer_kernels import Heads
from raycache.attention.flashinfer_passed import PassedKernels
from raycache.attention.flashinfer_tables import Table
from raycache.attention.layout import StepLayout
from raycache.attention.merge import attend_masked
from raycache.attention.passing import Passing
from raycache.attention.torch_ref import TorchBackend
from raycache.memory.views import KVView
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.copy_exchange import CopyExchange, memory_bytes, sent_bytes
from raycache.step.inputs import StepInputs
from tests.oracle.attention import MIXED, Case, on_ranks
from tests.oracle.copies import CopyingGroup, SlowCopyStream
from tests.unit import test_attention as full
from tests.unit import test_passing as passing

# --- exchanges --------------------------------------------------------------------------------------------------------


def message(sender: int, to: int, number: int) -> tuple[Tensor, Tensor]:
    """What a member sends in an exchange; senders differ in length, and so do exchanges."""
    length = (7 * sender + 5 * number) % 40
    return torch.full((length, 3), 100.0 * number + 10 * sender + to).bfloat16(), torch.arange(length) + number


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_member_receives_what_the_others_sent_in_each_exchange(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.oracle.attention.ThreadGroup", CopyingGroup)

    def work(ctx: ParallelContext) -> None:
        rank = ctx.cp.rank
        copies = ctx.cp.copies(sent_bytes(40 * 6, 40 * 8))
        assert copies is not None and sorted([rank, *copies.others]) == list(range(size))
        for number in range(60):
            for to in copies.others:
                copies.send(to, *message(rank, to, number))
            copies.receive()
            for sender in copies.others:
                wanted = message(sender, rank, number)
                found = copies.received(sender, *((tuple(part.shape), part.dtype) for part in wanted))
                assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))

    on_ranks(size, work)


def test_parts_of_one_shape_are_received_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.oracle.attention.ThreadGroup", CopyingGroup)

    def work(ctx: ParallelContext) -> None:
        copies = ctx.cp.copies(1000)
        assert copies is not None
        for to in copies.others:
            copies.send(to, torch.full((2, 4), float(ctx.cp.rank)), torch.tensor([ctx.cp.rank]))
        copies.receive()
        numbers, ids = copies.received_of_all(((2, 4), torch.float32), ((1,), torch.int64))
        assert ids.flatten().tolist() == [rank for rank in range(3) if rank != ctx.cp.rank]
        assert torch.equal(numbers[:, 1, 2].long(), ids.flatten())

    on_ranks(3, work)


def test_a_member_that_leaves_does_not_wait_for_the_others() -> None:
    memories = [torch.zeros(memory_bytes(64, size=2), dtype=torch.uint8) for _ in range(2)]
    copies = CopyExchange(0, memories, SlowCopyStream(seed=0))
    copies.send(1, torch.ones(4))
    waiting = threading.Thread(target=copies.receive, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    copies.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_group_without_peer_memory_has_no_copies() -> None:
    assert Group().copies(1000) is None


# --- attention --------------------------------------------------------------------------------------------------------


class DenseKernel:
    """A kernel of pages in plain torch."""

    def plan(self, table: Table, heads: Heads, *, is_causal: bool, window: int) -> None:
        self._table, self._heads, self._is_causal = table, heads, is_causal
        assert not window and (np.diff(table.queries) > 0).all() and (table.lens > 0).all()

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, lse_base: str | None) -> tuple[Tensor, Tensor | None]:
        table, outs, lses = self._table, [], []
        assert len(q) == table.queries[-1]
        for row, count in enumerate(table.lens.tolist()):
            mine = q[table.queries[row] : table.queries[row + 1]]
            ids = torch.from_numpy(table.ids[table.indptr[row] : table.indptr[row + 1]]).long()
            keys, values = (x[ids].flatten(0, 1)[:count] for x in (k, v))
            mask = torch.ones(len(mine), count, dtype=torch.bool)
            mask = mask.tril(count - len(mine)) if self._is_causal else mask
            out, lse = attend_masked(mine, keys, values, mask, scale=self._heads.scale)
            outs.append(out), lses.append(lse)
        return torch.cat(outs), torch.cat(lses) / np.log(2)


class DenseKernels:
    """A cache of such kernels."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._kernels: dict[Any, DenseKernel] = {}
        self.lib = SimpleNamespace(append_paged_kv_cache=write_rows)

    def paged(self, key: Any, heads: Heads, *, is_few: bool) -> DenseKernel:
        return self._kernels.setdefault((key, is_few), DenseKernel())

    def tokens(self, tokens: Any) -> Any:
        return tokens


def write_rows(k: Tensor, v: Tensor, rows: Any, zeros: Any, pages: Sequence[Tensor], slots: Tensor, *_: Any) -> None:
    for to, new in zip(pages, (k, v), strict=True):
        to[slots.long(), 0] = new


class PassedStep:
    """Attention of a step with chunks; several layers in a row, all but the last with other queries."""

    def __init__(self, kernels: Any, inputs: StepInputs, *, num_layers: int) -> None:
        self._kernels, self._inputs, self._num_layers = kernels, inputs, num_layers

    def attend(self, view: KVView, q: Tensor, k: Tensor, v: Tensor, *, scale: float, sinks: Tensor | None) -> Tensor:
        layers = Layers(view.space, 0, Heads(q.shape[1], k.shape[1], q.shape[2], q.shape[2], q.dtype, scale))
        layout = StepLayout(self._inputs)
        way = Passing(layout, view.space, layers.moved)
        copies = flashinfer_copied.copies_of(layers, self._inputs.ctx.cp, max_tokens=1000)
        if not flashinfer_copied.takes(layers, way, max_tokens=1000):
            copies = None
        kernels = PassedKernels(self._kernels, layers, layout, way, copies)
        before = view.k.clone(), view.v.clone()
        for layer in range(self._num_layers):
            view.k.copy_(before[0]), view.v.copy_(before[1])
            out = kernels.attend(view, q * (self._num_layers - layer), k, v, sinks)
        return out


class PassedBackend(TorchBackend):
    """A backend of such steps."""

    capabilities = Capabilities("dense", frozenset({"cpu"}), frozenset({"float64"}), can_capture=False)

    def plan(self, inputs: StepInputs) -> AttentionStep:
        step: Any = PassedStep(DenseKernels(), inputs, num_layers=3)
        return step


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[CopyingGroup]:
    """Members that were made; their exchanges have no least size."""
    found: list[CopyingGroup] = []

    def make(**how: Any) -> CopyingGroup:
        found.append(CopyingGroup(**how))
        return found[-1]

    monkeypatch.setattr("tests.oracle.attention.ThreadGroup", make)
    monkeypatch.setattr(flashinfer_copied, "LEAST_BYTES", 1)
    return found


ROWS = {
    "chunk": [(64, 40)],
    "chunks": [(33, 50), (64, 7), (16, 2)],
    "mixed": [*MIXED, (13, 70), (33, 2), (16, 8)],
    "long": [(40, 300)],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", ["queries", "both"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_attention_beside_exchanges_equals_dense_attention(
    monkeypatch: pytest.MonkeyPatch, groups: list[CopyingGroup], cp: int, has_sinks: bool, way: str, rows: str
) -> None:
    passing.choose(monkeypatch, way)
    case = Case(ROWS[rows], cp=cp, share=8, dtype=torch.float64)
    full.check(PassedBackend(), case, full.Heads(has_sinks=has_sinks))
    asks = way == "queries" or any(count % 2 or count == 1 for _, count in ROWS[rows])
    assert all(bool(group.stream.num_copied) == asks for group in groups)


def test_short_steps_are_left_to_the_group(groups: list[CopyingGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    passing.choose(monkeypatch, "queries")
    # Of 1000 tokens in a step each rank has at most 564, and here 20, of 6 heads of 8 features.
    monkeypatch.setattr(flashinfer_copied, "LEAST_BYTES", 21 * 6 * 8 * 8)
    full.check(PassedBackend(), Case([(64, 40)], cp=2, share=8, dtype=torch.float64), full.Heads())
    assert not any(group.stream.num_copied for group in groups)
