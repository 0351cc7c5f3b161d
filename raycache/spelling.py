"""Suggestions for mistyped names: settings, flags, commands and fields of requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_NEAR = 0.7
"""How alike two words must be, 0 to 1: size and szie are (0.75), min and max are not (0.33)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to append to the refusal of a name, such as "; did you mean 'page_size'?"; empty if none is near.

    Every word of the name must be near the same word of the suggestion, so that `min_tokens` does not suggest
    `max_tokens`, nor `cq` suggest `cp`.
    """
    alike, near = max(((_likeness(_words(name), _words(other)), other) for other in known), default=(0.0, ""))
    return f"; did you mean {near!r}?" if alike else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _likeness(words: list[str], others: list[str]) -> float:
    """From 0 to 1; 0 unless all words are near their counterparts."""
    if "".join(words) == "".join(others):
        return 1.0
    if len(words) != len(others):
        return 0.0
    each = [SequenceMatcher(None, *pair).ratio() for pair in zip(words, others, strict=True)]
    return sum(each) / len(each) if each and min(each) >= _NEAR else 0.0
