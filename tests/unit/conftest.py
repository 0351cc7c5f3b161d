"""What tests of single modules share."""

from __future__ import annotations

import pytest

from raycache.step import inputs


@pytest.fixture(autouse=True)
def leaving_out_unwanted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps, too, compute the last feed-forward block only for tokens whose logits are needed."""
    monkeypatch.setattr(inputs, "_LEAST_WANTED", 1)
