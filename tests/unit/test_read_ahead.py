"""Boxes of tensors read out of files in parts: against numpy's slices of the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycache.checkpoint import file_reads, read_ahead
from raycache.checkpoint.file_reads import OpenFile, parts_of
from raycache.checkpoint.read_ahead import Read, ReadAhead
from raycache.errors import CheckpointError

CPU = torch.device("cpu")


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[range, ...]]:
    """A shape and a run of each of its dimensions, some of them whole, some empty."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append(draw(st.sampled_from([range(size), range(start, draw(st.integers(start, size)))])))
    return shape, tuple(box)


@given(boxes(), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 2, 8]), st.integers(0, 5))
def test_parts_of_a_box_are_its_numbers_in_their_order(
    case: tuple[tuple[int, ...], tuple[range, ...]], part_bytes: int, long_run: int, itemsize: int, offset: int
) -> None:
    shape, box = case
    numbers = np.arange(offset + math.prod(shape) * itemsize) % 251
    wanted = numbers[offset:].reshape(*shape, itemsize)[tuple(slice(run.start, run.stop) for run in box)].ravel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_reads, "PART_BYTES", max(part_bytes, itemsize))
        patch.setattr(file_reads, "_LONG_RUN", long_run)
        found, done = np.full(len(wanted), -1), 0
        for part in parts_of(shape, box, itemsize=itemsize, offset=offset):
            assert part.target == done, "parts follow one another"
            assert part.num_runs == 1 or part.span <= file_reads.PART_BYTES
            for run in range(part.num_runs):
                begin = part.offset + run * part.stride
                found[done : done + part.run_bytes] = numbers[begin : begin + part.run_bytes]
                done += part.run_bytes
    assert (found == wanted).all() and done == len(wanted)


@pytest.fixture
def reads(tmp_path: Path) -> list[tuple[Read, torch.Tensor]]:
    """Reads of one file, and what they give: whole tensors, rows, columns, and both."""
    tensor = torch.randn(6, 40, 50, dtype=torch.float64).to(torch.bfloat16)
    (tmp_path / "numbers").write_bytes(b"head" + tensor.view(torch.uint8).numpy().tobytes())
    file = OpenFile(tmp_path / "numbers")
    boxes = [
        (range(6), range(40), range(50)),
        (range(2, 5), range(40), range(50)),
        (range(6), range(10, 30), range(50)),
        (range(6), range(40), range(25, 50)),
        (range(1, 2), range(3, 9), range(7, 8)),
    ]
    return [
        (Read(file, 4, torch.bfloat16, (6, 40, 50), box), tensor[tuple(slice(run.start, run.stop) for run in box)])
        for box in boxes
    ]


@pytest.mark.parametrize("ahead_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_what_is_read_ahead_is_what_is_in_the_file(
    reads: list[tuple[Read, torch.Tensor]], ahead_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", ahead_bytes)
    monkeypatch.setattr(file_reads, "PART_BYTES", 4096)
    told: list[tuple[int, int]] = []
    plan = [read for read, _ in reads * 3]
    with ReadAhead(
        plan, device=CPU, num_threads=num_threads, on_bytes=lambda done, total: told.append((done, total))
    ) as ahead:
        for read, wanted in reads * 3:
            found = ahead.take(read)
            assert torch.equal(found, wanted) and found.is_contiguous()
            assert found.untyped_storage().nbytes() == read.num_bytes, "the caller's own"
    total = sum(read.num_bytes for read in plan)
    assert [done for done, _ in told] == np.cumsum([read.num_bytes for read in plan]).tolist()
    assert {all_bytes for _, all_bytes in told} == {total}


def test_reads_may_be_asked_for_in_another_order_and_others_are_done_at_once(
    reads: list[tuple[Read, torch.Tensor]],
) -> None:
    _, (second, rows), (third, wanted), (fourth, columns), (fifth, part) = reads
    told: list[int] = []
    with ReadAhead(
        [second, third, fifth], device=CPU, num_threads=2, on_bytes=lambda done, total: told.append(done)
    ) as ahead:
        assert torch.equal(ahead.take(fourth), columns)
        assert told == []
        for read, numbers in ((third, wanted), (second, rows), (fifth, part)):
            assert torch.equal(ahead.take(read), numbers)
            assert read not in [one.read for one in ahead._begun]
    assert told[-1] == sum(read.num_bytes for read in (second, third, fifth))


def test_reads_that_nobody_asks_for_are_dropped_for_those_behind_them(
    reads: list[tuple[Read, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (second, rows), (third, _), (fourth, columns), (fifth, part) = reads
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", third.num_bytes)
    plan = [third, second, fourth, fifth]
    with ReadAhead(plan, device=CPU, num_threads=2, on_bytes=lambda done, total: None) as ahead:
        assert torch.equal(ahead.take(fourth), columns)
        assert torch.equal(ahead.take(second), rows), "too late, and right"
        assert torch.equal(ahead.take(fifth), part)
        assert not ahead._begun and not ahead._waiting


def test_a_read_of_no_rows_leaves_the_plan_alone(
    reads: list[tuple[Read, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (second, rows), (third, columns) = reads[:3]
    read_now = Read.now

    def only_empty(read: Read) -> torch.Tensor:
        assert not read.num_bytes, "it was planned"
        return read_now(read)

    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", second.num_bytes)
    with ReadAhead([second, third], device=CPU, num_threads=2, on_bytes=lambda done, total: None) as ahead:
        monkeypatch.setattr(Read, "now", only_empty)
        assert ahead.take(replace(third, box=(range(0), *third.box[1:]))).shape == (0, 20, 50)
        assert torch.equal(ahead.take(second), rows)
        assert torch.equal(ahead.take(third), columns)


def test_a_planned_box_is_handed_out_in_parts(reads: list[tuple[Read, torch.Tensor]]) -> None:
    read, wanted = reads[3]
    with ReadAhead([read], device=CPU, num_threads=2, on_bytes=lambda done, total: None) as ahead:
        for run in (range(0, 2), range(2, 3), range(3, 5)):
            part = replace(read, box=(run, *read.box[1:]))
            assert torch.equal(ahead.take(part), wanted[run.start : run.stop])
        for rows in (range(0, 7), range(7, 40)):
            assert [one.read for one in ahead._begun] == [read]
            part = replace(read, box=(range(5, 6), rows, read.box[2]))
            assert torch.equal(ahead.take(part), wanted[5:6, rows.start : rows.stop])
        assert not ahead._begun, "its last numbers were asked for"


def test_no_more_is_read_than_may_be_ahead(
    reads: list[tuple[Read, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, _ = reads[0]
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 3 * read.num_bytes)
    with ReadAhead([read] * 20, device=CPU, num_threads=2, on_bytes=lambda done, total: None) as ahead:
        for left in reversed(range(20)):
            ahead.take(read)
            assert len(ahead._begun) == min(3, left)


def test_a_file_that_is_cut_short_meanwhile_is_named(reads: list[tuple[Read, torch.Tensor]], tmp_path: Path) -> None:
    with (tmp_path / "numbers").open("r+b") as file:
        file.truncate(3000)
    read, _ = reads[0]
    with (
        ReadAhead([read], device=CPU, num_threads=2, on_bytes=lambda done, total: None) as ahead,
        pytest.raises(CheckpointError, match=r"numbers cannot be read \(it ends too early\); was it changed"),
    ):
        ahead.take(read)
    with pytest.raises(CheckpointError, match="missing cannot be read .*No such file"):
        OpenFile(tmp_path / "missing")
