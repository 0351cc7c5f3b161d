"""Models whose layers have either linear or full attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raycache.checkpoint.config_file import ConfigFile, read_given_layer_types

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class LayerKinds:
    """Which layers have which.

    Attributes:
        linear, full: numbers of the layers, ascending.
    """

    linear: tuple[int, ...]
    full: tuple[int, ...]


def read_layer_kinds(file: ConfigFile, *, is_full: Callable[[int], bool]) -> LayerKinds:
    """Read `layer_types`.

    Args:
        file: config.json.
        is_full: whether a layer has full attention when the file lists none.
    Raises:
        CheckpointError: an unknown kind of layer, or not one per layer.
    """
    kinds = read_given_layer_types(file, known=(LINEAR, FULL))
    if not kinds:
        kinds = tuple(FULL if is_full(layer) else LINEAR for layer in range(file.integer("num_hidden_layers")))
    linear, full = (tuple(layer for layer, its in enumerate(kinds) if its == kind) for kind in (LINEAR, FULL))
    return LayerKinds(linear, full)
