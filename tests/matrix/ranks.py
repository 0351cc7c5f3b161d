"""A rank in a process of its own: loads one family after the other, executes plans, answers with all their logits."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycache.attention.torch_ref import TorchBackend
from raycache.config import Config
from raycache.deployment.decode_split import decode_obstacle
from raycache.deployment.deployment import Deployment
from raycache.host.service import open_arena
from raycache.layers.cp_split import CpSplit
from raycache.memory.device import DevicePool
from raycache.memory.mover import LaneName, Mover
from raycache.memory.views import IndexView, KVView, LatentView, StateView
from raycache.models.base import load_model, read_config
from raycache.parallel.board import AckBoard, Lane
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.member import Invitation
from raycache.rank.rank import Rank
from raycache.wire.plan import StepPlan
from tests.oracle.weights import open_weights

Rows = dict[tuple[int, str], NDArray[np.float32]]
"""(layer, field) -> what a rank keeps of it."""


@dataclass(frozen=True)
class Load:
    """Load the model of a config and make a pool for it."""

    config: Config


@dataclass(frozen=True)
class Run:
    """Execute a packed plan; answered with the logits that this rank emits, or None."""

    plan: bytes


@dataclass(frozen=True)
class Poison:
    """Fill the whole pool with NaN: whoever reads a row that was not written shows it."""


@dataclass(frozen=True)
class Host:
    """Move pages to and from this arena from now on, by numbers that begin at 1; answered.

    Attributes:
        path: of the arena, None for none.
        is_blind: take what the host holds for right, without a look at tags and checksums.
    """

    path: Path | None
    is_blind: bool = False


@dataclass(frozen=True)
class Damage:
    """Overwrite one page, token or state of some fields of a layer, with zeros or with another one.

    Attributes:
        layer: of the model.
        fields: all of one component.
        unit: page or slot.
        source: the page or slot whose rows it gets; -1 for zeros.
        token: of the page, the only one that is overwritten; -1 for all of it.
        is_after_load: not now, but in the next plan, when the layer has been loaded.
    """

    layer: int
    fields: tuple[str, ...]
    unit: int
    source: int = -1
    token: int = -1
    is_after_load: bool = False


@dataclass(frozen=True)
class Repair:
    """Undo all damage."""


@dataclass(frozen=True)
class Read:
    """Answered with the rows of some pages and one state slot.

    Attributes:
        units: component space -> pages, or one slot.
    """

    units: Mapping[str, Sequence[int]]


Order = Load | Run | Poison | Host | Damage | Repair | Read


@dataclass(frozen=True)
class Failure:
    """What a rank says when an order failed."""

    text: str


def serve(connection: Connection, invitation: Invitation) -> None:
    """Join, then follow orders until the connection closes. Load, Host, Run and Read are answered."""
    torch.set_num_threads(1)
    config, spec = invitation.config, invitation.spec
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    split = Split(tp=config.tp, pp=config.pp, cp=config.cp)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ctx = ParallelContext.join(
        split, rank=spec.rank, host=spec.host, device=device, handles=handles, epoch=invitation.epoch
    )
    bench = Bench(ctx, AckBoard(invitation.board, num_ranks=split.world_size))
    while True:
        try:
            order = connection.recv()
        except (EOFError, ConnectionError):  # whoever gave the orders has ended
            return
        try:
            answer = bench.follow(order)
        except Exception:  # whatever a rank raises belongs into the table
            connection.send(Failure(f"rank {spec.rank} ({ctx.coords}): {traceback.format_exc()}"))
            continue
        if isinstance(order, Load | Host | Run | Read):
            connection.send(answer)


class Bench:
    """One rank and what is done to it.

    Args:
        ctx: of the rank.
        board: where it says how far its moves are.
    """

    def __init__(self, ctx: ParallelContext, board: AckBoard) -> None:
        self._ctx, self._board = ctx, board
        self._rank: Rank | None = None
        self._open_gate: Callable[[int], None] = lambda layer: None
        self._backups: list[tuple[Tensor, Tensor]] = []

    def follow(self, order: Order) -> Rows | NDArray[np.float32] | None:
        """Execute an order; what comes of it."""
        match order:
            case Load():
                self._close_mover()
                self._rank = None  # its memory first
                self._rank = load_rank(order.config, self._ctx)
                self._open_gate = self._rank.pool.gate
                return None
            case Run():
                logits = self._loaded.forward(StepPlan.unpack(order.plan))
                return None if logits is None else logits.cpu().numpy()
            case Poison():
                self._backups.clear()
                for rows, _ in self._rows().values():
                    rows.fill_(float("nan"))
            case Host():
                self._use_host(order)
            case Damage(is_after_load=True):
                self._damage_later(order)
            case Damage():
                self._damage(order)
            case Repair():
                for rows, backup in self._backups:
                    rows.copy_(backup)
                self._backups.clear()
            case Read():
                found = self._rows().items()
                return {key: rows[list(order.units[space])].cpu().numpy() for key, (rows, space) in found}
        return None

    @property
    def _loaded(self) -> Rank:
        assert self._rank is not None, "load comes first"
        return self._rank

    def _use_host(self, order: Host) -> None:
        """A new mover, whose numbers begin anew on the board."""
        self._close_mover()
        board, number = self._board, self._ctx.rank
        for lane in (Lane.SAVES, Lane.LOADS, Lane.BAD_SAVE, Lane.BAD_LOAD, Lane.LOAD_US, Lane.SAVE_US):
            board.post(number, lane, 0)
        if order.path is None:
            return

        def post(lane: LaneName, move: int, has_failed: bool) -> None:
            board.post(number, Lane.LOAD_US, int(1e6 * mover.load_s))
            board.post_moves(number, lane, move, has_failed)

        arena = open_arena(order.path)
        mover = Mover(self._loaded.pool, arena, arena.layout, rank=number, post=post)
        self._loaded.mover = mover
        if order.is_blind:
            for space in mover._spaces.values():
                space.foreign = space.damaged = lambda units: ""  # type: ignore[method-assign]

    def _close_mover(self) -> None:
        if self._rank is not None and self._rank.mover is not None:
            self._rank.mover.close()
            self._rank.mover = None
            self._rank.pool.gate = self._open_gate

    def _damage_later(self, order: Damage) -> None:
        """Behind the mover's gate: the layer has passed its checks, and nothing has looked at it."""
        pool, gate = self._loaded.pool, self._loaded.pool.gate

        def gate_then_damage(layer: int) -> None:
            gate(layer)
            if layer == order.layer:
                pool.gate = gate
                self._damage(order)

        pool.gate = gate_then_damage

    def _damage(self, order: Damage) -> None:
        known = self._rows()
        for field in order.fields:
            if (order.layer, field) not in known:
                continue
            rows = known[order.layer, field][0]
            taken = slice(None)
            if order.token >= 0:  # of this rank's run of the page, which may not hold it
                first = order.token - self._ctx.cp.rank * rows.shape[1]
                taken = slice(max(first, 0), max(first + 1, 0))
            damaged = rows[order.unit, taken]
            self._backups.append((damaged, damaged.clone()))
            damaged.copy_(rows[order.source, taken] if order.source >= 0 else torch.zeros(()))

    def _rows(self) -> dict[tuple[int, str], tuple[Tensor, str]]:
        """(layer, field) -> (rows [units, ...], component space)."""
        found: dict[tuple[int, str], tuple[Tensor, str]] = {}
        for (_, layer), view in self._loaded.pool._views.items():
            match view:
                case KVView():
                    rows = {"k": view.k, "v": view.v}
                case LatentView():
                    share = self._loaded.pool.page_size // self._ctx.cp.size
                    rows = {
                        "latent": view._latent.unflatten(0, (-1, share)),
                        "rope": view._rope.unflatten(0, (-1, share)),
                    }
                case IndexView():
                    rows = {"key": view.key}
                case StateView():
                    rows = {"state": view.state} | {f"conv_{name}": conv for name, conv in view.conv.items()}
            found |= {(layer, name): (tensor, view.space) for name, tensor in rows.items()}
        return found


def load_rank(config: Config, ctx: ParallelContext) -> Rank:
    """A rank with this model, in float32."""
    model_dir = Path(config.model)
    ctx = replace(ctx, split=config.split)
    model = read_config(model_dir)
    deployment = Deployment(config, model, "cpu")
    dtype = deployment.dtype
    assert dtype == torch.float32
    pool = DevicePool(
        deployment.components,
        num_layers=model.num_layers,
        sizes=deployment.pool_sizes(config.num_pages),
        page_size=config.page_size,
        ctx=ctx,
    )
    source = open_weights(model_dir, dtype=dtype, device=ctx.device)
    loaded = load_model(model, source, ctx, dtype, on_progress=lambda done, total: None)
    is_split = ctx.cp.size > 1 and not decode_obstacle(deployment)
    return Rank(
        ctx=ctx,
        config=model,
        model=loaded,
        pool=pool,
        backend=TorchBackend(),
        dtype=dtype,
        decode_model=loaded.over_cp(CpSplit.of(ctx)) if is_split else None,
    )
