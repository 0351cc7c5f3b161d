"""What ranks have reserved in GPU memory is taken over by those like them, which run fewer layers then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raycache.config import Config
from raycache.deployment.deployment import deploy
from raycache.deployment.memory_use import MemoryUse
from raycache.models.decoder import Decoder, _Skipped
from raycache.rank import build
from raycache.rank.member import Member, alone
from tests.oracle.families import make_family

GIB = 1 << 30


def member() -> tuple[Member, MemoryUse]:
    """A rank alone on a GPU of 64 GiB, of which nothing is taken; it computes on the CPU."""
    use = MemoryUse(torch.device("cpu"), total=64 * GIB, measure=lambda: 64 * GIB)
    return replace(alone(), use=use), use


def test_reserved_memory_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []

    def forward(self: Decoder, *of: object) -> torch.Tensor:
        layers.append(sum(not isinstance(part, _Skipped) for part in self._parts) // 2)
        return run(self, *of)  # type: ignore[arg-type]

    run = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(
        "raycache.rank.peak._peak", lambda rank, plan: rank.execute(plan, plan.masks_allowing_all()).size << 20
    )
    folder = make_family(tmp_path / "llama", "llama", num_hidden_layers=6)
    config = Config(model=str(folder), device="cpu", max_running=4, max_step_tokens=64, max_model_len=128)
    deployment = deploy(config, device_type="cpu")

    first, use = member()
    loaded = build.load(deployment, first)
    num_pages = loaded.measure()
    reserved = dict(loaded.reserved)
    assert reserved["activations"] > 0 and set(layers) == {6}

    layers.clear()
    second, taken_over = member()
    again = build.load(deployment, second)
    assert again.measure(reserved) == num_pages
    assert again.reserved == reserved == taken_over.kept == use.kept
    assert set(layers) == {again.model.num_layers_needed}
    assert again.model.num_layers_needed < 6
