"""All settings, in one frozen dataclass from which the command line and the YAML file are made.

A field is a flag: `kv_memory` is `--kv-memory` and the YAML key `kv_memory`; its help text and choices stand in the
    metadata.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycache.errors import ConfigError
from raycache.parallel.rank_map import parse_rank_map
from raycache.parallel.sharding import Split
from raycache.parallel.stages import parse_pp_layers

_BYTES = re.compile(r"^\s*(\d{1,18}(?:\.\d{1,18})?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$", re.IGNORECASE)
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


def _setting(default: Any, text: str, *, group: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "group": group, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Everything that can be set. Checked on construction; what needs the model is checked when that is read.

    Raises:
        ConfigError: a value cannot work; the message names the setting and what would work.
    """

    model: str = _setting(
        "",
        "directory of a Hugging Face model (config.json, *.safetensors, tokenizer), or its name on the Hub, such as "
        "Qwen/Qwen3-8B",
        group="model",
    )
    revision: str = _setting("", "branch, tag or commit of a model of the Hub; default: its main branch", group="model")
    served_model_name: str = _setting(
        "", "name that clients use; default: that of the directory, or on the Hub", group="model"
    )
    dtype: str = _setting(
        "auto",
        "of weights and cache; auto: the checkpoint's on cuda, float32 on cpu",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    attention: str = _setting(
        "auto",
        "who computes attention: torch, or flashinfer on CUDA in half types; auto: flashinfer where it can be used",
        group="model",
        choices=("auto", "flashinfer", "torch"),
    )
    weights: str = _setting(
        "auto",
        "form of quantised weights in memory; auto, stored: quantised where a kernel exists, the rest dequantised to "
        "dtype, where stored warns of it; bfloat16: all dequantised at load",
        group="model",
        choices=("auto", "stored", "bfloat16"),
    )
    dummy_weights: bool = _setting(
        False, "draw random weights of the shapes that config.json says, to measure without a checkpoint", group="model"
    )
    max_model_len: int = _setting(
        0, "most tokens of prompt and output together; 0: what the model was made for", group="model"
    )

    tp: int = _setting(1, "tensor-parallel ranks: heads are split over them", group="parallel")
    pp: int = _setting(1, "pipeline stages: layers are split over them", group="parallel")
    pp_layers: str = _setting(
        "auto", "layers per pipeline stage, such as 12,12,11; auto: by what layers cost", group="parallel"
    )
    cp: int = _setting(1, "context-parallel ranks: tokens are split over them", group="parallel")
    device: str = _setting(
        "auto",
        "where ranks compute; auto: cuda if Ray has GPUs, else cpu",
        group="parallel",
        choices=("auto", "cpu", "cuda"),
    )
    cuda_graphs: bool = _setting(
        True, "record decode steps as CUDA graphs at start, where attention can be recorded", group="parallel"
    )
    address: str = _setting(
        "local",
        "Ray cluster: local starts one, auto finds a running one, HOST:PORT of one that this machine belongs to, or "
        "http://HOST:8265 to launch on a remote one as a job",
        group="parallel",
    )
    placement: str = _setting(
        "auto",
        "where ranks go: auto packs tp inside a node and cp next to it, or RANKS@NODE;..., such as "
        "0-3@10.0.0.1;4-7@10.0.0.2",
        group="parallel",
    )
    interface: str = _setting(
        "",
        "network that ranks of several nodes reach each other by: an interface such as eth1, or a subnet such as "
        "10.0.0.0/16; default: that of Ray's node address",
        group="parallel",
    )
    insecure_cluster: bool = _setting(
        False,
        "use a Ray cluster that other machines can reach and that asks nobody for a token: whoever reaches it can run "
        "any code on it",
        group="parallel",
    )
    drain_timeout_s: float = _setting(
        30.0, "seconds that the cache of a node or replica that leaves may take to be saved", group="parallel"
    )
    rank_timeout_s: float = _setting(
        120.0, "seconds after which a rank that does not answer counts as lost", group="parallel"
    )
    start_timeout_s: float = _setting(
        600.0,
        "seconds that ranks may take to start and load weights, and that a download may make no progress",
        group="parallel",
    )

    page_size: int = _setting(64, "tokens per page of the cache", group="cache")
    kv_memory: str = _setting(
        "auto", "cache bytes per rank, such as 4GiB; auto: a share of what is free", group="cache"
    )
    num_pages: int = _setting(0, "pages of the cache; 0: as many as kv_memory holds", group="cache")
    kv_dtype: str = _setting(
        "auto",
        "of cached latents (MLA); auto: as dtype, fp8: 8 bits with a scale per 128 numbers",
        group="cache",
        choices=("auto", "fp8"),
    )
    prefix_cache: bool = _setting(True, "reuse cached prefixes", group="cache")
    restore_interval: int = _setting(
        2048,
        "tokens between restore points inside long prompts, for recurrent and window layers; bounds their chunks; 0: "
        "only where prompts end and branch",
        group="cache",
    )
    restore_points: int = _setting(
        0,
        "restore points that have room beside what running requests need; 0: as many as suit num_pages",
        group="cache",
    )
    eviction: str = _setting(
        "lru",
        "what goes first when a tier is full; priority: by the requests' cache_priority and cache_ttl_s",
        group="cache",
        choices=("lru", "lfu", "priority"),
    )

    host_memory: str = _setting(
        "0", "host tier's bytes per node, such as 64GiB; auto: a share of what is free; 0: no host tier", group="cache"
    )
    write_policy: str = _setting(
        "write_through",
        "when a page is copied to the host tier: at its first use, at its second, or when evicted (write_back)",
        group="cache",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    storage: str = _setting(
        "",
        "URL of a storage tier: file:///DIR?size=50GiB, s3://BUCKET/PREFIX or redis://HOST:PORT/DB; needs host_memory; "
        "{node} in it is the node's number",
        group="cache",
    )
    prefetch: str = _setting(
        "best_effort",
        "whether a request waits for its prefix in storage: never, to the end, or prefetch_timeout_s",
        group="cache",
        choices=("best_effort", "wait_complete", "timeout"),
    )
    prefetch_timeout_s: float = _setting(
        2.0, "seconds that a request waits under prefetch=timeout, and that one storage call may take", group="cache"
    )
    prefetch_share: float = _setting(
        0.5, "most of the host tier that prefetches may fill at a time, above 0 and up to 1", group="cache"
    )
    storage_lanes: int = _setting(2, "storage calls at a time", group="cache")

    max_step_tokens: int = _setting(0, "token budget of one step; 0: 512 on cpu, 8192 on cuda", group="scheduler")
    max_running: int = _setting(64, "most requests in one batch", group="scheduler")
    draft: str = _setting(
        "none",
        "guesses at next tokens, which the model checks several of in one step; the output stays the same. ngram: what "
        "followed when the last tokens stood in prompt or output before, good at quoting and editing; mtp: a layer of "
        "the model's own checkpoint; else a smaller model with its vocabulary, or an EAGLE head: a directory, or "
        "ORG/NAME or ORG/NAME@REVISION of the Hub",
        group="scheduler",
    )
    draft_tokens: int = _setting(4, "most guesses per request and step", group="scheduler")
    adaptive_drafts: bool = _setting(
        True, "guess less where guesses are wrong too often for what making and checking them costs", group="scheduler"
    )
    overlap: str = _setting(
        "auto",
        "plan the next step while one runs, for models without windows and recurrent states; auto: on cuda with pp=1",
        group="scheduler",
        choices=("auto", "on", "off"),
    )
    max_queue: int = _setting(1024, "most requests that wait; more get 429", group="scheduler")

    replicas: int = _setting(1, "engines behind the endpoint, each with its own ranks and cache", group="server")
    routing: str = _setting(
        "prefix",
        "which replica gets a request: the one that has most of its prefix unless it is busier, the least busy one, or "
        "each in turn",
        group="server",
        choices=("prefix", "load", "round_robin"),
    )
    ingress: str = _setting(
        "builtin",
        "who takes HTTP requests: this process, or num_ingress processes of Ray Serve (docs/replicas.md says what that "
        "costs)",
        group="server",
        choices=("builtin", "serve"),
    )
    num_ingress: str = _setting(
        "1",
        "processes that take HTTP requests with ingress=serve: a number, or MIN-MAX, then Serve starts and ends them "
        "by their load",
        group="server",
    )
    host: str = _setting("127.0.0.1", "address that the server binds to", group="server")
    port: int = _setting(8000, "port that the server binds to; 0: a free one", group="server")
    api_key: str = _setting(
        "", "clients must send it as a bearer token; empty: none (or set RAYCACHE_API_KEY)", group="server"
    )
    api_keys: str = _setting(
        "",
        "file of tenants, a line each: NAME and the SHA-256 of its API key in hex; tenants never share cached tokens",
        group="server",
    )
    tls_cert: str = _setting("", "file with the server's certificate chain, PEM; serves https", group="server")
    tls_key: str = _setting("", "file with its private key, PEM", group="server")
    max_body: str = _setting("8MiB", "largest request body", group="server")
    max_connections: int = _setting(
        4096, "most open connections; beyond them those that wait longest without a whole request end", group="server"
    )
    header_timeout_s: float = _setting(
        10.0, "seconds that a client may take to send a request's headers, and again its body", group="server"
    )
    log_format: str = _setting("text", "of log lines", group="server", choices=("text", "json"))
    otlp_endpoint: str = _setting(
        "", "URL of an OpenTelemetry collector, such as http://HOST:4318, that gets a trace per request", group="server"
    )
    request_timeout_s: float = _setting(600.0, "seconds after which a request ends; 0: never", group="server")
    chat_template: str = _setting("", "file with a Jinja chat template, instead of the model's own", group="server")
    dashboard: bool = _setting(True, "start the Ray dashboard with a local cluster", group="server")

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "page_size", "max_running", "max_queue", "storage_lanes", "replicas"):
            _at_least(name, getattr(self, name), 1)
        optional = ("max_model_len", "num_pages", "max_step_tokens", "request_timeout_s")
        for name in (*optional, "restore_interval", "restore_points", "draft_tokens"):
            _at_least(name, getattr(self, name), 0)
        for name in ("rank_timeout_s", "start_timeout_s", "drain_timeout_s", "max_connections", "header_timeout_s"):
            _at_least(name, getattr(self, name), 1)
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(f"{name} needs {other}, the other half of the server's identity; set both")
        if self.api_key and self.api_keys:
            raise ConfigError("api_key and api_keys exclude each other; put the key's SHA-256 into the file")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is not a port; use 0 to 65535")
        if self.page_size % self.cp:
            near = self.cp * max(1, round(self.page_size / self.cp))
            raise ConfigError(
                f"cp={self.cp} does not divide page_size={self.page_size}, the tokens of a page are split over cp; "
                f"use a cp of {divisors(self.page_size)} or page_size={near}"
            )
        for item in dataclasses.fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value not in choices:
                raise ConfigError(f"{item.name}={value!r} is unknown; use one of {', '.join(choices)}")
        parse_pp_layers(self.pp_layers, pp=self.pp)
        if self.overlap == "on" and self.pp > 1:
            raise ConfigError(
                f"overlap=on needs pp=1, got pp={self.pp}: the first stage cannot begin with a token that the last one "
                "is still sampling; with several stages other requests keep them busy, use overlap=auto"
            )
        _check_ingress(self)
        parse_bytes("max_body", self.max_body)
        if self.placement != "auto":
            parse_rank_map(self.placement, world_size=self.world_size)
        if self.kv_memory != "auto":
            parse_bytes("kv_memory", self.kv_memory)
        _check_tiers(self)

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
    def has_host_tier(self) -> bool:
        """Whether pages are also kept in host memory."""
        return self.host_memory == "auto" or parse_bytes("host_memory", self.host_memory, least=0) > 0

    @property
    def most_drafts(self) -> int:
        """Guesses per request and step; 0 for none."""
        return 0 if self.draft == "none" else self.draft_tokens

    @property
    def has_draft_model(self) -> bool:
        """Whether guesses are a model's, on the ranks."""
        return self.draft not in ("none", "ngram") and self.draft_tokens > 0

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

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build from parsed YAML; every key must be a setting and every value of its type.

        Raises:
            ConfigError: an unknown key (with the nearest known one) or a value of the wrong type.
        """
        known = {item.name: item for item in dataclasses.fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise ConfigError(f"unknown setting {key!r}{_nearest(key, known)}")
            if isinstance(value, bool) and "on" in known[key].metadata["choices"]:
                values = {**values, key: "on" if value else "off"}  # YAML takes a plain on or off for a truth value
                continue
            wanted = type(known[key].default)
            is_number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is not wanted and not is_number:
                raise ConfigError(f"{key} must be of type {wanted.__name__}, got {value!r}")
        return cls(**values)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def parse_bytes(name: str, text: str, *, least: int = 1) -> int:
    """Read a size such as "4GiB" or "512 MB" (case does not matter).

    Args:
        name: the setting's name, for the error message.
        text: the size.
        least: smallest size that is taken; 0 where "0" means none.
    Returns:
        Bytes, at least `least`.
    Raises:
        ConfigError: it is not a size.
    """
    found = _BYTES.match(text)
    size = int(float(found[1]) * _UNIT[(found[2] or "B").lower()]) if found else -1
    if size < least:
        raise ConfigError(f"{name}={text!r} is not a size; write a number with a unit, such as 512MiB or 4GiB")
    return size


def _check_ingress(config: Config) -> None:
    """What the ingress can keep of the other settings."""
    if not re.fullmatch(r"[1-9]\d{0,3}(-[1-9]\d{0,3})?", config.num_ingress) or (
        config.ingress_range[0] > config.ingress_range[1]
    ):
        raise ConfigError(f"num_ingress={config.num_ingress!r} must be a number such as 2, or a range such as 1-4")
    if config.ingress == "builtin":
        if config.num_ingress != "1":
            raise ConfigError(f"num_ingress={config.num_ingress} needs ingress=serve; the server here is one process")
        return
    default = next(item.default for item in dataclasses.fields(config) if item.name == "header_timeout_s")
    if config.header_timeout_s != default:
        raise ConfigError(
            "header_timeout_s cannot be kept with ingress=serve, Ray Serve's proxy has no such limit; leave it out, or "
            "put a reverse proxy before it"
        )


def _check_tiers(config: Config) -> None:
    """What the tiers beside the device need of each other."""
    if not config.prefetch_timeout_s > 0:
        raise ConfigError(f"prefetch_timeout_s must be above 0, got {config.prefetch_timeout_s}")
    if not 0 < config.prefetch_share <= 1:
        raise ConfigError(f"prefetch_share must be above 0 and at most 1, got {config.prefetch_share}")
    if config.storage and "://" not in config.storage:
        near = f"file://{os.path.abspath(config.storage)}?size=50GiB"
        raise ConfigError(f"storage={config.storage!r} is not a URL; for a directory write {near}")
    if config.has_host_tier:
        if not config.prefix_cache:
            raise ConfigError(
                f"host_memory={config.host_memory} holds cached prefixes, and prefix_cache=False keeps none; "
                "leave prefix_cache on, or use host_memory=0"
            )
        return
    for name, nothing in (("storage", ""), ("write_policy", "write_through"), ("prefetch", "best_effort")):
        value = getattr(config, name)
        if value != nothing:
            shown = "URL" if name == "storage" else value  # a URL can hold a password
            raise ConfigError(
                f"{name}={shown} needs a host tier, pages go through it; add host_memory=auto or a size such as "
                f"host_memory=4GiB, or leave {name} out"
            )


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
