"""What small operations do where their kernels cannot be had; the kernels themselves are in tests/gpu."""

from __future__ import annotations

import sys

import pytest

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
    assert line.startswith("norms, activations and positions are computed by torch, which is slower: Triton: import of")
