"""The settings of a service: what they need of each other, and what follows from them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycache.errors import ConfigError
from raycache.observe.event_address import EventAddress
from raycache.parallel.rank_map import parse_rank_map
from raycache.parallel.sharding import Split
from raycache.parallel.stages import parse_pp_layers
from raycache.settings import Settings
from raycache.spelling import did_you_mean

_BYTES = re.compile(r"^\s*(\d{1,18}(?:\.\d{1,18})?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:_-]+")
_UNIT = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


@dataclass(frozen=True)
class Config(Settings):
    """Settings that can work together. Checked on construction; what needs the model is checked when that is read.

    Raises:
        ConfigError: a value cannot work; the message names the setting and what would work.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(f"{name} needs {other}; set both")
        if self.api_key and self.api_keys:
            raise ConfigError("api_key and api_keys exclude each other; put the key's SHA-256 into the file")
        if self.port != "auto" and self.port > 65535:
            raise ConfigError(f"port={self.port} is not a port; use 1 to 65535, or auto for a free one")
        if self.page_size % self.cp:
            near = self.cp * max(1, round(self.page_size / self.cp))
            raise ConfigError(
                f"cp={self.cp} does not divide page_size={self.page_size}, and the tokens of a page are split over cp; "
                f"use a cp of {divisors(self.page_size)} or page_size={near}"
            )
        parse_pp_layers(self.pp_layers, pp=self.pp)
        if self.overlap == "on" and self.pp > 1:
            raise ConfigError(
                f"overlap=on needs pp=1, got pp={self.pp}: the first stage cannot begin with a token that the last one "
                "is still sampling; with several stages other requests keep them busy, use overlap=auto"
            )
        _check_ingress(self)
        _check_origins(self)
        for known in dataclasses.fields(self):
            value, words = getattr(self, known.name), known.metadata["words"]
            if known.metadata["unit"] == "SIZE" and value not in words:
                parse_bytes(known.name, value, words=words)
        if self.placement != "auto":
            parse_rank_map(self.placement, world_size=self.world_size)
        _check_shares(self)
        _check_tiers(self)
        if self.event_address is not None and not self.prefix_cache:
            raise ConfigError("kv_events has no use with prefix_cache=False; leave one of them out")

    @property
    def world_size(self) -> int:
        """Ranks of the gang: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers per pipeline stage; none while they are not chosen."""
        return parse_pp_layers(self.pp_layers, pp=self.pp)

    @property
    def split(self) -> Split:
        """How the model is split; with stages once they are chosen (deployment/stages.py)."""
        return Split(tp=self.tp, pp=self.pp, cp=self.cp, stages=self.stages)

    @property
    def model_name(self) -> str:
        """Name that clients use."""
        return self.served_model_name or os.path.basename(os.path.realpath(self.model))

    @property
    def ingress_range(self) -> tuple[int, int]:
        """Least and most processes of num_ingress."""
        least, _, most = self.num_ingress.partition("-")
        return int(least), int(most or least)

    @property
    def origins(self) -> tuple[str, ...]:
        """Origins of allow_origin, or "*"."""
        return () if self.allow_origin == "none" else tuple(one.strip() for one in self.allow_origin.split(","))

    @property
    def has_host_tier(self) -> bool:
        """Whether pages are also kept in host memory."""
        return self.host_memory != "none"

    @property
    def has_storage(self) -> bool:
        """Whether a storage tier is set; a running server can be given another."""
        return self.storage != "none"

    @property
    def event_address(self) -> EventAddress | None:
        """Where KV events are published, of the first replica."""
        return None if self.kv_events == "none" else EventAddress.read(self.kv_events)

    @property
    def most_drafts(self) -> int:
        """Draft tokens per request and step; 0 for none."""
        return 0 if self.draft == "none" else self.draft_tokens

    @property
    def has_draft_model(self) -> bool:
        """Whether draft tokens are a model's, on the ranks."""
        return self.draft not in ("none", "ngram")

    @property
    def directories(self) -> tuple[str, ...]:
        """Of the model, and of a draft with files of its own, or their names on the Hub: what every node needs."""
        return (self.model, self.draft) if self.has_draft_model and self.draft != "mtp" else (self.model,)

    def plans_ahead(self, *, device_type: str) -> bool:
        """Whether the decider plans a step while the one before runs.

        Args:
            device_type: "cpu" or "cuda".
        """
        return self.overlap == "on" or (self.overlap == "auto" and device_type == "cuda" and self.pp == 1)

    def has_spare_ranks(self, *, device_type: str) -> bool:
        """Whether a process stands by for each rank.

        Args:
            device_type: "cpu" or "cuda".
        """
        return self.spare_ranks == "on" or (self.spare_ranks == "auto" and device_type == "cuda")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build from parsed YAML; every key must be a setting.

        Raises:
            ConfigError: an unknown key, or a value that cannot work.
        """
        known = {item.name: item for item in dataclasses.fields(cls)}
        for key, value in values.items():
            if key not in known:
                hint = did_you_mean(key, known) or "; `raycache launch --help-all` lists all"
                raise ConfigError(f"unknown setting {key!r}{hint}")
            if isinstance(value, bool) and "on" in known[key].metadata["choices"]:
                values = {**values, key: "on" if value else "off"}  # YAML takes a plain on or off for a truth value
            elif type(value) is int and known[key].metadata["unit"] in ("N|MIN-MAX", "COUNTS|auto"):
                values = {**values, key: str(value)}  # and one count for a number
        return cls(**values)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def parse_bytes(name: str, text: str, *, words: tuple[str, ...] = ()) -> int:
    """Read a size such as "4GiB" or "512 MB" (case does not matter).

    Args:
        name: the setting's name, for the error message.
        text: the size.
        words: what the setting takes beside sizes, for the error message.
    Returns:
        Bytes, at least 1.
    Raises:
        ConfigError: it is not a size.
    """
    found = _BYTES.match(text)
    size = int(float(found[1]) * _UNIT[(found[2] or "B").lower()]) if found else -1
    if size < 1:
        raise ConfigError(f"{name} must be {' or '.join(('a size such as 512MiB or 4GiB', *words))}, got {text!r}")
    return size


def _check_ingress(config: Config) -> None:
    """What the ingress can keep of the other settings."""
    if not re.fullmatch(r"[1-9]\d{0,3}(-[1-9]\d{0,3})?", config.num_ingress) or (
        config.ingress_range[0] > config.ingress_range[1]
    ):
        raise ConfigError(f"num_ingress={config.num_ingress!r} must be a number such as 2, or a range such as 1-4")
    if config.ingress == "builtin":
        if config.num_ingress != "1":
            raise ConfigError(
                f"num_ingress={config.num_ingress} needs ingress=serve; the built-in server is one process"
            )
        return
    default = next(item.default for item in dataclasses.fields(config) if item.name == "header_timeout_s")
    if config.header_timeout_s != default:
        raise ConfigError(
            "header_timeout_s cannot be enforced with ingress=serve: Ray Serve's proxy has no such limit; leave it "
            "out, or put a reverse proxy in front"
        )


def _check_origins(config: Config) -> None:
    for origin in config.origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"allow_origin={origin!r} is not an origin; write scheme and host as browsers send them, such as "
                "https://chat.example.com or http://localhost:3000, or use * or none"
            )


def _check_shares(config: Config) -> None:
    for name, share in {"prefetch_share": config.prefetch_share, "prompt_share": config.prompt_share}.items():
        if share > 1:
            raise ConfigError(f"{name} must be above 0 and at most 1, got {share}")


def _check_tiers(config: Config) -> None:
    """What the tiers beside the device need of each other."""
    if config.has_storage and "://" not in config.storage:
        near = f"file://{os.path.abspath(config.storage)}?size=50GiB"
        raise ConfigError(f"storage={config.storage!r} is not a URL or none; for a directory write {near}")
    if config.has_host_tier:
        if not config.prefix_cache:
            raise ConfigError(
                f"host_memory={config.host_memory} has no use with prefix_cache=False; leave prefix_cache on, or use "
                "host_memory=none"
            )
        return
    for name, nothing in (("storage", "none"), ("write_policy", "write_through"), ("prefetch", "best_effort")):
        value = getattr(config, name)
        if value != nothing:
            shown = "URL" if name == "storage" else value  # a URL can hold a password
            raise ConfigError(
                f"{name}={shown} needs a host tier, since pages go through it; add host_memory=auto or a size such as "
                f"host_memory=4GiB, or leave {name} out"
            )
