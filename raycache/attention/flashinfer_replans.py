"""Plans of CUDA graphs, made without FlashInfer's wrappers.

A wrapper's `plan` checks its arguments in Python, copies them to the device one by one, and calls the planning function
of its kernel, which takes a tenth of the time or less. For a CUDA graph only the numbers of the table change, so most
plans copy the table at once and call that function with the wrapper's buffers:

    plan      made by
    first     the wrapper, before the graph is recorded
    second    the wrapper and directly; if they differ, the wrapper makes all further plans
    others    directly
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raycache.attention.flashinfer_tables import Table
from raycache.attention.key_parts import Division
from raycache.memory.streams import PinnedUse, after_compute
from raycache.parallel.uploads import keep, upload

_log = logging.getLogger(__name__)

_OF_TABLE = ("queries", "indptr", "last", "lens", "begins")


@dataclass(frozen=True, slots=True)
class StaticRows:
    """Size of a table of rows of one query each.

    Attributes:
        max_pages: per row, on average.
    """

    num_rows: int
    max_pages: int

    @classmethod
    def of(cls, num_rows: int, num_pages: int) -> StaticRows:
        """For rows that have so many pages together."""
        return cls(num_rows, -(-num_pages // max(num_rows, 1)))


@dataclass(slots=True)
class Shortcut:
    """Whether the kernels of a rank are planned directly."""

    is_open: bool = True

    def close(self, reason: str) -> None:
        """Leave all further plans to the wrappers."""
        if self.is_open:
            self.is_open = False
            _log.warning(
                "attention: FlashInfer's wrappers make all plans of CUDA graphs, which takes up to a millisecond per "
                "step: %s",
                reason,
            )


class StaticTable:
    """A table at fixed addresses, on the device and in pinned memory.

        [ queries n + 1 ][ indptr n + 1 ][ last n ][ lens n ][ begins n ][ firsts ][ parts ][ ids ... ]

    Args:
        division: of the keys into parts; None for no parts.

    Attributes:
        queries, indptr, last, lens, begins, ids: int32, on the device; see `Table`.
        firsts, parts: int32, on the device; see `Division.parts`. Empty without a division.
        at_host: all but ids in pinned memory, by name.
    """

    def __init__(self, static: StaticRows, device: torch.device, division: Division | None = None) -> None:
        rows, self._division = static.num_rows, division
        lengths = dict(zip(_OF_TABLE, (rows + 1, rows + 1, rows, rows, rows), strict=True))
        lengths |= {"firsts": 0, "parts": 0} if division is None else {"firsts": rows + 1, "parts": division.most}
        # Each begins at a multiple of 16 bytes, as FlashInfer's own do.
        room = [-(-length // 4) * 4 for length in lengths.values()]
        self._num_counts = sum(room)
        sizes = [*room, rows * static.max_pages]
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._filling = PinnedUse(device)
        *counts, self.ids = self._device.split(sizes)
        self.queries, self.indptr, self.last, self.lens, self.begins, self.firsts, self.parts = (
            part[:length] for part, length in zip(counts, lengths.values(), strict=True)
        )
        at_host = zip(lengths.items(), self._host.split(sizes), strict=False)
        self.at_host = {name: part[:length] for (name, length), part in at_host}
        self._columns = {name: part.numpy() for name, part in self.at_host.items()}
        self._ids = self._host[self._num_counts :].numpy()

    def fill(self, table: Table) -> None:
        """Copy a table to the device."""
        with self._filling:
            for name in _OF_TABLE:
                found = getattr(table, name)
                self._columns[name][:] = 0 if found is None else found
            if self._division is not None:
                divided = self._division.parts(table.lens, table.begins)
                self._columns["firsts"][:], self._columns["parts"][:] = divided
            self._ids[: len(table.ids)] = table.ids
            upload(self._host[: self._num_counts + len(table.ids)], self.used(table))

    def keep(self) -> None:
        """Keep the pinned memory until it is copied, even if this table is not: it is not filled again."""
        keep(self._host, self._device.device)

    def used(self, table: Table) -> Tensor:
        """The part of the device's buffer that a table fills."""
        return self._device[: self._num_counts + len(table.ids)]


@dataclass(frozen=True, slots=True)
class Planner:
    """The planning function of a kernel, and the arguments that stay the same for a CUDA graph.

    Attributes:
        function: called with the buffers, the table's queries, indptr and lens at the host, and the sizes.
        buffers: for intermediate results; for the plan, on the device and in pinned memory.
        sizes: further arguments.
        is_copied: whether the function copies the plan to the device. If not, it also returns the number of bytes.
    """

    function: Callable[..., Any]
    buffers: tuple[Tensor, Tensor, Tensor]
    sizes: Sequence[int | bool]
    is_copied: bool

    def plan(self, table: StaticTable) -> list[int]:
        """Plan for a table at the host; gives what a run needs to know, which is the same for all tables."""
        at_host = table.at_host
        found = self.function(*self.buffers, at_host["queries"], at_host["indptr"], at_host["lens"], *self.sizes)
        if self.is_copied:
            return list(found)
        info, num_bytes = found
        _, on_device, pinned = self.buffers
        upload(pinned[:num_bytes], on_device[:num_bytes])
        return list(info)


class Replans:
    """All plans of one kernel of a CUDA graph.

    Attributes:
        table: holds the buffers that the wrapper is made with.
    """

    def __init__(self, static: StaticRows, device: torch.device, shortcut: Shortcut) -> None:
        self.table = StaticTable(static, device)
        self._shortcut = shortcut
        self._planner: Planner | None = None
        self._num_plans = 0

    @property
    def is_direct(self) -> bool:
        """Whether further plans are made directly."""
        return self._planner is not None and self._shortcut.is_open

    def plan(self, table: Table, by_wrapper: Callable[[], Sequence[int]], planner: Callable[[], Planner]) -> None:
        """Plan a replay.

        Args:
            by_wrapper: plans with the wrapper; gives what a run needs to know.
            planner: finds the function in the wrapper, which has been planned.
        """
        self._num_plans += 1
        if self._planner is not None and self._shortcut.is_open:
            self.table.fill(table)
            self._planner.plan(self.table)
            return
        is_compared = self._num_plans == 2 and self._shortcut.is_open
        if is_compared:
            # So that the columns that the wrapper does not have are equal.
            self.table.fill(table)
        info = by_wrapper()
        if not is_compared:
            return
        try:
            found = planner()
            difference = self._difference(found, table, list(info))
        except (AttributeError, TypeError, ValueError, RuntimeError) as cause:
            difference = f"{type(cause).__name__}: {cause}"
        if difference:
            self._shortcut.close(difference)
            by_wrapper()
        else:
            self._planner = found

    def _difference(self, planner: Planner, table: Table, info: list[int]) -> str:
        """How a direct plan differs from that of the wrapper, which has just been made; "" if they agree."""
        used, (_, on_device, pinned) = self.table.used(table), planner.buffers
        right_table, right_plan = used.clone(), on_device.clone()
        plans = []
        for byte in (0, 255):
            # The pinned memory may change only when it has been copied.
            after_compute(used.device).synchronize()
            for buffer in (used.view(torch.uint8), on_device, pinned):
                buffer.fill_(byte)
            self.table.fill(table)
            if planner.plan(self.table) != info:
                return "they plan with other buffers"
            plans.append(on_device.clone())
        if not torch.equal(used, right_table):
            return "they copy other tables"
        # Bytes that no plan has written are different.
        written = plans[0] == plans[1]
        if not written.any() or not torch.equal(plans[0][written], right_plan[written]):
            return "they make other plans"
        return ""
