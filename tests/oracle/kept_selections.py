"""How many selections of indexers a step keeps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from raycache.attention.torch_ref import TorchStep


def count_selections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, with each selection, how many earlier ones are still in memory."""
    made: list[weakref.ref[torch.Tensor]] = []
    kept: list[int] = []
    select = TorchStep.select

    def noted(*args: Any, **kwargs: Any) -> Any:
        kept.append(sum(one() is not None for one in made))
        found = select(*args, **kwargs)
        made.append(weakref.ref(next(part for part in found.causal if part is not None)))
        return found

    monkeypatch.setattr(TorchStep, "select", noted)
    return kept
