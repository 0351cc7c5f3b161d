"""Pipeline stages: how many consecutive layers each one has.

    layers     0 1 2 3 | 4 5 6 | 7 8 9       stages (4, 3, 3): the first has the embedding, the last one norm and head
    indivisible   2<-3     5<-6              a layer that shares the indexer of an earlier one never begins a stage

The decider chooses the stages once, from config.json or `pp_layers`, and sends them to the ranks.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raycache.errors import ConfigError

AUTO = "auto"
_LIST = re.compile(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*")


@dataclass(frozen=True)
class LayerCosts:
    """Cost of each layer, in any unit.

    Attributes:
        first, last: additional costs of the first and the last stage.
    """

    layers: tuple[int, ...]
    first: int = 0
    last: int = 0

    def of_stages(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Cost of each stage."""
        borders = (0, *accumulate(stages))
        costs = [sum(self.layers[begin:end]) for begin, end in pairwise(borders)]
        costs[0] += self.first
        costs[-1] += self.last
        return tuple(costs)


def parse_pp_layers(text: str, *, pp: int) -> tuple[int, ...]:
    """Parse layers per stage, such as "12,12,11".

    Returns:
        One number per stage; none for "auto".
    Raises:
        ConfigError: it is not a list of `pp` positive numbers.
    """
    if text == AUTO:
        return ()
    if not _LIST.fullmatch(text) or 0 in (stages := tuple(map(int, text.split(",")))):
        raise ConfigError(f"pp_layers={text!r} is not a list of layers per stage; use auto, or a list such as 12,12,11")
    if len(stages) != pp:
        raise ConfigError(
            f"pp_layers={text} lists {len(stages)} stages but pp={pp}; give {pp} numbers, or use pp={len(stages)}"
        )
    return stages


def even_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Stages whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(num_layers, pp)
    return tuple(base + (stage < extra) for stage in range(pp))


def are_whole(stages: Sequence[int], bound: Collection[int]) -> bool:
    """Whether no stage begins at one of the `bound` layers, which must be on the stage of the layer before them."""
    return bound_begin(stages, bound) is None


def bound_begin(stages: Sequence[int], bound: Collection[int]) -> int | None:
    """The first of the `bound` layers at which a stage begins."""
    return next((begin for begin in accumulate(stages[:-1]) if begin in bound), None)


def nearest_stages(stages: Sequence[int], *, num_layers: int, bound: Collection[int]) -> tuple[int, ...]:
    """Valid stages for `num_layers` layers with borders near those of `stages`.

    Args:
        stages: layers per stage, with any sum; the model must have enough layers for as many stages.
        bound: layers that must be on the stage of the layer before them.
    """
    begins = [layer for layer in range(1, num_layers) if layer not in bound]
    chosen, place = [0], 0
    for later, wanted in zip(range(len(stages) - 2, -1, -1), accumulate(stages), strict=False):
        places = range(place, len(begins) - later)
        place = min(places, key=lambda i: abs(begins[i] - wanted)) + 1
        chosen.append(begins[place - 1])
    return tuple(end - begin for begin, end in pairwise([*chosen, num_layers]))


def cheapest_stages(costs: LayerCosts, pp: int, *, bound: Collection[int] = ()) -> tuple[int, ...]:
    """Stages that minimise the cost of the most expensive one; even stages if none are better.

    Args:
        pp: number of stages; at most the number of layers that are not bound.
        bound: layers that must be on the stage of the layer before them.
    """
    num_layers = len(costs.layers)
    even = even_stages(num_layers, pp)
    if num_layers % pp == 0 and len(set(costs.layers)) == 1 and are_whole(even, bound):
        return even
    search = _Search(costs, pp, bound=bound)
    least = bisect_left(range(search.total), True, key=lambda limit: search.fits(0, 0, limit))
    if are_whole(even, bound) and max(costs.of_stages(even)) <= least:
        return even
    return search.stages(least)


class _Search:
    """Search for stages as runs of units; a unit is a layer with those that are bound to it."""

    def __init__(self, costs: LayerCosts, pp: int, *, bound: Collection[int]) -> None:
        self._begins = [layer for layer in range(len(costs.layers)) if layer not in bound or layer == 0]
        prefix = (0, *accumulate(costs.layers))
        self._ends = [*self._begins[1:], len(costs.layers)]
        # Cumulative cost up to each unit; the embedding belongs to the first unit, the head to the last one.
        self._cost = [0, *(costs.first + prefix[end] for end in self._ends)]
        self._cost[-1] += costs.last
        self._pp = pp
        self.total = self._cost[-1]

    def fits(self, stage: int, begin: int, limit: int) -> bool:
        """Whether the units from `begin` on fit into the stages from `stage` on, at no more than `limit` each."""
        for later in range(self._pp - 1 - stage, 0, -1):
            end = min(bisect_right(self._cost, self._cost[begin] + limit) - 1, len(self._ends) - later)
            if end <= begin:
                return False
            begin = end
        return self.total - self._cost[begin] <= limit

    def stages(self, limit: int) -> tuple[int, ...]:
        """Stages of at most `limit` each, with borders near those of equal costs."""
        begin, layers = 0, [0]
        for stage in range(1, self._pp):
            wanted = self.total * stage // self._pp
            able = [
                unit
                for unit in range(begin + 1, len(self._ends) - (self._pp - 1 - stage))
                if self._cost[unit] - self._cost[begin] <= limit and self.fits(stage, unit, limit)
            ]
            begin = min(able, key=lambda unit: abs(self._cost[unit] - wanted))
            layers.append(self._begins[begin])
        return tuple(end - start for start, end in pairwise([*layers, self._ends[-1]]))
