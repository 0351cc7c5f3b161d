"""Kernels of recurrent layers against attention/recurrence.py in float64, on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from raycache.attention.delta_rule import DeltaRule
from raycache.attention.layout import StepLayout
from raycache.attention.recurrence import causal_conv, scan
from raycache.attention.state_space import StateSpace, Taps
from raycache.attention.states import Recurrence
from raycache.memory.component import recurrent
from raycache.memory.views import StateView
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from tests.oracle.attention import Batch, Case, Seat

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HALF = torch.bfloat16
FEW = [(5, 1), (0, 1), (30, 2), (0, 32), (9, 1)]
LONG = [(0, 33), (64, 63), (3, 64), (0, 65), (128, 200), (7, 330)]
MIXED = [LONG[1], FEW[0], LONG[4], FEW[3], FEW[1], LONG[0]]
BATCHES = {"short": FEW, "long": LONG, "mixed": MIXED}

# Of the norm of the right result. In half precision inputs are rounded once more (those in float32), and so is what the
# chunks pass on to each other.
EXACT, ROUNDED = 2e-6, 1e-2


@dataclass(frozen=True)
class Kind:
    """A recurrent layer.

    Attributes:
        heads, dims: of keys and of values.
        is_delta, is_per_channel: of its state.
        wide: which of q, k and v its model gives in float32 even if it computes in half precision.
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    is_delta: bool = False
    is_per_channel: bool = False
    wide: str = ""


