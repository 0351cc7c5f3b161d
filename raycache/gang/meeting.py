"""Rendezvous of a gang's ranks and their decider, under Ray and in plain processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from raycache.config import Config
from raycache.gang.executors import GangExecutor
from raycache.parallel.board import AckBoard
from raycache.parallel.context import DECIDER, Store, build_group, group_handles
from raycache.parallel.relay import leaders, receive_boards
from raycache.rank.member import Invitation, RankSpec

T = TypeVar("T")


class Meeting:
    """The meeting point of one gang. Its decider keeps it as long as the ranks run: NCCL goes on asking the store.

    Args:
        config: settings, with stages chosen.
        device_type: "cpu" or "cuda".
        epoch: the gang's epoch.
        host: address of this process, reachable from the ranks.
        nodes: node of each rank.
        here: this process's node.
        plan_timeout_s: how long a rank waits for a plan.
    Attributes:
        board: progress board of this node's ranks.
        leaders: the lowest rank of each other node; each of those nodes needs its own board.
    """

    def __init__(
        self,
        config: Config,
        *,
        device_type: str,
        epoch: int,
        host: str,
        nodes: Sequence[Hashable],
        here: Hashable,
        plan_timeout_s: float,
    ) -> None:
        self._config, self._device_type, self._epoch, self._host = config, device_type, epoch, host
        self._nodes, self._plan_timeout_s = nodes, plan_timeout_s
        self.leaders = leaders(nodes, here=here)
        self._store = Store(host)
        self._handles = group_handles(
            config.split,
            backend="nccl" if device_type == "cuda" else "gloo",
            store=self._store.address,
            epoch=epoch,
            timeout_s=config.rank_timeout_s,
            leaders=self.leaders,
            is_on_one_node=all(node == here for node in nodes),
        )
        self.board = AckBoard.create(config.world_size)

    def invitations(self, specs: Sequence[RankSpec], boards: Mapping[Any, Path]) -> list[Invitation]:
        """Make one invitation per rank.

        Args:
            specs: where each rank runs.
            boards: node -> address of its board.
        """
        control = replace(self._handles["control"], timeout_s=self._plan_timeout_s)
        handles = {**self._handles, "control": control}
        return [
            Invitation(self._config, spec, handles, self._epoch, boards[node])
            for spec, node in zip(specs, self._nodes, strict=True)
        ]

    def join(self, wait_for_ranks: Callable[[], T]) -> tuple[GangExecutor, T]:
        """Join the decider's groups while the ranks join theirs.

        Args:
            wait_for_ranks: returns when all ranks have joined; an exception from it aborts the rendezvous.
        Returns:
            The executor's connection to the ranks, and the result of `wait_for_ranks`.
        """
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self._join)
            try:
                answers = wait_for_ranks()
            except BaseException:  # an interrupt, too: the decider would wait for ranks that never join
                self._store.close()
                raise
            return joining.result(), answers

    def _join(self) -> GangExecutor:
        """Join in the same order as the ranks: boards first."""
        epoch, host = self._epoch, self._host
        receivers = receive_boards(self.board, self._handles, nodes=self._nodes, epoch=epoch, host=host)
        cpu, handle = torch.device("cpu"), self._handles["control"]
        control = build_group(handle, member=DECIDER, epoch=epoch, host=host, device=cpu)
        return GangExecutor(
            control,
            split=self._config.split,
            board=self.board,
            timeout_s=self._config.rank_timeout_s,
            plans_ahead=self._config.plans_ahead(device_type=self._device_type),
            receivers=receivers,
        )
