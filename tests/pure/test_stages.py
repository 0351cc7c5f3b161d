"""Pipeline stages by what layers cost: against all ways to cut, and what may never happen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycache.config import Config
from raycache.errors import ConfigError
from raycache.parallel.stages import LayerCosts, cheapest_stages, even_stages, nearest_stages


def cuts(num_layers: int, pp: int, bound: set[int]) -> list[tuple[int, ...]]:
    """All stages that there are."""
    begins = [layer for layer in range(1, num_layers) if layer not in bound]
    borders = ([0, *chosen, num_layers] for chosen in itertools.combinations(begins, pp - 1))
    return [tuple(end - begin for begin, end in itertools.pairwise(each)) for each in borders]


def dearest(costs: LayerCosts, stages: tuple[int, ...]) -> int:
    """What the most expensive stage costs, written out."""
    layers = iter(costs.layers)
    sums = [sum(itertools.islice(layers, count)) for count in stages]
    return max(total + costs.first * (i == 0) + costs.last * (i == len(sums) - 1) for i, total in enumerate(sums))


@st.composite
def models(draw: st.DrawFn, most_layers: int) -> tuple[LayerCosts, int, set[int]]:
    """Costs, number of stages, bound layers."""
    layers = draw(st.lists(st.integers(0, 20), min_size=1, max_size=most_layers))
    bound = draw(st.sets(st.integers(1, max(1, len(layers) - 1)), max_size=len(layers) - 1))
    bound &= set(range(1, len(layers)))
    pp = draw(st.integers(1, len(layers) - len(bound)))
    return LayerCosts(tuple(layers), draw(st.integers(0, 40)), draw(st.integers(0, 40))), pp, bound


@given(models(most_layers=9))
def test_no_other_stages_are_cheaper(model: tuple[LayerCosts, int, set[int]]) -> None:
    costs, pp, bound = model
    chosen, all_there_are = cheapest_stages(costs, pp, bound=bound), cuts(len(costs.layers), pp, bound)
    assert chosen in all_there_are
    are_equal = len(set(costs.layers)) == 1 and len(costs.layers) % pp == 0
    even = even_stages(len(costs.layers), pp)
    if are_equal and even in all_there_are:
        assert chosen == even, "a model of equal layers stays as it is, whatever its head costs"
    else:
        assert dearest(costs, chosen) == min(dearest(costs, stages) for stages in all_there_are)


@given(models(most_layers=80))
def test_all_layers_have_a_stage_and_bound_ones_that_of_the_layer_before(
    model: tuple[LayerCosts, int, set[int]],
) -> None:
    costs, pp, bound = model
    stages = cheapest_stages(costs, pp, bound=bound)
    assert len(stages) == pp and sum(stages) == len(costs.layers) and min(stages) >= 1
    begins = set(itertools.accumulate(stages[:-1]))
    assert not begins & bound
    even = even_stages(len(costs.layers), pp)
    if not set(itertools.accumulate(even[:-1])) & bound:
        assert dearest(costs, stages) <= dearest(costs, even)
        assert stages == even or dearest(costs, stages) < dearest(costs, even), "borders move for a reason only"


@given(models(most_layers=40), st.data())
def test_stages_near_wrong_ones_work_and_right_ones_are_their_own_neighbours(
    model: tuple[LayerCosts, int, set[int]], data: st.DataObject
) -> None:
    costs, pp, bound = model
    num_layers = len(costs.layers)
    wrong = tuple(data.draw(st.lists(st.integers(1, 30), min_size=pp, max_size=pp)))
    near = nearest_stages(wrong, num_layers=num_layers, bound=bound)
    assert len(near) == pp and sum(near) == num_layers and min(near) >= 1
    assert not set(itertools.accumulate(near[:-1])) & bound
    assert nearest_stages(near, num_layers=num_layers, bound=bound) == near


def test_a_heavy_head_and_dense_layers_move_borders() -> None:
    light_first = LayerCosts((1, 1, 1, 4, 4, 4, 4, 4))
    assert cheapest_stages(light_first, 2) == (5, 3)  # 11 and 12; even ones are 7 and 16
    assert cheapest_stages(LayerCosts((4,) * 7, last=8), 2) == (4, 3)  # 16 and 20: even is best
    assert cheapest_stages(LayerCosts((4,) * 7, last=16), 2) == (5, 2)  # 20 and 24; even ones are 16 and 28


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("12,12", r"pp_layers=12,12 lists 2 stages but pp=3; give 3 numbers, or use pp=2"),
        ("12,0,12", "pp_layers='12,0,12' is not a list of layers per stage; use auto, or a list such as 12,12,11"),
        ("12,-1,12", "is not a list"),
        ("12;12;11", "is not a list"),
        ("", "is not a list"),
        ("12,12,", "is not a list"),
    ],
)
def test_what_is_no_list_of_stages_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(pp=3, pp_layers=given)
    assert Config(pp=3, pp_layers="12, 12,11").stages == (12, 12, 11)
    assert Config(pp=3).stages == ()
