"""Pinned memory is filled again only when its last copy to the device has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from raycache.attention.flashinfer_replans import StaticRows, StaticTable
from raycache.attention.key_parts import Division
from raycache.memory import streams
from raycache.rank.decode_batch import DecodeBatch
from tests.unit.test_decode_batch import plan_of, seat
from tests.unit.test_flashinfer_replans import MAX_PAGES, ROWS, table_of


@dataclass
class Device:
    """Events of a device that copies only when somebody waits for it.

    Attributes:
        host: the pinned memory.
        copied: its contents when somebody waited.
    """

    host: Callable[[], Tensor]
    copied: list[list[int]] = field(default_factory=list)

    def synchronize(self) -> None:
        self.copied.append(self.host().tolist())

    def wait(self) -> None:
        raise AssertionError("the host has to wait, not a stream")


def test_a_decode_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = DecodeBatch(8, *seat(1, 0))
    device = Device(lambda: batch._host)
    monkeypatch.setattr(streams, "after_compute", lambda _: device)
    contents = []
    for turn, starts in enumerate(([3, 20], [7], [1, 2, 30])):
        batch.fill(*plan_of(starts, seed=turn))
        contents.append(batch._host.tolist())
    assert device.copied == contents[:-1] and contents[0] != contents[1] != contents[2]


def test_a_table_at_fixed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    division = Division(ROWS + 4, 3, 8)
    table = StaticTable(StaticRows(ROWS, MAX_PAGES), torch.device("cpu"), division)
    device = Device(lambda: table._host)
    monkeypatch.setattr(streams, "after_compute", lambda _: device)
    contents = []
    for lens in ([3, 9, 1], [4, 9, 2], [20, 1, 7]):
        given = table_of(lens)
        table.fill(given)
        firsts, parts = division.parts(given.lens, given.begins)
        assert table.firsts.tolist() == firsts.tolist() and table.parts.tolist() == parts.tolist()
        assert table.lens.tolist() == lens and table.ids[: len(given.ids)].tolist() == given.ids.tolist()
        contents.append(table._host.tolist())
    assert device.copied == contents[:-1] and contents[0] != contents[1] != contents[2]
