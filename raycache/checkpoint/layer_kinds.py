"""Reads from config.json which layers have linear, full or sliding-window attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerKinds:
    """Layers with linear attention and with full attention, ascending."""

    linear: tuple[int, ...]
    full: tuple[int, ...]


def read_layer_kinds(file: ConfigFile, *, is_full: Callable[[int], bool]) -> LayerKinds:
    """Read `layer_types` of models with linear attention.

    Args:
        is_full: whether a layer has full attention, if there is no `layer_types`.
    Raises:
        CheckpointError: a kind of layer is unknown, or there is not one per layer.
    """
    kinds = read_given_layer_types(file, known=(LINEAR, FULL))
    if not kinds:
        kinds = tuple(FULL if is_full(layer) else LINEAR for layer in range(file.integer("num_hidden_layers")))
    linear, full = (tuple(layer for layer, its in enumerate(kinds) if its == kind) for kind in (LINEAR, FULL))
    return LayerKinds(linear, full)


def read_windowed(file: ConfigFile, *, pattern: int) -> tuple[int, ...]:
    """Read which layers have a sliding window.

    Args:
        pattern: without `layer_types`, every `pattern`-th layer is a full one.
    Raises:
        CheckpointError: a kind of layer is unknown, or there is not one per layer.
    """
    kinds = read_given_layer_types(file, known=(FULL, SLIDING))
    if not kinds:
        return tuple(layer for layer in range(file.integer("num_hidden_layers")) if (layer + 1) % pattern)
    return _windowed(kinds)


def read_optional_windows(file: ConfigFile) -> dict[str, Any]:
    """Read `window` and `windowed` of `AttentionConfig`, for families where `use_sliding_window` enables windows.

    Without `layer_types`, all layers from `max_window_layers` on have a window.

    Raises:
        CheckpointError: a kind of layer is unknown, there is not one per layer, or windows are listed but disabled.
    """
    kinds = read_given_layer_types(file, known=(FULL, SLIDING))
    is_on = file.flag("use_sliding_window", False)
    has_window = file.raw("sliding_window") is not None or not file.says("sliding_window")
    window = file.integer("sliding_window", 4096) if has_window else 0
    windowed = _windowed(kinds)
    if windowed and not (is_on and window):
        raise CheckpointError(
            f"{file.path}: layer_types has {SLIDING!r}, but use_sliding_window={is_on} and "
            f"sliding_window={file.raw('sliding_window')}; is the file damaged? Download it again"
        )
    first = file.count("max_window_layers", 28)
    if not kinds and is_on and window:
        windowed = tuple(range(first, file.integer("num_hidden_layers")))
    return {"window": window, "windowed": windowed} if windowed else {}


def _windowed(kinds: Sequence[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
