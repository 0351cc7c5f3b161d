"""Kernels for recurrent layers of decode steps against the same steps in plain torch.

In float32 the plain version computes in float64. In half precision it rounds where the kernels round, so that results
differ only where float32 sums on both sides of a rounding limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.state_space import StateSpace, Taps
from raycache.attention.states import Recurrence
from raycache.memory.component import recurrent
from raycache.memory.views import StateView
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.step.inputs import RowInputs, StateRows
from tests.oracle.attention import Batch, Case, Seat

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ROWS = [(5, 1), (0, 1), (30, 1), (8, 1), (0, 1), (9, 1), (7, 1)]  # of one token each, some of which begin a sequence

EXACT = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""Distance from the right result, of its norm."""
each_dtype = pytest.mark.parametrize("dtype", EXACT, ids=str)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `of_keys` and `of_values` are heads and features.

    Attributes:
        decays: 1 or the features of a key for a delta rule, 0 for Mamba2.
        bound: of the log decay.
    """

    of_keys: tuple[int, int]
    of_values: tuple[int, int]
    taps: int = 4
    decays: int = 0
    bound: float | None = None
    has_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def names(self) -> tuple[str, str, str]:
        """Convolutions of values, keys and queries."""
        return ("v", "k", "q") if self.decays else ("x", "b", "c")


SHAPES = {
    "nemotron-3-nano": Shape((8, 128), (64, 64)),
    "limited": Shape((1, 16), (3, 64), has_bias=False, dt_limit=(0.01, 0.7)),
    "odd": Shape((3, 24), (6, 20), taps=3),
    "two taps": Shape((2, 7), (2, 65), taps=2),
    "qwen3-next": Shape((16, 128), (32, 128), decays=1),
    "kimi-linear": Shape((32, 128), (32, 128), decays=128),
    "bounded": Shape((4, 128), (4, 128), decays=128, bound=-5.0),
    "odd delta": Shape((2, 24), (6, 40), taps=3, decays=1, bound=-3.0),
    "odd channels": Shape((3, 20), (3, 20), taps=5, decays=20),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@dataclass(frozen=True)
class Layer:
    """Weights, and the new inputs of each row."""

    weights: StateSpace | DeltaRule
    inputs: dict[str, Tensor]

    def run(self, step: Any, view: StateView) -> Tensor:
        method = step.state_space if isinstance(self.weights, StateSpace) else step.delta_rule
        out: Tensor = method(view, self.weights, **self.inputs)
        return out

    def to(self, dtype: torch.dtype) -> Layer:
        def moved(value: Any) -> Any:
            if isinstance(value, Taps):
                return Taps(moved(value.weight), moved(value.bias))
            return value.to(dtype) if isinstance(value, Tensor) else value

        weights = replace(self.weights, **{name: moved(value) for name, value in vars(self.weights).items()})
        return Layer(weights, {name: moved(value) for name, value in self.inputs.items()})


def draw(shape: Shape, rows: int, *, dtype: torch.dtype, seed: int = 0) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def drawn(*size: int, to: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=random).to(to).to(DEVICE)

    (groups, key_dim), (heads, value_dim) = shape.of_keys, shape.of_values
    # Parts of one product, as models cut them out of their projections.
    sizes = [heads * value_dim, groups * key_dim, groups * key_dim, heads, heads * max(shape.decays, 1)]
    v, k, q, beta, decay = drawn(rows, sum(sizes), to=dtype).split(sizes, dim=1)
    v, k, q = v.unflatten(1, shape.of_values), k.unflatten(1, shape.of_keys), q.unflatten(1, shape.of_keys)

    def taps(size: tuple[int, int]) -> Taps:
        bias = drawn(*size, to=dtype) if shape.has_bias and not shape.decays else None
        return Taps(drawn(*size, shape.taps, to=dtype), bias)

    of_v, of_k, of_q = taps(shape.of_values), taps(shape.of_keys), taps(shape.of_keys)
    rate = drawn(heads).exp()
    if not shape.decays:
        bias, skip = 2 * drawn(heads) - 2, drawn(heads)
        weights = StateSpace(of_v, of_k, of_q, dt_bias=bias, decay=-rate, skip=skip, dt_limit=shape.dt_limit)
        return Layer(weights, {"x": v, "b": k, "c": q, "dt": beta})
    bias = 2 * drawn(heads, shape.decays) - 2
    rule = DeltaRule(of_q.weight, of_k.weight, of_v.weight, rate=rate[:, None], dt_bias=bias, bound=shape.bound)
    decay = decay.unflatten(1, (heads, shape.decays))
    return Layer(rule, {"q": q, "k": k, "v": v, "decay": decay, "beta": beta})


def seat_of(shape: Shape, rows: Sequence[tuple[int, int]], dtype: torch.dtype) -> Seat:
    batch = Batch(Case(rows, dtype=dtype, device=DEVICE))
    (heads, value_dim), (_, key_dim) = shape.of_values, shape.of_keys
    values, keys, queries = shape.names
    conv = [(values, *shape.of_values), (keys, *shape.of_keys), (queries, *shape.of_keys)]
    sizes: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "conv_kernel": shape.taps}
    component = recurrent([0, 1], **sizes, fmt=batch.case.fmt, conv=conv)
    seat = Seat(batch, ParallelContext(split=Split(), rank=0, device=torch.device(DEVICE)), [component])
    random = torch.Generator().manual_seed(1)
    view = seat.pool.state(1)
    for states in (view.state, *view.conv.values()):
        states.copy_(torch.randn(states.shape, generator=random))
        # Nothing may come of slots that no row reads.
        states[list({*range(len(states))} - {read for read, _ in batch.states})] = float("nan")
    return seat


def copy_of(view: StateView, dtype: torch.dtype | None = None) -> StateView:
    own = object.__new__(StateView)
    own.space, own.state = view.space, view.state.to(dtype or view.state.dtype, copy=True)
    own.conv = {name: rows.to(dtype or rows.dtype, copy=True) for name, rows in view.conv.items()}
    return own


def distance(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def assert_same(found: StateView, right: StateView, slots: Sequence[int], *, error: float) -> None:
    for slot in slots:
        assert distance(found.state[slot], right.state[slot]) <= error
        for name, windows in found.conv.items():
            assert torch.equal(windows[slot].double(), right.conv[name][slot].double()), name


def assert_untouched(view: StateView, before: StateView, written: set[int]) -> None:
    kept = [slot for slot in range(len(view.state)) if slot not in written]
    for now, then in ((view.state, before.state), *((view.conv[name], before.conv[name]) for name in view.conv)):
        assert torch.equal(now[kept].nan_to_num(7), then[kept].nan_to_num(7))


@torch.inference_mode()
def check(shape: Shape, dtype: torch.dtype) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    seat = seat_of(shape, ROWS, dtype)
    view, before = seat.pool.state(1), copy_of(seat.pool.state(1))
    layer = draw(shape, len(ROWS), dtype=dtype)
    wide = torch.float64 if dtype == torch.float32 else None
    plain = copy_of(view, wide)
    layout = StepLayout(seat.inputs)
    right = (layer if wide is None else layer.to(wide)).run(Recurrence(layout), plain)
    found = layer.run(KernelRecurrence(layout), view)
    values = layer.inputs["x" if "x" in layer.inputs else "v"]
    assert found.dtype == dtype and found.shape == values.shape
    assert distance(found, right) <= EXACT[dtype]
    assert_same(view, plain, [write for _, write in seat.batch.states], error=EXACT[dtype])
    assert_untouched(view, before, {write for _, write in seat.batch.states})


@each_dtype
@each_shape
def test_a_step_is_that_of_plain_torch(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype)


@pytest.mark.parametrize("decay", [-60.0, -20.0, 0.0, 30.0, 1e4])
@pytest.mark.parametrize("name", ["nemotron-3-nano", "qwen3-next", "kimi-linear", "bounded"])
@torch.inference_mode()
def test_every_decay_keeps_its_digits(name: str, decay: float) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    shape, dtype = SHAPES[name], torch.float32
    seat = seat_of(shape, ROWS[:3], dtype)
    layer = draw(shape, 3, dtype=dtype)
    layer.inputs["dt" if "dt" in layer.inputs else "decay"].fill_(decay)
    plain, layout = copy_of(seat.pool.state(1), torch.float64), StepLayout(seat.inputs)
    right = layer.to(torch.float64).run(Recurrence(layout), plain)
    found = layer.run(KernelRecurrence(layout), seat.pool.state(1))
    # Half a step of float32 in a time step of 1e4 is a factor of exp(5e-4) in what is kept, of which nothing is left.
    assert distance(found, right) <= EXACT[dtype]
    assert_same(seat.pool.state(1), plain, [write for _, write in seat.batch.states], error=EXACT[dtype])


@pytest.mark.parametrize("name", ["nemotron-3-nano", "odd", "qwen3-next", "kimi-linear", "odd delta"])
@torch.inference_mode()
def test_a_recorded_step_reads_and_writes_other_slots_when_replayed(name: str) -> None:
    """Nothing is left behind of padding, whose rows share a slot."""
    from raycache.attention.recurrent_kernels import KernelRecurrence

    shape, dtype = SHAPES[name], torch.bfloat16
    seat = seat_of(shape, [(start, 1) for start in (3, 4, 5, 6)], dtype)
    view = seat.pool.state(1)
    for states in (view.state, *view.conv.values()):
        states.nan_to_num_(0.5)
    layer, plan = draw(shape, 4, dtype=dtype), KernelRecurrence(StepLayout(seat.inputs))
    replay, found = recorded(lambda: layer.run(plan, view))
    padding = len(view.state) - 1
    for reads, writes in (
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([5, 5, 0, 1], [6, 7, 0, 4]),
        ([2, 3, padding, padding], [2, 4, padding, padding]),
        ([7, 6, 5, 4], [3, 6, 5, 2]),
    ):
        before = copy_of(view)
        seat.inputs.read_states.copy_(torch.tensor(reads))
        seat.inputs.write_states.copy_(torch.tensor(writes))
        rows = [
            replace(row, read_state=read, write_state=write)
            for row, read, write in zip(seat.inputs.rows, reads, writes, strict=True)
        ]
        replay()
        right = layer.run(Recurrence(StepLayout(replace(seat.inputs, rows=tuple(rows)))), before)
        real = [i for i, write in enumerate(writes) if write != padding]
        assert distance(found[real], right[real]) <= EXACT[dtype]
        assert_same(view, before, [writes[i] for i in real], error=EXACT[dtype])
        for new in layer.inputs.values():
            new.normal_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_shape
@torch.inference_mode()
def test_a_recorded_step_keeps_a_state_behind_each_draft(shape: Shape, dtype: torch.dtype) -> None:
    """Rows have other lengths in each replay; behind them are padding, whose rows share a slot, and rows of nothing."""
    from raycache.attention.recurrent_kernels import KernelRecurrence

    size = 12
    seat = seat_of(shape, [(5, 1)] * size, dtype)
    view = seat.pool.state(1)
    for states in (view.state, *view.conv.values()):
        states.nan_to_num_(0.5)
    tables = [torch.zeros(count, dtype=torch.int64, device=DEVICE) for count in (2 * size, size, size, size)]
    rows = StateRows(tables[0].view(-1, 2), *tables[1:], longest=5)
    inputs = replace(seat.inputs, state_rows=rows)
    layer, plan = draw(shape, size, dtype=dtype), KernelRecurrence(StepLayout(inputs))
    padding = len(view.state) - 1

    def fill(plan_rows: Sequence[tuple[int, Sequence[int]]]) -> list[RowInputs]:
        num_tokens = sum(len(writes) for _, writes in plan_rows)
        every = [*plan_rows, *[(padding, [padding])] * (size - num_tokens)]
        every += [(-1, [])] * (size - len(every))
        firsts = [sum(len(writes) for _, writes in every[:i]) for i in range(size)]
        counts = [len(writes) for _, writes in every]
        for table, numbers in zip(
            tables,
            (
                [number for pair in zip(firsts, counts, strict=True) for number in pair],
                [read for read, _ in every],
                [write for _, writes in every for write in writes],
                counts,
            ),
            strict=True,
        ):
            table.copy_(torch.tensor(numbers))
        return [
            RowInputs(5, range(first, first + count), range(first, first + count), (), read, writes[0], writes[1:])
            for first, count, (read, writes) in zip(firsts, counts, plan_rows, strict=False)
        ]

    batches: list[list[tuple[int, list[int]]]] = [
        [(0, [0]), (1, [2])],
        [(3, [3, 4, 5, 6, 7]), (0, [1]), (8, [9, 10, 11])],  # the first token of a row writes where the row reads
        [(6, [12, 13]), (7, [14, 15]), (8, [16, 17]), (9, [9, 8, 3, 2]), (1, [1, 0])],
        [(5, [5])] + [(0, [slot]) for slot in range(8, 19)],
    ]
    fill(batches[1])
    replay, found = recorded(lambda: layer.run(plan, view))
    for batch in batches:
        right_rows = fill(batch)
        before = copy_of(view)
        replay()
        count = sum(len(row.tokens) for row in right_rows)
        only = Layer(layer.weights, {part: new[:count] for part, new in layer.inputs.items()})
        alone = replace(seat.inputs, rows=tuple(right_rows), num_tokens=count, is_decode=False)
        right = only.run(Recurrence(StepLayout(alone)), before)
        assert distance(found[:count], right) <= EXACT[dtype]
        written = [slot for _, writes in batch for slot in writes]
        assert_same(view, before, written, error=EXACT[dtype])
        assert_untouched(view, before, {*written, padding})
        for new in layer.inputs.values():
            new.normal_()


def recorded(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """What replays a graph of what `run` launches, and where it leaves what `run` gave."""
    run()  # builds kernels, which a recording may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph.replay, found


@pytest.mark.parametrize("name", ["nemotron-3-nano", "qwen3-next", "kimi-linear"])
@torch.inference_mode()
def test_steps_in_place_are_the_same_each_time(name: str) -> None:
    """A kernel that starts early reads nothing too soon, and windows are read before they are written."""
    from raycache.attention.recurrent_kernels import KernelRecurrence

    shape, dtype, rows = SHAPES[name], torch.bfloat16, 64
    seat = seat_of(shape, [(5, 1)] * rows, dtype)
    seat.inputs.write_states.copy_(seat.inputs.read_states)
    start = copy_of(seat.pool.state(1))
    layer, plan = draw(shape, rows, dtype=dtype), KernelRecurrence(StepLayout(seat.inputs))
    first = None
    for _ in range(20):
        view = copy_of(start)
        outs = torch.stack([layer.run(plan, view) for _ in range(8)])
        first = outs if first is None else first
        assert outs.isfinite().all() and torch.equal(outs, first)


@pytest.mark.parametrize("name", ["nemotron-3-nano", "qwen3-next", "kimi-linear"])
@torch.inference_mode()
def test_a_step_is_two_launches(name: str) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    seat = seat_of(SHAPES[name], ROWS, torch.bfloat16)
    layer, plan = draw(SHAPES[name], len(ROWS), dtype=torch.bfloat16), KernelRecurrence(StepLayout(seat.inputs))
    layer.run(plan, seat.pool.state(1))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        layer.run(plan, seat.pool.state(1))
        torch.cuda.synchronize()
    launched = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    assert len(launched) == 2, launched
