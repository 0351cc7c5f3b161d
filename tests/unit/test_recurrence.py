"""Recurrent layers against their definition, token by token in float64, and against the functions of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next import modeling_qwen3_next

from raycache.attention.recurrence import CHUNK, CPU_RUN, causal_conv, causal_conv_step, scan, step

LENGTHS = (1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 37, CPU_RUN + 1)
ERROR = {torch.float32: 5e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# --- the slow twin ----------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """Arguments of `scan`; `state` is that before the first token."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    state: Tensor

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        beta = None if self.beta is None else self.beta[start:stop]
        return self.q[start:stop], self.k[start:stop], self.v[start:stop], self.g[start:stop], beta

    def cast(self, to: torch.dtype | str) -> Inputs:
        beta = None if self.beta is None else self.beta.to(to)
        return Inputs(self.q.to(to), self.k.to(to), self.v.to(to), self.g.to(to), beta, self.state.to(to))


def draw(
    length: int,
    *,
    delta: bool,
    channels: bool,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 24),
    decay: float = 0.3,
    seed: int = 0,
) -> Inputs:
    """Random float64 arguments, keys of length one, log decays between 0 and -decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    key_heads, value_heads = heads
    key_dim, value_dim = dims
    return Inputs(
        q=functional.normalize(normal(length, key_heads, key_dim), dim=-1),
        k=functional.normalize(normal(length, key_heads, key_dim), dim=-1),
        v=normal(length, value_heads, value_dim),
        g=-decay * torch.rand(length, value_heads, key_dim if channels else 1, generator=generator).double(),
        beta=torch.rand(length, value_heads, generator=generator).double() if delta else None,
        state=normal(value_heads, key_dim, value_dim),
    )


def by_definition(x: Inputs) -> tuple[Tensor, Tensor]:
    """One token and one head at a time."""
    x = x.cast(torch.float64)
    length, heads = x.v.shape[:2]
    group = heads // x.k.shape[1]
    out, states = torch.empty_like(x.v), x.state.clone()
    for t in range(length):
        for h in range(heads):
            q, k, state = x.q[t, h // group], x.k[t, h // group], states[h]
            state = torch.exp(x.g[t, h])[:, None] * state
            write = x.v[t, h] if x.beta is None else x.beta[t, h] * (x.v[t, h] - state.T @ k)
            states[h] = state + torch.outer(k, write)
            out[t, h] = states[h].T @ q
    return out, states


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], *, error: float) -> None:
    for name, mine, theirs in zip(("out", "state"), found, wanted, strict=True):
        assert mine.shape == theirs.shape, name
        worst = (mine.double().cpu() - theirs.double().cpu()).abs().max() / theirs.abs().max()
        assert worst <= error, f"{name}: {worst:.1e} of the largest value"


# --- the state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_scan_equals_the_definition(length: int, delta: bool, channels: bool, device: str) -> None:
    x = draw(length, delta=delta, channels=channels)
    wanted = by_definition(x)
    for dtype in (torch.float32, torch.float64):
        args = x.cast(dtype).cast(device)
        with torch.inference_mode():
            found = scan(*args.tokens(0, length), args.state)
        assert found[0].dtype == found[1].dtype == dtype
        assert_close(found, wanted, error=ERROR[dtype])


@pytest.mark.parametrize("decay", [0.0, 1e-6, 5.0, 100.0, 1e4])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_every_decay_is_exact(delta: bool, channels: bool, decay: float) -> None:
    x = draw(2 * CHUNK + 5, delta=delta, channels=channels, decay=decay)
    x.g = x.g * (torch.arange(len(x.g)) % 3 == 0)[:, None, None]  # large ones among zeros: no digit may be lost
    x = x.cast(torch.float32)
    assert_close(scan(*x.tokens(0, len(x.v)), x.state), by_definition(x), error=ERROR[torch.float32])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_a_decay_of_minus_infinity_forgets_all(delta: bool, channels: bool) -> None:
    x = draw(CHUNK, delta=delta, channels=channels).cast(torch.float32)
    x.g[20:30:3] = float("-inf")
    out, state = scan(*x.tokens(0, CHUNK), x.state)
    assert_close((out, state), by_definition(x), error=ERROR[torch.float32])
    fresh = scan(*x.tokens(29, CHUNK), torch.zeros_like(x.state))
    assert_close((out[29:], state), fresh, error=ERROR[torch.float32])


@given(data=st.data())
def test_sequences_may_be_cut_anywhere(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 2 * CHUNK + 10), label="length")
    cuts = data.draw(st.lists(st.integers(1, length), max_size=4), label="cuts")
    x = draw(
        length,
        delta=data.draw(st.booleans(), label="delta"),
        channels=data.draw(st.booleans(), label="channels"),
        heads=data.draw(st.sampled_from([(1, 1), (1, 3), (2, 4)]), label="heads"),
        dims=data.draw(st.sampled_from([(1, 1), (4, 3), (8, 8)]), label="dims"),
        decay=data.draw(st.sampled_from([0.01, 1.0, 100.0]), label="decay"),
    )
    state, outs = x.state, []
    for start, stop in pairwise(sorted({0, *cuts, length})):
        out, state = scan(*x.tokens(start, stop), state)
        outs.append(out)
    assert_close((torch.cat(outs), state), by_definition(x), error=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_a_step_of_many_sequences_is_a_scan_of_one_token_each(delta: bool, channels: bool, device: str) -> None:
    x = draw(5, delta=delta, channels=channels).cast(device)
    states = torch.stack([x.state * n for n in range(5)])
    with torch.inference_mode():
        outs, after = step(*x.tokens(0, 5), states)
    for n in range(5):
        alone = Inputs(*x.tokens(n, n + 1), states[n])
        assert_close((outs[n : n + 1], after[n]), scan(*alone.tokens(0, 1), alone.state), error=1e-14)
        assert_close((outs[n : n + 1], after[n]), by_definition(alone.cast("cpu")), error=1e-14)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_float32_keeps_its_digits_at_real_size(delta: bool, channels: bool) -> None:
    x = draw(512, delta=delta, channels=channels, heads=(1, 2), dims=(128, 128)).cast(torch.float32)
    assert_close(scan(*x.tokens(0, 512), x.state), by_definition(x), error=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [False, True])
def test_half_precision_is_computed_in_float32_and_keeps_its_dtypes(dtype: torch.dtype, channels: bool) -> None:
    x = draw(2 * CHUNK, delta=True, channels=channels).cast(dtype)
    x.g, x.state = x.g.float(), x.state.float()
    wanted = by_definition(x)
    out, state = scan(*x.tokens(0, 2 * CHUNK), x.state)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    assert_close((out, state), wanted, error=ERROR[dtype])
    assert_close((wanted[0], state), wanted, error=ERROR[torch.float32])
    out, states = step(*x.tokens(0, 3), x.state.expand(3, -1, -1, -1).to(dtype))
    assert (out.dtype, states.dtype) == (dtype, dtype)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_arguments_are_not_modified_and_not_returned(delta: bool, channels: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        x = draw(CHUNK + 1, delta=delta, channels=channels, heads=(3, 3)).cast(dtype)
        args = (*x.tokens(0, CHUNK + 1), x.state)
        many = (*x.tokens(0, 2), torch.stack([x.state, x.state]))
        for call, given_args in ((scan, args), (step, many)):
            before = [None if a is None else a.clone() for a in given_args]
            for result in call(*given_args):
                result.fill_(7)
            assert all(a is b or torch.equal(a, b) for a, b in zip(given_args, before, strict=True))


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 50, 150])
def test_scan_equals_kimi_delta_attention_of_transformers(length: int) -> None:
    x = draw(length, delta=True, channels=True, heads=(3, 3), dims=(32, 32)).cast(torch.float32)
    found = scan(x.q * 32**-0.5, x.k, x.v, x.g, x.beta, x.state)
    for theirs in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        out, state = getattr(modeling_kimi_linear, theirs)(
            *(a[None] for a in (x.q, x.k, x.v)),
            g=x.g[None],
            beta=x.beta[None],
            initial_state=x.state[None],
            output_final_state=True,
        )
        assert_close(found, (out[0], state[0]), error=ERROR[torch.float32])


@pytest.mark.parametrize("length", [1, 50, 150])
def test_scan_equals_the_gated_delta_rule_of_transformers(length: int) -> None:
    x = draw(length, delta=True, channels=False, heads=(2, 4), dims=(32, 16)).cast(torch.float32)
    found = scan(x.q * 32**-0.5, x.k, x.v, x.g, x.beta, x.state)
    for theirs in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        out, state = getattr(modeling_qwen3_next, theirs)(
            *(a[None] for a in (x.q, x.k, x.v)),
            g=x.g[None, ..., 0],
            beta=x.beta[None],
            initial_state=x.state[None],
            output_final_state=True,
        )
        assert_close(found, (out[0], state[0]), error=ERROR[torch.float32])


@pytest.mark.parametrize("length", [1, 50, 150])
def test_scan_equals_mamba2_of_transformers(length: int) -> None:
    x = draw(length, delta=False, channels=False, heads=(2, 6), dims=(16, 8)).cast(torch.float32)
    dt, decay = x.v[..., 0].abs(), -torch.arange(1.0, 7.0)
    out, state = modeling_mamba2.mamba2_chunk_scan(
        *(a[None] for a in (x.v, dt)),
        decay,
        *(a[None] for a in (x.k, x.q)),
        chunk_size=32,
        initial_states=x.state.mT[None],
        return_final_states=True,
    )
    found = scan(x.q, x.k, dt[..., None] * x.v, (dt * decay)[..., None], None, x.state)
    assert_close(found, (out[0], state[0].mT), error=ERROR[torch.float32])


def test_scan_equals_lightning_attention_of_transformers() -> None:
    torch.manual_seed(0)
    config = MiniMaxConfig(hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=3, block_size=16)
    layer = MiniMaxLightningAttention(config, layer_idx=1).eval()
    hidden = torch.randn(1, 70, 32)
    mixed = {}
    layer.norm.register_forward_pre_hook(lambda _, args: mixed.update(out=args[0]))
    with torch.no_grad():
        _, state = layer(hidden, None, None)
        q, k, v = functional.silu(layer.qkv_proj(hidden[0])).unflatten(-1, (4, 24)).split(8, dim=-1)
        g = -layer.slope_rate.view(1, 4, 1).expand(70, -1, -1)
        found = scan(q, k, v, g, None, torch.zeros(4, 8, 8))
    assert_close(found, (mixed["out"][0].unflatten(-1, (4, 8)), state[0]), error=ERROR[torch.float32])


# --- the convolution --------------------------------------------------------------------------------------------------


def conv_inputs(length: int, *, taps: int, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Arguments x, state, weight, bias of `causal_conv` for 6 channels, float64."""
    generator = torch.Generator().manual_seed(length * 10 + taps)
    shapes = ((length, 6), (6, taps - 1), (6, taps), (6,))
    x, state, weight, offset = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, state, weight, offset if bias else None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 17])
