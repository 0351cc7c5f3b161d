"""Recurrent layers of every backend against loops over tokens in float64, with states on slots and cp ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raycache.attention.base import AttentionBackend, AttentionStep
from raycache.memory.component import recurrent
from tests.oracle.attention import (
    DTYPES,
    MIXED,
    Batch,
    Case,
    Seat,
    close,
    each_backend,
    each_device,
    each_dtype,
    skip_unless_declared,
)

ERROR = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
HEADS, KEY, VALUE, TAPS = 8, 4, 3, 4  # value heads; half as many key heads
FIELDS = ("q", "k", "v", "g", "beta")


def scan_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """outs [n, Hv, Dv], and the states [n + 1, Hv, Dk, Dv] before each token and after the last."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    outs, states = [], [torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)]
    for t in range(len(q)):
        state = states[-1].clone()
        out = torch.empty(HEADS, VALUE, dtype=torch.float64)
        for head in range(HEADS):
            key, query = k[t, head // 2], q[t, head // 2]
            state[head] *= g[t, head].exp()[:, None]
            change = v[t, head]
            if beta is not None:
                change = beta[t, head].double() * (change - state[head].T @ key)
            state[head] += torch.outer(key, change)
            out[head] = state[head].T @ query
        outs.append(out)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def convolve_by_token(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[n, H, D] with [H, D, K] -> [n, H, D]."""
    padded = torch.cat([torch.zeros(TAPS - 1, *x.shape[1:], dtype=torch.float64), x.double()])
    y = sum(padded[tap : tap + len(x)] * weight[..., tap].double() for tap in range(TAPS))
    assert isinstance(y, Tensor)
    return y if bias is None else y + bias.double()


class Sequences:
    """Random inputs of all tokens of a case, and what a recurrent layer makes of them."""

    def __init__(self, case: Case, *, has_beta: bool, per_channel: bool, has_bias: bool = True) -> None:
        self.case = case
        self.q, self.k = (case.draw(HEADS // 2, KEY, salt=salt) for salt in (1, 2))
        self.q, self.k = ([x / x.norm(dim=-1, keepdim=True) for x in rows] for rows in (self.q, self.k))
        self.v = case.draw(HEADS, VALUE, salt=3)
        wide = torch.promote_types(case.dtype, torch.float32)
        self.g = [-x.abs().to(wide) / 4 for x in case.draw(HEADS, KEY if per_channel else 1, salt=4)]
        self.beta = [x.sigmoid() for x in case.draw(HEADS, salt=5)] if has_beta else None
        self.weight = case.draw_one(HEADS, VALUE, TAPS, salt=6)
        self.bias = case.draw_one(HEADS, VALUE, salt=7) if has_bias else None
        self.component = recurrent(
            [0], heads=HEADS, key_dim=KEY, value_dim=VALUE, fmt=case.fmt, conv=[("v", HEADS, VALUE)], conv_kernel=TAPS
        )

    def right(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the convolution and the scan: new outs; and the state after every token."""
        beta = None if self.beta is None else self.beta[row]
        outs, states = scan_by_token(self.q[row], self.k[row], self.v[row], self.g[row], beta)
        start = self.case.rows[row][0]
        return convolve_by_token(self.v[row], self.weight, self.bias)[start:], outs[start:], states

    def convolution_state(self, row: int, length: int) -> Tensor:
        """The last inputs of the first `length` tokens: [H, D, K - 1]."""
        padded = torch.cat([torch.zeros(TAPS - 1, HEADS, VALUE, dtype=self.case.dtype), self.v[row][:length]])
        return padded[length:].permute(1, 2, 0)


def check(backend: AttentionBackend, sequences: Sequences) -> None:
    case = sequences.case
    batch = Batch(case)
    rights = [sequences.right(row) for row in range(len(case.rows))]
    names = [name for name in FIELDS if getattr(sequences, name) is not None]

    def work(seat: Seat, step: AttentionStep) -> Tensor:
        view = seat.pool.state(0)
        count = HEADS // case.cp
        heads = slice(seat.ctx.cp.rank * count, (seat.ctx.cp.rank + 1) * count)
        view.state.fill_(float("nan"))
        view.conv["v"].fill_(float("nan"))
        for i, (read, _) in enumerate(batch.states):
            start = case.rows[i][0]
            if read >= 0:
                view.state[read] = rights[i][2][start, heads].to(view.state.dtype)
                view.conv["v"][read] = sequences.convolution_state(i, start)[heads]
        before = view.state.clone(), view.conv["v"].clone()

        fields = {name: step.exchange.to_heads(seat.local(case.new(getattr(sequences, name))))[0] for name in names}
        weight = sequences.weight[heads].to(case.device)
        bias = None if sequences.bias is None else sequences.bias[heads].to(case.device)
        y = step.recurrent.convolve(view, "v", fields["v"], weight, bias)
        out = step.recurrent.scan(view, fields["q"], fields["k"], fields["v"], fields["g"], fields.get("beta"))
        assert y.dtype == out.dtype == case.dtype and y.shape == out.shape == fields["v"].shape

        written = {write for _, write in batch.states}
        for slot in set(range(batch.num_states)) - written:
            assert torch.equal(view.state[slot].nan_to_num(7), before[0][slot].nan_to_num(7)), "not its slot"
            assert torch.equal(view.conv["v"][slot].nan_to_num(7), before[1][slot].nan_to_num(7)), "not its slot"
        for i, (_, write) in enumerate(batch.states):
            close(view.state[write].cpu(), rights[i][2][-1, heads], ERROR[case.dtype])
            assert torch.equal(view.conv["v"][write].cpu(), sequences.convolution_state(i, len(sequences.v[i]))[heads])
        return torch.cat([step.exchange.to_tokens(y), step.exchange.to_tokens(out)], dim=2)

    for found, (y, out, _) in zip(batch.run(backend, [sequences.component], work), rights, strict=True):
        close(found[..., :VALUE], y, ERROR[case.dtype])
        close(found[..., VALUE:], out, ERROR[case.dtype])


@each_backend
@given(
    st.lists(st.tuples(st.just(0) | st.integers(0, 40), st.just(1) | st.integers(1, 90)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**20),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_batch_goes_on_from_its_states_and_keeps_them(
    backend: AttentionBackend,
    rows: list[tuple[int, int]],
    cp: int,
    dtype: torch.dtype,
    seed: int,
    has_beta: bool,
    per_channel: bool,
    has_bias: bool,
) -> None:
    case = Case(rows, cp=cp, dtype=dtype, seed=seed)
    check(backend, Sequences(case, has_beta=has_beta, per_channel=per_channel, has_bias=has_bias))


@each_backend
@pytest.mark.parametrize("has_beta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@each_dtype
@each_device
def test_states_in_every_dtype(backend: AttentionBackend, device: str, dtype: str, cp: int, has_beta: bool) -> None:
    skip_unless_declared(backend, dtype, device)
    case = Case(MIXED, cp=cp, dtype=DTYPES[dtype], device=device)
    check(backend, Sequences(case, has_beta=has_beta, per_channel=False))
