"""What small operations do where their kernels cannot be had; the kernels themselves are in tests/gpu."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import raycache.layers
from raycache.layers import fused


def test_a_machine_without_triton_is_told_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "raycache.layers.kernels", raising=False)
    monkeypatch.delattr(raycache.layers, "kernels", raising=False)
    fused._kernels.cache_clear()
    assert [fused._kernels() for _ in range(2)] == [None, None]
    fused._kernels.cache_clear()
    (line,) = caplog.messages
    assert line.startswith("small operations between matrix products use torch, which is slower: Triton: import of")


def test_a_clamped_silu_cuts_off_its_gate_above_and_the_other_factor_on_both_sides() -> None:
    values = [-9.0, -2.5, -0.5, 0.0, 0.5, 1.5, 2.5, 9.0]
    pairs = [(gate, up) for gate in values for up in values]
    packed = torch.tensor([[gate for gate, _ in pairs] + [up for _, up in pairs]], dtype=torch.float64)
    plain = [min(gate / (1 + math.exp(-gate)), 2.0) * max(-2.0, min(up, 2.0)) for gate, up in pairs]
    assert fused.silu_clamped(packed.clone(), limit=2.0)[0].tolist() == pytest.approx(plain, abs=1e-12)
    assert fused.silu_gated(packed.clone())[0].tolist() != pytest.approx(plain, abs=1e-2)
