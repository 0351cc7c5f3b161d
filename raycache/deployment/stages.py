"""Pipeline stages of a service: chosen once, before its ranks start, and told to them with its settings."""

from __future__ import annotations

from dataclasses import replace

from raycache.config import Config
from raycache.models.base import ModelConfig
from raycache.models.layer_sizes import layer_costs
from raycache.parallel.stages import AUTO, cheapest_stages


def with_stages(config: Config, model: ModelConfig) -> Config:
    """The same settings with the layers of each stage in `pp_layers`.

    Args:
        config: of the service.
        model: as `check_model` read it with these settings.
    """
    if config.pp == 1 or config.pp_layers != AUTO:
        return config
    stages = cheapest_stages(layer_costs(model), config.pp, bound=model.bound_layers)
    return replace(config, pp_layers=",".join(map(str, stages)))
