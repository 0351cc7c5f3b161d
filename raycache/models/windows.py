"""Which layers of a model see only the last tokens, as config.json says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types
from raycache.errors import CheckpointError

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def read_windowed(file: ConfigFile, *, pattern: int) -> tuple[int, ...]:
    """Layers with a window.

    Args:
        file: config.json.
        pattern: when it lists no layers, every `pattern`-th one sees everything.
    Raises:
        CheckpointError: an unknown kind of layer, or not one per layer.
    """
    kinds = read_given_layer_types(file, known=(FULL_ATTENTION, SLIDING_ATTENTION))
    if not kinds:
        return tuple(layer for layer in range(file.integer("num_hidden_layers")) if (layer + 1) % pattern)
    return _windowed(kinds)


def read_optional_windows(file: ConfigFile) -> dict[str, Any]:
    """`window` and `windowed` of `DenseConfig` for families that turn windows on by `use_sliding_window`.

    Without `layer_types`, all layers from `max_window_layers` on have a window.

    Raises:
        CheckpointError: an unknown kind of layer, not one per layer, or a window that is turned off.
    """
    kinds = read_given_layer_types(file, known=(FULL_ATTENTION, SLIDING_ATTENTION))
    is_on = file.flag("use_sliding_window", False)
    has_window = file.raw("sliding_window") is not None or not file.says("sliding_window")
    window = file.integer("sliding_window", 4096) if has_window else 0
    windowed = _windowed(kinds)
    if windowed and not (is_on and window):
        raise CheckpointError(
            f"{file.path}: layer_types has {SLIDING_ATTENTION!r}, but use_sliding_window={is_on} and "
            f"sliding_window={file.raw('sliding_window')}; is the file damaged? Download it again"
        )
    first = file.count("max_window_layers", 28)
    if not kinds and is_on and window:
        windowed = tuple(range(first, file.integer("num_hidden_layers")))
    return {"window": window, "windowed": windowed} if windowed else {}


def _windowed(kinds: Sequence[str]) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING_ATTENTION)
