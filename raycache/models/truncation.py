"""How many of a model's first layers are enough to run every kernel of it.

Layers of one kind launch the same kernels. So steps whose results do not matter, which run only so that kernels are
compiled and loaded, do without most layers. They have the first ones, since a layer may use what an earlier one found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

_TWICE = 2
"""Layers of a kind that are needed: the first layer of a model adds nothing before its norm."""
_NUMBER = "_layer"
"""Where a mixer keeps the number of its layer."""
_ALIGNED = 16
"""Bytes; kernels are compiled for pointers that are multiples of it, or for any."""


def num_layers_needed(kinds: Sequence[Hashable]) -> int:
    """Layers until each kind has come twice, or as often as it does.

    Args:
        kinds: one per layer.
    """
    left = {kind: min(count, _TWICE) for kind, count in Counter(kinds).items()}
    for number, kind in enumerate(kinds):
        left[kind] -= 1
        if all(count <= 0 for count in left.values()):
            return number + 1
    return len(kinds)


def kind_of(value: object) -> Hashable:
    """What decides which kernels a part of a layer launches: types, settings, shapes and strides.

    Parts of equal kinds launch the same kernels; others may, too.
    """
    return _kind(value, {})


def _kind(value: Any, known: dict[int, Hashable]) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % _ALIGNED
    if isinstance(value, partial):
        return value.func, _kind(value.args, known), _kind(value.keywords, known)
    if isinstance(value, slice):  # has no hash before Python 3.12
        return slice, value.start, value.stop, value.step
    if isinstance(value, Mapping):
        return type(value), tuple((key, _kind(each, known)) for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value), tuple(_kind(each, known) for each in value)
    if not isinstance(value, type) and type(value).__module__.startswith("raycache."):
        if id(value) not in known:
            known[id(value)] = type(value).__qualname__  # for what refers to itself
            known[id(value)] = type(value), tuple((name, _kind(each, known)) for name, each in _attributes(value))
        return known[id(value)]
    try:
        hash(value)
    except TypeError:
        return id(value)  # the same object only
    found: Hashable = value
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = [each.name for each in fields(value)] if is_dataclass(value) else list(vars(value))
    return [(name, getattr(value, name)) for name in names if name != _NUMBER]