def test_causal_conv_equals_conv1d_over_the_state_and_the_inputs(
    length: int, taps: int, bias: bool, device: str
) -> None:
    x, state, weight, offset = conv_inputs(length, taps=taps, bias=bias)
    history = torch.cat([state, x.T], dim=1)
    wanted = functional.conv1d(history[None], weight[:, None], offset, groups=6)[0].T, history[:, length:]
    on_device = [None if a is None else a.to(device) for a in (x, state, weight, offset)]
    with torch.inference_mode():
        y, after = causal_conv(*on_device)
    assert torch.allclose(y.cpu(), wanted[0], atol=1e-13)
    assert torch.equal(after.cpu(), wanted[1])


@given(length=st.integers(1, 12), cuts=st.lists(st.integers(1, 11), max_size=4), taps=st.integers(1, 5))
def test_convolved_sequences_may_be_cut_anywhere(length: int, cuts: list[int], taps: int) -> None:
    x, state, weight, bias = conv_inputs(length, taps=taps, bias=True)
    wanted = causal_conv(x, state, weight, bias)
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    ys = []
    for start, stop in pairwise(bounds):
        y, state = causal_conv(x[start:stop], state, weight, bias)
        ys.append(y)
    assert torch.allclose(torch.cat(ys), wanted[0], atol=1e-13)
    assert torch.equal(state, wanted[1])


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_conv_step_of_many_sequences_is_a_conv_of_one_token_each(taps: int, bias: bool) -> None:
    x, state, weight, offset = conv_inputs(5, taps=taps, bias=bias)
    states = torch.stack([state * n for n in range(5)])
    ys, after = causal_conv_step(x, states, weight, offset)
    for n in range(5):
        y, alone = causal_conv(x[n : n + 1], states[n], weight, offset)
        assert torch.allclose(ys[n : n + 1], y, atol=1e-13)
        assert torch.equal(after[n], alone)


def test_conv_states_are_new_keep_their_dtype_and_leave_the_arguments_alone() -> None:
    x, state, weight, bias = conv_inputs(2, taps=4, bias=True)
    x, weight, bias, state = x.bfloat16(), weight.bfloat16(), bias.bfloat16(), state.float()
    for call, history in ((causal_conv, state), (causal_conv_step, torch.stack([state, state]))):
        before = [a.clone() for a in (x, history, weight, bias)]
        y, after = call(x, history, weight, bias)
        assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
        assert after.untyped_storage().nbytes() == history.numel() * 4
        after.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip((x, history, weight, bias), before, strict=True))
