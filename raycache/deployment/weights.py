"""Chooses whether weights stay quantised in memory; part of the cache's identity."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from raycache.cache.keys import Identity
from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.stored_slice import Format
from raycache.checkpoint.tensor_files import weights_fingerprint
from raycache.checkpoint.weights_form import has_kernels, why_dequantised
from raycache.deployment.deployment import Deployment
from raycache.errors import ConfigError
from raycache.parallel.devices import GpuModel

_log = logging.getLogger(__name__)


def with_weights_form(deployment: Deployment, gpus: Iterable[GpuModel]) -> Deployment:
    """Dequantise weights if any GPU of the gang has no kernels for them, as all ranks must use the same form.

    Args:
        deployment: its setting `weights` is "auto", "stored" or "bfloat16".
        gpus: GPUs of all ranks.
    Raises:
        ConfigError: weights="stored", and a GPU has no kernels for them.
    """
    reason = why_no_kernels(deployment, gpus)
    if not reason:
        return deployment
    if deployment.config.weights == "stored":
        raise ConfigError(f"{reason}; pass --weights auto, which dequantises them to bfloat16")
    _log.info("%s; they are dequantised to bfloat16", reason)
    return replace(deployment, config=replace(deployment.config, weights="bfloat16"))


def why_no_kernels(deployment: Deployment, gpus: Iterable[GpuModel]) -> str:
    """Readable reason why weights cannot stay quantised on these GPUs, or ""."""
    formats = sorted({one.value for directory in _directories(deployment) for one in _stored(deployment, directory)})
    others = sorted({str(gpu) for gpu in gpus if not has_kernels(gpu.capability)})
    return f"no kernels for {' and '.join(formats)} weights on {', '.join(others)}" if formats and others else ""


def model_identity(deployment: Deployment) -> Identity:
    """Identity of cached state: everything that it depends on besides the tokens."""
    config, draft = deployment.config, deployment.model.draft
    directory = Path(config.model)
    weights = weights_fingerprint(directory) + _form(deployment, directory)
    if draft is not None:  # its rows are stored with the model's
        weights += f" {draft.kind.value} {weights_fingerprint(draft.directory)}"
        weights += _form(deployment, draft.directory)
    if config.dummy_weights:  # must not be mistaken for a checkpoint in the same directory
        weights = f"drawn on {deployment.device_type} {weights}"
    return Identity(weights, config.page_size)


def _form(deployment: Deployment, directory: Path) -> str:
    """Part of the identity for the form of quantised weights; empty for unquantised ones."""
    quantisation = read_quantisation(directory)
    if quantisation is None:
        return ""
    config, form = deployment.config, deployment.weights_form(quantisation)
    if config.dummy_weights and not form.stored:
        return ""
    for reason in why_dequantised(
        quantisation, config.weights, dtype=deployment.dtype, device_type=deployment.device_type
    ):
        level = logging.WARNING if config.weights == "stored" else logging.INFO
        _log.log(level, "%s; %s is dequantised to %s", reason, directory.name, form.dtype)
    if quantisation.has_cache_scheme:
        _log.warning("KV cache settings in %s are ignored; use kv_dtype", quantisation.path)
    return f" weights {form}"


def _directories(deployment: Deployment) -> list[Path]:
    draft = deployment.model.draft
    return [Path(deployment.config.model), *([] if draft is None else [draft.directory])]


def _stored(deployment: Deployment, directory: Path) -> frozenset[Format]:
    quantisation = read_quantisation(directory)
    return frozenset() if quantisation is None else deployment.weights_form(quantisation).stored
