"""Sharding: which rank holds which part of a model and its cache. All such arithmetic is here.

axis  shards
pp    layers, in the stages chosen by stages.py
tp    heads; KV heads fewer than tp are replicated, and so is everything without heads
cp    the tokens of each page, page_size / cp consecutive tokens per rank; recurrent states by heads over tp x cp

page of S=8 tokens, cp=2:   [ 0 1 2 3 | 4 5 6 7 ]     cp rank 0 holds tokens 0..3 of every page, cp rank 1 tokens 4..7
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Coords:
    """Coordinates of a rank in the gang; tp varies fastest, so that the ranks of a tp group are consecutive."""

    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"pp={self.pp} cp={self.cp} tp={self.tp}"


@dataclass(frozen=True)
class Split:
    """How a model is split: sizes of the three axes, and the layers of each pipeline stage.

    Attributes:
        stages: layers per stage (stages.py); may be empty with one stage, or if layers are not needed.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.stages) in (0, self.pp), f"{self.stages} are not the layers of {self.pp} stages"

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """Layers of a stage of a model with `num_layers`."""
        stages = self.stages or (num_layers,)
        assert len(stages) == self.pp and sum(stages) == num_layers, f"{self} has no stages for {num_layers} layers"
        end = sum(stages[: stage + 1])
        return range(end - stages[stage], end)

    def held_layers(self, num_layers: int, stage: int) -> range:
        """Layers whose cache a stage holds: its own and, on the last stage, those of the draft model."""
        own = self.stage_layers(num_layers, stage)
        return range(own.start, sys.maxsize) if stage == self.pp - 1 else own

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp

    def coords(self, rank: int) -> Coords:
        """Coordinates of a world rank."""
        return Coords(pp=rank // (self.cp * self.tp), cp=rank // self.tp % self.cp, tp=rank % self.tp)

    def rank(self, coords: Coords) -> int:
        """World rank at coordinates."""
        return (coords.pp * self.cp + coords.cp) * self.tp + coords.tp

    def axis_members(self, axis: str, rank: int) -> tuple[int, ...]:
        """World ranks that differ from `rank` only along one axis ("tp", "pp" or "cp"), in order."""
        at = self.coords(rank)
        varied = range({"tp": self.tp, "pp": self.pp, "cp": self.cp}[axis])
        return tuple(self.rank(Coords(**{"pp": at.pp, "cp": at.cp, "tp": at.tp, axis: i})) for i in varied)

    def stage_members(self, rank: int) -> tuple[int, ...]:
        """World ranks of the same stage as `rank`, in order."""
        first = rank - rank % (self.tp * self.cp)
        return tuple(range(first, first + self.tp * self.cp))

    def cache_members(self, rank: int) -> tuple[int, ...]:
        """World ranks that hold parts of the same pages: all ranks of the replica."""
        return tuple(range(self.world_size)) if 0 <= rank < self.world_size else ()


@dataclass(frozen=True)
class HeadCount:
    """A number of heads, or the like, to be split over tp, or over tp x cp.

    Attributes:
        name: its key in config.json, for messages.
        is_shared: whether there may be fewer heads than ranks; consecutive ranks then share one.
        over_cp: whether it is also split over cp, as recurrent heads are.
    """

    name: str
    count: int
    is_shared: bool = False
    over_cp: bool = False

    def obstacle(self, split: Split) -> str:
        """Why it cannot be split this way, or ""."""
        parts = split.tp * split.cp if self.over_cp else split.tp
        if self.count % parts == 0:
            return ""
        if not self.is_shared:
            return f"does not divide {self.name}={self.count}"
        return "" if parts % self.count == 0 else f"neither divides nor is a multiple of {self.name}={self.count}"


def even_range(count: int, part: int, parts: int) -> range:
    """The `part`-th of `parts` runs of range(count); lengths differ by at most one, longer runs first."""
    base, extra = divmod(count, parts)
    start = part * base + min(part, extra)
    return range(start, start + base + (part < extra))


def even_part(count: int, index: int, parts: int) -> int:
    """The part of `even_range` that an index in range(count) is in."""
    base, extra = divmod(count, parts)
    num_longer = extra * (base + 1)
    return index // (base + 1) if index < num_longer else extra + (index - num_longer) // base


def shared_head_range(num_heads: int, part: int, parts: int) -> range:
    """Heads of one of `parts` ranks; with fewer heads than ranks, parts / num_heads consecutive ranks share one."""
    if num_heads >= parts:
        return even_range(num_heads, part, parts)
    head = part * num_heads // parts
    return range(head, head + 1)


def state_part(split: Split, at: Coords) -> tuple[int, int]:
    """(part, parts) of a rank's recurrent heads: those of its tp rank, split further over cp."""
    return at.tp * split.cp + at.cp, split.tp * split.cp


def vocab_range(vocab_size: int, tp_rank: int, tp_size: int) -> range:
    """Rows of a tp rank's embedding: ceil(vocab / tp) each; those of the last ranks may be fewer or none."""
    rows = -(-vocab_size // tp_size)
    return range(min(tp_rank * rows, vocab_size), min((tp_rank + 1) * rows, vocab_size))


def split_chunk(num_tokens: int, cp_rank: int, cp_size: int, *, turn: int = 0) -> tuple[range, ...]:
    """The runs of a chunk of new tokens that a cp rank computes, balanced for causal attention.

    Token i attends to i + 1 new tokens, so equal consecutive runs would give the last rank most of the work. The chunk
    is split into 2 * cp runs, of which rank r computes runs r and 2 * cp - 1 - r:

        cp=2:  [ 0 | 1 | 1 | 0 ]

    Args:
        num_tokens: length of the chunk, 1 in decode.
        turn: rotates the ranks, so that rank 0 does not compute the single tokens of all decode rows.
    """
    if cp_size == 1:
        return (range(num_tokens),)
    part = (cp_rank - turn) % cp_size
    runs = (even_range(num_tokens, i, 2 * cp_size) for i in (part, 2 * cp_size - 1 - part))
    return tuple(run for run in runs if len(run))


def split_span(span: range, num_tokens: int, cp_size: int, *, turn: int = 0) -> Iterator[tuple[int, range]]:
    """Divide consecutive tokens of a chunk among the cp ranks that compute them.

    Args:
        span: indices in the chunk.
        num_tokens, turn: as for `split_chunk`.
    Returns:
        (cp rank, part of the span), ascending; a rank has at most two.
    """
    if cp_size == 1:
        if span:
            yield 0, span
        return
    parts, start = 2 * cp_size, span.start
    while start < span.stop:
        part = even_part(num_tokens, start, parts)
        stop = min(even_range(num_tokens, part, parts).stop, span.stop)
        yield (min(part, parts - 1 - part) + turn) % cp_size, range(start, stop)
        start = stop
