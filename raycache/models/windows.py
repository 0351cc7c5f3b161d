"""Models some of whose layers see only the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raycache.memory.component import CacheFormat, Component, kv
from raycache.models.config import ConfigFile, read_given_layer_types
from raycache.models.dense import DenseConfig

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowConfig(DenseConfig):
    """A decoder with windows.

    Attributes:
        window: tokens that a query of a windowed layer sees, itself included.
        windowed: layers that have one, ascending.
    """

    window: int = field(kw_only=True)
    windowed: tuple[int, ...] = field(kw_only=True)


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
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING_ATTENTION)


def window_components(config: WindowConfig, fmt: CacheFormat) -> tuple[Component, ...]:
    """Keys and values: of all tokens in the layers that see everything, of the window's in the others."""

    def rows(name: str, layers: Sequence[int], window: int) -> tuple[Component, ...]:
        sizes = {"heads": config.num_kv_heads, "dim": config.head_dim}
        return (kv(name, layers, fmt=fmt, window=window, **sizes),) if layers else ()

    full = [layer for layer in range(config.num_layers) if layer not in config.windowed]
    return rows("kv", full, 0) + rows("window", config.windowed, config.window)
