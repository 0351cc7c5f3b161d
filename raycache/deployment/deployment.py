"""A model with its settings, and what follows from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from raycache.cache.spaces import SpaceSizes
from raycache.checkpoint.quantisation import Quantisation
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.checkpoint.weights_form import WeightsForm, weights_form
from raycache.config import Config
from raycache.deployment.stages import with_stages
from raycache.errors import ConfigError
from raycache.memory.component import FULL, CacheFormat, Component, Reuse, tokens_per_point, window_pages
from raycache.memory.device import unit_bytes
from raycache.memory.rows import EnvelopeLayout
from raycache.models.base import ModelConfig, check_split, check_weights, components
from raycache.models.drafts.loading import check_draft, read_models
from raycache.parallel.sharding import Coords, Split

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Deployment:
    """One model on one kind of device; the single source of everything derived from model and settings.

    Attributes:
        config: settings, with stages chosen.
        model: the model to serve, with its draft model.
        device_type: "cpu" or "cuda".
    """

    config: Config
    model: ModelConfig
    device_type: str

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and unquantised weights. "auto" is the checkpoint's dtype on cuda, and float32 on cpu,
        which has no fast 16-bit types.

        Raises:
            ConfigError: the checkpoint's dtype is not supported.
        """
        name = self.config.dtype
        if name == "auto":
            name = self.model.dtype if self.device_type == "cuda" else "float32"
        if name not in _DTYPES:
            raise ConfigError(
                f"dtype {name!r} of {self.config.model} is not supported; set --dtype to one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]

    @cached_property
    def cache_format(self) -> CacheFormat:
        """Number format of cached rows."""
        dtype = str(self.dtype).removeprefix("torch.")
        return CacheFormat(dtype, has_fp8_latent=self.config.kv_dtype == "fp8")

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Kinds of cached state per token, of the model and its draft."""
        return components(self.model, self.cache_format)

    @property
    def max_model_len(self) -> int:
        """Limit of prompt plus output in tokens; raises as `check_context` does."""
        check_context(self.config, self.model)
        longest = self.config.max_model_len
        return self.model.max_position_embeddings if longest == "auto" else longest

    @property
    def max_step_tokens(self) -> int:
        """Token budget of a step."""
        if self.config.max_step_tokens == "auto":
            return 8192 if self.device_type == "cuda" else 512
        return self.config.max_step_tokens

    @property
    def plans_ahead(self) -> bool:
        """Whether the decider plans a step while the previous one runs."""
        return self.config.plans_ahead(device_type=self.device_type)

    def weights_form(self, quantisation: Quantisation) -> WeightsForm:
        """How quantised weights are held in memory."""
        return weights_form(quantisation, self.config.weights, dtype=self.dtype, device_type=self.device_type)

    # --- sizes of a tier ----------------------------------------------------------------------------------------------

    def pool_sizes(self, num_pages: int) -> dict[str, int]:
        """Pages or slots of every component space on the device, enough for all running requests.

        A running request holds two states (the current one, and the one at the last page boundary), one more per draft
        token, and twice the window's pages (those before and after a row). Restore points share the rest: their number
        grows with `num_pages`, until they take as much memory as the pages.

        Args:
            num_pages: pages of the "full" space.
        """
        config, parts = self.config, self.components
        windows = {part.space: window_pages(part.window, config.page_size) for part in parts}
        whole = {part.name: self.unit_bytes(part, Split(), Coords(0, 0, 0)) for part in parts}
        token_bytes = sum(whole[part.name] for part in parts if part.space == FULL) / config.page_size
        point_bytes = sum(whole[part.name] * max(1, windows[part.space]) for part in parts if part.space != FULL)
        points = config.restore_points
        if points == "auto":
            num_tokens = num_pages * config.page_size
            points = 1 + int(num_tokens / tokens_per_point(token_bytes=token_bytes, point_bytes=point_bytes))
        if not config.prefix_cache:
            points = 0
        sizes = {FULL: num_pages}
        for part in parts:
            if part.reuse is Reuse.STATE_HERE:
                sizes[part.space] = (2 + config.most_drafts) * config.max_running + points
            if part.reuse is Reuse.LAST_WINDOW:
                sizes[part.space] = (2 * config.max_running + points) * windows[part.space]
        return sizes

    def num_spare_states(self, part: Component) -> int:
        """Spare slots for a draft model's states while it drafts: one per running request."""
        return self.config.max_running if part.is_draft and part.reuse is Reuse.STATE_HERE else 0

    def unit_bytes(self, part: Component, split: Split, at: Coords) -> int:
        """Bytes of a page or slot of a component on one rank."""
        return unit_bytes(part, num_layers=self.model.num_layers, page_size=self.config.page_size, split=split, at=at)

    def space_sizes(self, sizes: Mapping[str, int]) -> SpaceSizes:
        """Sizes of a tier's pools, as the decider needs them.

        Args:
            sizes: component space -> pages or slots.
        """
        return SpaceSizes(
            num_pages=sizes[FULL],
            page_size=self.config.page_size,
            windows={p.space: (p.window, sizes[p.space]) for p in self.components if p.reuse is Reuse.LAST_WINDOW},
            states={p.space: sizes[p.space] for p in self.components if p.reuse is Reuse.STATE_HERE},
        )

    @property
    def part_widths(self) -> dict[str, int]:
        """Component space -> maximum units per restore point."""
        return {
            part.space: 1 if part.reuse is Reuse.STATE_HERE else window_pages(part.window, self.config.page_size)
            for part in self.components
            if part.space != FULL
        }

    def envelope_layout(self, *, nodes: Sequence[int] = (), node: int | None = None) -> EnvelopeLayout:
        """Envelope layout of all ranks, or of those on one node."""
        return EnvelopeLayout(
            list(self.components),
            num_layers=self.model.num_layers,
            page_size=self.config.page_size,
            split=self.config.split,
            nodes=nodes,
            node=node,
        )


def served_model(config: Config) -> ModelConfig:
    """Read the model to serve, with its draft model.

    Raises:
        CheckpointError: a directory is missing, or its contents are not supported.
        ConfigError: the draft model does not match the model.
    """
    return read_models(Path(config.model), config.draft if config.has_draft_model else "none")


def deploy(config: Config, *, device_type: str) -> Deployment:
    """Read a model's configuration, check it against the settings, and choose stages. Reads no weights.

    Raises:
        CheckpointError: the model's directory is incomplete, damaged or of an unknown format.
        ConfigError: the settings do not match the model.
    """
    model = check_model(config)
    return Deployment(with_stages(config, model), model, device_type)


def check_model(config: Config) -> ModelConfig:
    """Do the part of `deploy` that needs no device: read and check the model."""
    if not config.model:
        raise ConfigError("no model given; pass the directory of a Hugging Face model")
    model = served_model(config)
    check_split(model, config.split)
    check_context(config, model)
    _check_kv_dtype(config, model)
    check_host_tier(config, model)
    if not config.dummy_weights:
        check_weights(model, Checkpoint(Path(config.model)))
        check_draft(model, Path(config.model))
    return model


def check_context(config: Config, model: ModelConfig) -> None:
    """Reject a context longer than the model supports.

    Raises:
        ConfigError: max_model_len is above the model's positions.
    """
    if config.max_model_len != "auto" and config.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's {model.max_position_embeddings} positions; "
            "use a smaller one, or a model with rope scaling in its config.json"
        )


def _check_kv_dtype(config: Config, model: ModelConfig) -> None:
    if config.kv_dtype == "fp8":
        parts = components(
            model, CacheFormat("bfloat16", has_fp8_latent=True)
        )  # rejects latents of an unsupported size
        if not any(field.dtype.startswith("float8") for part in parts for field in part.fields):
            raise ConfigError(f"kv_dtype=fp8 is for latents (MLA), {model.name} has none; use kv_dtype=auto")


def check_host_tier(config: Config, model: ModelConfig) -> None:
    """Reject a host tier whose pages would be empty.

    Raises:
        ConfigError: no layer keeps all tokens.
    """
    if config.has_host_tier and not any(part.space == FULL for part in components(model, CacheFormat("bfloat16"))):
        raise ConfigError(
            f"host_memory={config.host_memory} is not supported for {model.name}, none of whose layers keeps all "
            "tokens; use host_memory=none"
        )
