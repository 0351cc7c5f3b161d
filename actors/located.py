"""Directories of the models of a service on this machine, without the Hub's client where it is not needed."""

from __future__ import annotations

from raycache.checkpoint.hub_id import HubId
from raycache.config import Config


def located(config: Config) -> Config:
    """Like `raycache.checkpoint.hub_models.located`, whose import takes most of a second."""
    if not any(map(HubId.parse, config.directories)):
        return config
    from raycache.checkpoint import hub_models

    return hub_models.located(config)
