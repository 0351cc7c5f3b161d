"""All ranks of a split in one process, with pools of known bytes over one arena."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raycache.memory.arena import Arena
from raycache.memory.component import CacheFormat, Component, Reuse, index_keys, kv, latent, recurrent
from raycache.memory.device import DevicePool
from raycache.memory.mover import Mover
from raycache.memory.moves import Moves, Unit
from raycache.memory.rows import EnvelopeLayout
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.staged import staged

NUM_LAYERS = 6
PAGE_SIZE = 8
DEVICE = {"full": 9, "window": 7, "state": 5}
HOST = {"full": 12, "window": 8, "state": 6}


def everything(*, has_fp8_latent: bool = False) -> list[Component]:
    """A component of every kind, in a model of `NUM_LAYERS`; heads of the convolutions are not those of the states."""
    fmt = CacheFormat("bfloat16", has_fp8_latent=has_fp8_latent)
    return [
        kv("kv", [0, 3], heads=4, dim=6, fmt=fmt),
        kv("window", [1, 4, 5], heads=2, dim=10, fmt=fmt, window=12),
        latent([2, 5], rank=128, rope_dim=6, fmt=fmt),
        index_keys([2, 5], dim=20, fmt=fmt),
        recurrent([1, 2, 4], heads=8, key_dim=3, value_dim=5, fmt=fmt, conv=[("x", 8, 5), ("b", 2, 7)], conv_kernel=4),
    ]


def context(split: Split, rank: int, device: str = "cpu") -> ParallelContext:
    """A rank whose groups only know their size."""
    at = split.coords(rank)
    groups = {axis: Group(rank=getattr(at, axis), size=getattr(split, axis)) for axis in ("tp", "pp", "cp")}
    return ParallelContext(split, rank, torch.device(device), **groups)


class Hosted:
    """A gang with a mover per rank.

    Attributes:
        posts: (rank, lane, number, failed) of every move, as they come.
    """

    def __init__(
        self,
        path: Path,
        components: Sequence[Component],
        split: Split,
        *,
        device: str = "cpu",
        units: Mapping[str, int] | None = None,
    ) -> None:
        self.components, self.split = components, staged(split, NUM_LAYERS)
        shape = {"num_layers": NUM_LAYERS, "page_size": PAGE_SIZE}
        self.layout = EnvelopeLayout(components, **shape, split=self.split)
        spaces = self.layout.spaces
        host = {space: (units or HOST)[space] for space in spaces}
        sizes = {space: (units or DEVICE)[space] for space in spaces}
        self.arena = Arena.create(path, self.layout, sizes=host, catalog_bytes=100, description=b"a test")
        self.posts: queue.Queue[tuple[int, str, int, bool]] = queue.Queue()
        self.pools = [
            DevicePool(components, **shape, sizes=sizes, ctx=context(self.split, rank, device))
            for rank in range(split.world_size)
        ]
        self.movers = [self._mover(rank) for rank in range(split.world_size)]

    def _mover(self, rank: int) -> Mover:
        def post(lane: str, number: int, has_failed: bool) -> None:
            self.posts.put((rank, lane, number, has_failed))

        return Mover(self.pools[rank], self.arena, self.layout, rank=rank, post=post)

    def save(self, number: int, units: Sequence[Unit]) -> list[bool]:
        """Save on all ranks; which of them failed."""
        for mover in self.movers:
            mover.save(Moves.of(number, units))
        return self.posted("save", number)

    def load(self, number: int, units: Sequence[Unit]) -> list[bool]:
        """Load on all ranks; which of them failed."""
        for mover in self.movers:
            mover.load(Moves.of(number, units))
        return self.posted("load", number)

    def posted(self, lane: str, number: int) -> list[bool]:
        """Wait for one post of each rank, of this lane and number; whether they failed, by rank."""
        found = [self.posts.get(timeout=20) for _ in self.movers]
        assert {(at, which) for _, at, which, _ in found} == {(lane, number)}
        assert len({rank for rank, *_ in found}) == len(self.movers)
        return [has_failed for _, _, _, has_failed in sorted(found)]

    def rows(self, rank: int) -> dict[tuple[str, str], Tensor]:
        """(component, field) -> bytes [L, units, tokens, heads, rest] of a rank's pool, a view."""
        found = {}
        for component in self.components:
            for field in component.fields:
                rows = self.pools[rank].rows(component.name).get(field.name)
                if rows is not None:
                    if component.reuse is Reuse.STATE_HERE:
                        rows = rows.unsqueeze(2)
                    if field.head_axis is None:
                        rows = rows.unsqueeze(3)
                    found[component.name, field.name] = rows.flatten(4).view(torch.uint8)
        return found

    def fill(self, whole: Mapping[tuple[str, str], Tensor]) -> None:
        """Give each rank its part of a whole model's rows."""
        for rank in range(self.split.world_size):
            for key, rows in self.rows(rank).items():
                rows.copy_(self.part(whole, rank, key))

    def part(self, whole: Mapping[tuple[str, str], Tensor], rank: int, key: tuple[str, str]) -> Tensor:
        """A rank's part of a whole model's rows, the placement written out."""
        component = next(one for one in self.components if one.name == key[0])
        at, split = self.split.coords(rank), self.split
        stage = np.split(np.arange(NUM_LAYERS), np.cumsum(split.stages)[:-1])[at.pp]
        layers = [i for i, layer in enumerate(component.layers) if layer in stage]
        rows = whole[key][layers]
        part, parts = at.tp, split.tp
        if component.reuse is Reuse.STATE_HERE:
            part, parts = at.tp * split.cp + at.cp, split.tp * split.cp
        else:
            rows = rows[:, :, np.array_split(np.arange(PAGE_SIZE), split.cp)[at.cp]]
        heads = rows.shape[3]
        mine = np.array_split(np.arange(heads), parts)[part] if heads >= parts else np.array([part * heads // parts])
        return rows[:, :, :, mine]

    def close(self) -> None:
        for mover in self.movers:
            mover.close()
        self.arena.close()
        self.arena.unlink()


def whole_model(
    components: Sequence[Component], *, seed: int, units: Mapping[str, int] = DEVICE
) -> dict[tuple[str, str], Tensor]:
    """(component, field) -> random bytes [layers, units, tokens, heads, rest]."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for component in components:
        tokens = 1 if component.reuse is Reuse.STATE_HERE else PAGE_SIZE
        for field in component.fields:
            heads = 1 if field.head_axis is None else field.shape[0]
            shape = (len(component.layers), units[component.space], tokens, heads, field.num_bytes // heads)
            found[component.name, field.name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    return found
