"""Chooses pipeline stages once, before ranks start, and passes them on in the settings."""

from __future__ import annotations

from dataclasses import replace

from raycache.config import Config
from raycache.models.base import ModelConfig
from raycache.models.layer_sizes import layer_costs
from raycache.parallel.stages import AUTO, cheapest_stages


def with_stages(config: Config, model: ModelConfig) -> Config:
    """Return the settings with the layers of each stage in `pp_layers`.

    Args:
        model: as `check_model` read it with these settings.
    """
    if config.pp == 1 or config.pp_layers != AUTO:
        return config
    stages = cheapest_stages(layer_costs(model), config.pp, bound=model.bound_layers)
    return replace(config, pp_layers=",".join(map(str, stages)))
