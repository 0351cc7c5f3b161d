"""What the host tier of a service has to be, from its settings and its model."""

from __future__ import annotations

from collections.abc import Mapping

from raycache.cache.catalog import Catalog
from raycache.config import Config
from raycache.engine.host_plan import host_sizes, model_components, part_widths
from raycache.engine.host_service import HostSpec
from raycache.models.base import ModelConfig
from raycache.parallel.sharding import Split


def host_spec(config: Config, model: ModelConfig, *, device_type: str, sizes: Mapping[str, int]) -> HostSpec:
    """What to open.

    Args:
        config: of the service; it has a host tier.
        model: to serve.
        device_type: "cpu" or "cuda".
        sizes: of an arena that is there already, by component space; empty for what the budget allows.
    Raises:
        ConfigError: the budget is more than the node has, or holds nothing.
    """
    sizes = sizes or host_sizes(config, model, device_type=device_type)
    widths = part_widths(config, model, device_type=device_type)
    return HostSpec(
        components=tuple(model_components(config, model, device_type=device_type)),
        num_layers=model.num_layers,
        page_size=config.page_size,
        split=Split(tp=config.tp, pp=config.pp, cp=config.cp),
        sizes=sizes,
        catalog_bytes=Catalog.num_bytes(sizes=sizes, page_size=config.page_size, part_widths=widths),
        storage=config.storage,
        storage_timeout_s=config.prefetch_timeout_s,
    )