KINDS = {
    "mamba2": Kind((2, 8), (128, 64), wide="v"),
    "lightning": Kind((4, 4), (128, 128)),
    "gated_delta_net": Kind((2, 4), (128, 128), is_delta=True, wide="qk"),
    "kda": Kind((4, 4), (128, 128), is_delta=True, is_per_channel=True, wide="qk"),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@dataclass
class Tokens:
    """Arguments of `scan`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def take(self, places: slice, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        fields = (self.q, self.k, self.v, self.g, self.beta)
        return tuple(None if field is None else change(field[places]) for field in fields)


def draw(kind: Kind, count: int, *, dtype: torch.dtype, decays: tuple[float, ...] = (0.3,), seed: int = 0) -> Tokens:
    """Keys and queries of length one; log decays between 0 and -decays, in turns."""
    random = torch.Generator().manual_seed(seed)
    (key_heads, value_heads), (key_dim, value_dim) = kind.heads, kind.dims

    def to(x: Tensor, name: str) -> Tensor:
        return x.to(torch.float32 if name in kind.wide else dtype).to(DEVICE)

    # Views of something wider, as models cut them out of their projections.
    qk = torch.randn(count, key_heads, 2, key_dim, generator=random)
    q, k = functional.normalize(qk, dim=-1).unbind(2)
    v = torch.randn(count, value_heads, value_dim + 1, generator=random)
    decay = torch.tensor(decays).repeat(-(-count // len(decays)))[:count]
    channels = key_dim if kind.is_per_channel else 1
    gates = torch.rand(count, value_heads, channels + 1, generator=random).to(DEVICE)
    g = (-decay.to(DEVICE)[:, None, None] * gates)[..., :-1]
    return Tokens(to(q, "q"), to(k, "k"), to(v, "v")[..., :-1], g, gates[..., -1] if kind.is_delta else None)


def seat_of(kind: Kind, rows: Sequence[tuple[int, int]], dtype: torch.dtype) -> Seat:
    batch = Batch(Case(rows, dtype=dtype, device=DEVICE))
    (_, heads), (key_dim, value_dim) = kind.heads, kind.dims
    shape = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    component = recurrent([0, 1], **shape, fmt=batch.case.fmt, conv=[("x", *conv_shape(kind))], conv_kernel=TAPS)
    seat = Seat(batch, ParallelContext(split=Split(), rank=0, device=torch.device(DEVICE)), [component])
    random = torch.Generator().manual_seed(1)
    for layer in (0, 1):
        for states in (seat.pool.state(layer).state, seat.pool.state(layer).conv["x"]):
            states.copy_(torch.randn(states.shape, generator=random))
            # Nothing may come of slots that no row reads.
            states[list({*range(len(states))} - {read for read, _ in batch.states})] = float("nan")
    return seat


def distance(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def unchanged(seat: Seat, states: Tensor, before: Tensor) -> bool:
    """Whether all slots but those that rows write are what they were."""
    kept = list({*range(len(states))} - {write for _, write in seat.batch.states})
    return torch.equal(states[kept].nan_to_num(7), before[kept].nan_to_num(7))


def check_scan(
    kind: Kind, rows: Sequence[tuple[int, int]], tokens: Tokens, *, dtype: torch.dtype, error: float
) -> None:
    from raycache.attention.recurrent_kernels import SHORT, KernelRecurrence

    seat = seat_of(kind, rows, dtype)
    view, before = seat.pool.state(1), seat.pool.state(1).state.clone()
    with torch.inference_mode():
        out = KernelRecurrence(StepLayout(seat.inputs)).scan(view, *tokens.take(slice(None), lambda x: x))
    assert out.dtype == tokens.v.dtype and out.shape == tokens.v.shape
    assert unchanged(seat, view.state, before)
    problems = []
    for row, (read, write) in zip(seat.inputs.rows, seat.batch.states, strict=True):
        places = slice(row.tokens.start, row.tokens.stop)
        state = before[read].double() if read >= 0 else torch.zeros_like(before[0]).double()
        right_out, right_state = scan(*tokens.take(places, Tensor.double), state)
        for name, found, right in (("out", out[places], right_out), ("state", view.state[write], right_state)):
            bound = error if len(row.tokens) > SHORT else max(EXACT, torch.finfo(out.dtype).eps if name == "out" else 0)
            if not distance(found, right) <= bound:
                problems.append(f"{len(row.tokens)} tokens from {row.start}, {name}: {distance(found, right):.1e}")
    assert not problems


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@each_kind
def test_scan_in_half_precision(kind: Kind, rows: Sequence[tuple[int, int]]) -> None:
    tokens = draw(kind, sum(count for _, count in rows), dtype=HALF)
    check_scan(kind, rows, tokens, dtype=HALF, error=ROUNDED)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@each_kind
def test_scan_in_float32(kind: Kind, rows: Sequence[tuple[int, int]]) -> None:
    tokens = draw(kind, sum(count for _, count in rows), dtype=torch.float32)
    check_scan(kind, rows, tokens, dtype=torch.float32, error=EXACT)


@pytest.mark.parametrize(
    "decays", [(20.0,), (0.0,), (1e-3, 1e-3, 20.0), (0.01, float("inf"), 0.01, 1e4)], ids=lambda decays: str(decays)
)
@each_kind
def test_every_decay_keeps_its_digits(kind: Kind, decays: tuple[float, ...]) -> None:
    tokens = draw(kind, sum(count for _, count in MIXED), dtype=HALF, decays=decays)
    check_scan(kind, MIXED, tokens, dtype=HALF, error=ROUNDED)


def test_what_has_no_kernel_is_computed_by_the_readable_version() -> None:
    for kind, dtype in [
        (replace(KINDS["kda"], is_delta=False), HALF),
        (replace(KINDS["gated_delta_net"], dims=(320, 64)), HALF),
        (KINDS["lightning"], torch.float64),
    ]:
        tokens = draw(kind, sum(count for _, count in MIXED), dtype=dtype)
        check_scan(kind, MIXED, tokens, dtype=dtype, error=ROUNDED if dtype == HALF else EXACT)


# --- the convolution --------------------------------------------------------------------------------------------------

TAPS = 4


def conv_shape(kind: Kind) -> tuple[int, int]:
    return kind.heads[1], kind.dims[1] - 4  # no power of two


def check_convolution(seat: Seat, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    view, before = seat.pool.state(1), seat.pool.state(1).conv["x"].clone()
    with torch.inference_mode():
        y = KernelRecurrence(StepLayout(seat.inputs)).convolve(view, "x", x, weight, bias)
    assert y.dtype == x.dtype and y.shape == x.shape
    assert unchanged(seat, view.conv["x"], before)
    taps, offset = weight.double().flatten(0, 1), None if bias is None else bias.double().flatten()
    for row, (read, write) in zip(seat.inputs.rows, seat.batch.states, strict=True):
        places = slice(row.tokens.start, row.tokens.stop)
        state = (before[read] if read >= 0 else torch.zeros_like(before[0])).double().flatten(0, 1)
        right, after = causal_conv(x[places].double().flatten(1), state, taps, offset)
        assert distance(y[places].flatten(1), right) <= torch.finfo(x.dtype).eps
        assert torch.equal(view.conv["x"][write].double().flatten(0, 1), after)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [*BATCHES.values(), FEW[:2], [(4, 2), (9, 3), (0, 2), (0, 4)]], ids=str)
def test_convolution(rows: Sequence[tuple[int, int]], dtype: torch.dtype, has_bias: bool) -> None:
    seat = seat_of(KINDS["mamba2"], rows, dtype)
    random = torch.Generator().manual_seed(3)
    heads, dim = conv_shape(KINDS["mamba2"])
    count = sum(count for _, count in rows)
    x = torch.randn(count, heads, 2, dim, generator=random).to(dtype).to(DEVICE).unbind(2)[1]
    weight, bias = (torch.randn(*shape, generator=random).to(DEVICE) for shape in ((heads, dim, TAPS), (heads, dim)))
    check_convolution(seat, x, weight, bias if has_bias else None)


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [5, 0])
@each_kind
def test_a_state_is_kept_behind_each_draft(kind: Kind, start: int) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    rows = [(start, 4), (9, 1), (30, 3), *[(0, 1)] * 6]
    seat = seat_of(kind, rows, HALF)
    used = {slot for pair in seat.batch.states for slot in pair}
    free = [slot for slot in range(seat.batch.num_states) if slot not in used]
    drafted = list(seat.inputs.rows)
    for i in (0, 2):
        row, num_drafts = drafted[i], len(drafted[i].tokens) - 1
        # The first token may write where the row reads.
        write = row.read_state if i == 2 else row.write_state
        drafted[i] = replace(row, write_state=write, draft_states=tuple(free.pop() for _ in range(num_drafts)))
    layout = StepLayout(replace(seat.inputs, rows=tuple(drafted)))
    view = seat.pool.state(1)
    states, inputs = view.state.clone(), view.conv["x"].clone()
    tokens = draw(kind, sum(count for _, count in rows), dtype=HALF)
    x = torch.randn(len(tokens.q), *conv_shape(kind)).to(HALF).to(DEVICE)
    weight = torch.randn(*conv_shape(kind), TAPS).to(DEVICE)
    plan = KernelRecurrence(layout)
    with torch.inference_mode():
        out = plan.scan(view, *tokens.take(slice(None), lambda field: field))
        y = plan.convolve(view, "x", x, weight, None)
    for row in drafted:
        kept = (row.write_state, *row.draft_states)
        for count, slot in enumerate(kept, len(row.tokens) - len(kept) + 1):
            places = slice(row.tokens.start, row.tokens.start + count)
            before = states[row.read_state] if row.read_state >= 0 else torch.zeros_like(states[0])
            right, state = scan(*tokens.take(places, Tensor.double), before.double())
            assert distance(out[places], right) <= torch.finfo(HALF).eps + EXACT
            assert distance(view.state[slot], state) <= EXACT
            old = inputs[row.read_state] if row.read_state >= 0 else torch.zeros_like(inputs[0])
            taps = weight.double().flatten(0, 1)
            right, after = causal_conv(x[places].double().flatten(1), old.double().flatten(0, 1), taps, None)
            assert distance(y[places].flatten(1), right) <= torch.finfo(HALF).eps
            assert torch.equal(view.conv["x"][slot].double().flatten(0, 1), after)


# --- rows that go on where others of the step end ---------------------------------------------------------------------

SEQUENCES = {
    "one": [[200, 64, 33, 130]],
    "two": [[64, 128, 5], [70, 100, 64, 1]],
    "behind few tokens": [[20, 40, 17, 70], [16, 33]],
    "among others": [[33, 40], [2, 70, 90], [1], [32, 32], [100], [3, 1, 64]],
}
each_step = pytest.mark.parametrize("lengths", SEQUENCES.values(), ids=SEQUENCES)


def in_turn(kind: Kind, lengths: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Seat, StepLayout]:
    """A step with rows of these lengths per sequence; the second sequence has a state, the others begin."""
    seat = seat_of(kind, [(0, count) for counts in lengths for count in counts], dtype)
    rows, found, at = list(seat.inputs.rows), [], 0
    for number, counts in enumerate(lengths):
        before = seat.batch.states[at][0] if number == 1 else -1
        for row in rows[at : at + len(counts)]:
            found.append(replace(row, read_state=before))
            before = row.write_state
        at += len(counts)
    for layer in (0, 1):
        seat.pool.state(layer).state.nan_to_num_(0.5)
        seat.pool.state(layer).conv["x"].nan_to_num_(0.5)
    return seat, StepLayout(replace(seat.inputs, rows=tuple(found)))


@each_step
@each_kind
def test_rows_go_on_where_others_end(kind: Kind, lengths: Sequence[Sequence[int]]) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    seat, layout = in_turn(kind, lengths, HALF)
    tokens = draw(kind, layout.inputs.num_tokens, dtype=HALF)
    view = seat.pool.state(1)
    states, inputs = view.state.double(), view.conv["x"].double()
    x = torch.randn(len(tokens.q), *conv_shape(kind)).to(HALF).to(DEVICE)
    weight = torch.randn(*conv_shape(kind), TAPS).to(DEVICE)
    with torch.inference_mode():
        plan = KernelRecurrence(layout)
        out = plan.scan(view, *tokens.take(slice(None), lambda field: field))
        y = plan.convolve(view, "x", x, weight, None)
    for row in layout.inputs.rows:
        places = slice(row.tokens.start, row.tokens.stop)
        is_fresh, write = row.read_state < 0, row.write_state
        before = torch.zeros_like(states[0]) if is_fresh else states[row.read_state]
        right, states[write] = scan(*tokens.take(places, Tensor.double), before)
        assert distance(out[places], right) <= ROUNDED and distance(view.state[write], states[write]) <= ROUNDED
        old = (torch.zeros_like(inputs[0]) if is_fresh else inputs[row.read_state]).flatten(0, 1)
        right, after = causal_conv(x[places].double().flatten(1), old, weight.double().flatten(0, 1), None)
        inputs[write] = after.view_as(inputs[write])
        assert distance(y[places].flatten(1), right) <= torch.finfo(HALF).eps
        assert torch.equal(view.conv["x"][write].double(), inputs[write])


@pytest.mark.parametrize("bound", [None, -5.0])
@each_step
@pytest.mark.parametrize("name", ["gated_delta_net", "kda"])
def test_gates_and_convolutions_of_a_delta_rule(
    name: str, lengths: Sequence[Sequence[int]], bound: float | None
) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    kind = replace(KINDS[name], wide="")
    (key_heads, heads), (key_dim, dim) = kind.heads, kind.dims
    _, layout = in_turn(kind, lengths, HALF)
    count, channels = layout.inputs.num_tokens, key_dim if kind.is_per_channel else 1
    random = torch.Generator().manual_seed(5)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype).to(DEVICE)

    taps = [drawn(*shape, TAPS) for shape in ((key_heads, key_dim), (key_heads, key_dim), (heads, dim))]
    weights = DeltaRule(*taps, drawn(heads, 1).exp(), drawn(heads, channels), bound)
    q, k = drawn(count, key_heads, 2, key_dim, dtype=HALF).unbind(2)
    v, decay = drawn(count, heads, dim, dtype=HALF), drawn(count, heads, channels, dtype=HALF)
    beta = drawn(count, heads, 2, dtype=HALF)[..., 0]
    views = state_views(layout, heads, {"q": (key_heads, key_dim), "k": (key_heads, key_dim), "v": (heads, dim)})
    with torch.inference_mode():
        found, right = (
            plan.delta_rule(view, weights, q=q, k=k, v=v, decay=decay, beta=beta)
            for plan, view in zip((KernelRecurrence(layout), Recurrence(layout)), views, strict=True)
        )
    assert distance(found, right.double()) <= ROUNDED
    assert distance(views[0].state, views[1].state.double()) <= ROUNDED
    assert all(torch.equal(views[0].conv[part], kept) for part, kept in views[1].conv.items())


@each_step
def test_a_state_space_in_rows_that_go_on(lengths: Sequence[Sequence[int]]) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    kind = KINDS["mamba2"]
    (groups, heads), (key_dim, dim) = kind.heads, kind.dims
    _, layout = in_turn(kind, lengths, HALF)
    count, random = layout.inputs.num_tokens, torch.Generator().manual_seed(6)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype).to(DEVICE)

    shapes = {"x": (heads, dim), "b": (groups, key_dim), "c": (groups, key_dim)}
    taps = [Taps(drawn(*shape, TAPS), drawn(*shape)) for shape in shapes.values()]
    weights = StateSpace(*taps, drawn(heads), -drawn(heads).exp(), drawn(heads), (0.0, 0.5))
    x, b, c = (drawn(count, *shape, dtype=HALF) for shape in shapes.values())
    dt = drawn(count, heads, dtype=HALF)
    views = state_views(layout, heads, shapes, dim=dim)
    with torch.inference_mode():
        found, right = (
            plan.state_space(view, weights, x=x, b=b, c=c, dt=dt)
            for plan, view in zip((KernelRecurrence(layout), Recurrence(layout)), views, strict=True)
        )
    assert distance(found, right.double()) <= ROUNDED
    assert distance(views[0].state, views[1].state.double()) <= ROUNDED
    assert all(torch.equal(views[0].conv[part], kept) for part, kept in views[1].conv.items())


def state_views(
    layout: StepLayout, heads: int, parts: dict[str, tuple[int, int]], *, dim: int = 128
) -> list[StateView]:
    """Two of the same states."""
    random, fmt = torch.Generator().manual_seed(7), Case([(0, 1)], dtype=HALF).fmt
    conv = [(part, *shape) for part, shape in parts.items()]
    component = recurrent([0], heads=heads, key_dim=128, value_dim=dim, fmt=fmt, conv=conv, conv_kernel=TAPS)
    slots = 1 + max(slot for row in layout.inputs.rows for slot in (row.read_state, row.write_state))
    fields = {f"conv_{part}": torch.randn(slots, *shape, TAPS - 1, generator=random) for part, shape in parts.items()}
    fields = {name: inputs.to(HALF).to(DEVICE) for name, inputs in fields.items()}
    fields["state"] = torch.randn(slots, heads, 128, dim, generator=random).to(DEVICE)
    return [StateView(component, {name: kept.clone() for name, kept in fields.items()}) for _ in range(2)]


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


@each_kind
def test_a_recorded_step_reads_and_writes_other_slots_when_replayed(kind: Kind) -> None:
    from raycache.attention.recurrent_kernels import KernelRecurrence

    rows = [(start, 1) for start in (3, 4, 5, 6)]
    seat = seat_of(kind, rows, HALF)
    view = seat.pool.state(1)
    view.state.nan_to_num_(0.5)
    view.conv["x"].nan_to_num_(0.5)
    tokens = draw(kind, len(rows), dtype=HALF)
    x = torch.randn(len(rows), *conv_shape(kind)).to(HALF).to(DEVICE)
    weight = torch.randn(*conv_shape(kind), TAPS).to(DEVICE)
    plan = KernelRecurrence(StepLayout(seat.inputs))
    arguments = tokens.take(slice(None), lambda field: field)
    graph, found = record(lambda: (plan.scan(view, *arguments), plan.convolve(view, "x", x, weight, None)))
    for reads, writes in ([0, 1, 2, 3], [0, 1, 2, 3]), ([5, 5, 0, 1], [6, 7, 0, 4]), ([7, 6, 5, 4], [3, 6, 5, 2]):
        states, inputs = view.state.clone(), view.conv["x"].clone()
        seat.inputs.read_states.copy_(torch.tensor(reads))
        seat.inputs.write_states.copy_(torch.tensor(writes))
        graph.replay()
        for i, (read, write) in enumerate(zip(reads, writes, strict=True)):
            token = slice(i, i + 1)
            right, state = scan(*tokens.take(token, Tensor.double), states[read].double())
            assert distance(found[0][token], right) <= torch.finfo(found[0].dtype).eps + EXACT
            assert distance(view.state[write], state) <= EXACT
            kept = inputs[read].double().flatten(0, 1)
            right, after = causal_conv(x[token].double().flatten(1), kept, weight.double().flatten(0, 1), None)
            assert distance(found[1][token].flatten(1), right) <= torch.finfo(HALF).eps
            assert torch.equal(view.conv["x"][write].double().flatten(0, 1), after)
        tokens.v.normal_()
        x.normal_()


def record(run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """A graph of what `run` launches, and where it leaves what `run` gave."""
    with torch.no_grad():
        run()  # builds kernels, which a recording may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    return graph, found
