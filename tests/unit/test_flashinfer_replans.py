"""Plans of CUDA graphs, with a planning function and a wrapper of the test's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycache.attention.flashinfer_replans import Planner, Replans, Shortcut, StaticRows
from raycache.attention.flashinfer_tables import Table, starts_of

ROWS, PAGE_LEN, MAX_PAGES = 3, 4, 8
CPU = torch.device("cpu")


def table_of(lens: Sequence[int]) -> Table:
    pages = starts_of([-(-length // PAGE_LEN) for length in lens])
    ids = np.random.default_rng(sum(lens)).permutation(100)[: pages[-1]].astype(np.int32)
    queries = np.arange(ROWS + 1, dtype=np.int32)
    return Table(slice(0, ROWS), queries, pages, ids, np.array(lens, np.int32), PAGE_LEN)


class Wrapper:
    """Copies column by column, and plans what is as long as the rows are: 10 times each row's keys."""

    def __init__(self, replans: Replans, *, is_copied: bool) -> None:
        self.table, self.is_copied = replans.table, is_copied
        self.buffers = (
            torch.zeros(1),
            torch.full((64,), 9, dtype=torch.uint8),
            torch.full((64,), 8, dtype=torch.uint8),
        )
        self.num_plans = self.num_calls = 0

    def plan(self, table: Table) -> list[int]:
        self.num_plans += 1
        for buffer, numbers in (
            (self.table.queries, table.queries),
            (self.table.indptr, table.indptr),
            (self.table.last, table.last),
            (self.table.ids[: len(table.ids)], table.ids),
        ):
            buffer.copy_(torch.from_numpy(numbers))
        found = self.function(*self.buffers, *map(torch.from_numpy, (table.queries, table.indptr, table.lens)), 10)
        if self.is_copied:
            return found
        self.buffers[1][: found[1]] = self.buffers[2][: found[1]]
        return list(found[0])

    def function(
        self, _: Tensor, on_device: Tensor, pinned: Tensor, queries: Tensor, indptr: Tensor, lens: Tensor, factor: int
    ) -> Any:
        self.num_calls += 1
        planned = torch.cat([lens * factor, indptr]).view(torch.uint8)
        # The rest is not written, as in FlashInfer's plans.
        pinned[8 : 8 + len(planned)] = planned
        info, num_bytes = [len(queries), 8], 8 + len(planned)
        if not self.is_copied:
            return info, num_bytes
        on_device[:num_bytes] = pinned[:num_bytes]
        return info

    def planner(self) -> Planner:
        return Planner(self.function, self.buffers, [10], self.is_copied)


class Kernel:
    """Replans of a wrapper; `planner` replaces its own."""

    def __init__(
        self, shortcut: Shortcut, *, is_copied: bool = True, planner: Callable[[Wrapper], Planner] = Wrapper.planner
    ) -> None:
        self.replans = Replans(StaticRows(ROWS, MAX_PAGES), CPU, shortcut)
        self.wrapper, self._planner = Wrapper(self.replans, is_copied=is_copied), planner

    def plan(self, lens: Sequence[int]) -> None:
        table = table_of(lens)
        self.replans.plan(table, lambda: self.wrapper.plan(table), lambda: self._planner(self.wrapper))

    def holds(self, lens: Sequence[int]) -> bool:
        """Whether the device has the table and the plan of these rows."""
        table, found = table_of(lens), self.replans.table
        columns = (
            (found.queries, table.queries),
            (found.indptr, table.indptr),
            (found.last, table.last),
            (found.ids[: len(table.ids)], table.ids),
        )
        planned = np.concatenate([table.lens * 10, table.indptr]).astype(np.int32).tobytes()
        plan = self.wrapper.buffers[1][8 : 8 + len(planned)].numpy().tobytes()
        return plan == planned and all(np.array_equal(one.numpy(), other) for one, other in columns)


GROWING = [[1, 1, 1], [3, 7, 30], [4, 8, 31], [5, 9, 32], [1, 32, 2]]
"""Over page borders, and back."""


@pytest.mark.parametrize("is_copied", [True, False])
def test_the_third_plan_and_all_further_ones_are_made_without_the_wrapper(*, is_copied: bool) -> None:
    kernel = Kernel(Shortcut(), is_copied=is_copied)
    for number, lens in enumerate(GROWING, 1):
        kernel.plan(lens)
        assert kernel.holds(lens)
        assert kernel.wrapper.num_plans == min(number, 2)
        assert kernel.replans.is_direct == (number > 1)


def other_sizes(wrapper: Wrapper) -> Planner:
    return Planner(wrapper.function, wrapper.buffers, [11], wrapper.is_copied)


def more_sizes(wrapper: Wrapper) -> Planner:
    return Planner(wrapper.function, wrapper.buffers, [10, 0], wrapper.is_copied)


def other_info(wrapper: Wrapper) -> Planner:
    def function(*args: Any) -> list[int]:
        return [*wrapper.function(*args), 1]

    return Planner(function, wrapper.buffers, [10], is_copied=True)


def nothing_written(wrapper: Wrapper) -> Planner:
    return Planner(lambda *_: [ROWS + 1, 8], wrapper.buffers, [10], is_copied=True)


def missing(wrapper: Wrapper) -> Planner:
    return Planner(wrapper.no_such_function, wrapper.buffers, [10], is_copied=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("planner", [other_sizes, more_sizes, other_info, nothing_written, missing])
def test_the_wrapper_makes_all_plans_if_a_direct_one_is_not_the_same(
    planner: Callable[[Wrapper], Planner], caplog: pytest.LogCaptureFixture
) -> None:
    shortcut = Shortcut()
    kernels = [Kernel(shortcut, planner=planner) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        for lens in GROWING:
            for kernel in kernels:
                kernel.plan(lens)
                assert kernel.holds(lens)
                assert not kernel.replans.is_direct
    assert [record.message for record in caplog.records if "FlashInfer's wrappers make all plans" in record.message]
    assert len(caplog.records) == 1
    assert kernels[1].wrapper.num_plans == len(GROWING)


def test_a_kernel_that_cannot_be_planned_directly_stops_the_others() -> None:
    shortcut = Shortcut()
    one, other = Kernel(shortcut), Kernel(shortcut, planner=other_sizes)
    for lens in GROWING[:3]:
        one.plan(lens)
    other.plan(GROWING[0])
    assert one.replans.is_direct
    other.plan(GROWING[1])
    one.plan(GROWING[4])
    assert not one.replans.is_direct
    assert one.holds(GROWING[4])
