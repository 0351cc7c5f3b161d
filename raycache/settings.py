"""All settings, from which the command line, the YAML file and their reference are made.

A field is a flag: `kv_memory` is `--kv-memory` and the YAML key `kv_memory`; its metadata has its help text and rules.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from raycache.errors import ConfigError


def setting(
    default: Any,
    text: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    unit: str = "",
    least: float = 0,
    is_common: bool = False,
) -> Any:
    """A field of a dataclass that is a setting.

    Args:
        default: its type is the setting's; a setting whose default is one of `words` is a whole number, unless its unit
            is a kind of text.
        text: the help text, a short sentence without the default.
        group: heading in the help.
        choices: all values that a text can have.
        words: what can be said instead of a number, such as "auto" and "none".
        unit: what a value is, in capitals, such as TOKENS.
        least: smallest number; 0 for anything above 0, as all whole numbers are.
        is_common: whether `--help` shows it; `--help-all` shows all.
    """
    known = {"help": text, "group": group, "choices": choices, "words": words, "unit": unit, "least": least}
    return field(default=default, metadata={**known, "is_common": is_common})


_TEXTS = {"SIZE": "a size such as 512MiB or 4GiB", "URL": "a URL"}
"""Units of texts, and how messages call them."""

_model = partial(setting, group="model")
_parallel = partial(setting, group="parallelism")
_memory = partial(setting, group="memory and tiers")
_scheduling = partial(setting, group="scheduling")
_server = partial(setting, group="server")
_cluster = partial(setting, group="cluster")
_observe = partial(setting, group="observability")


@dataclass(frozen=True)
class Settings:
    """Every setting, each value checked by itself.

    Raises:
        ConfigError: a value cannot work; the message names the setting and what would work.
    """

    model: str = _model(
        "",
        "directory of a Hugging Face model (config.json, *.safetensors, tokenizer), or its Hub name, such as "
        "Qwen/Qwen3-8B",
        is_common=True,
    )
    revision: str = _model("", "branch, tag or commit of a Hub model (default: its main branch)", unit="NAME")
    served_model_name: str = _model(
        "",
        "model name that clients use (default: the name of the directory, or on the Hub)",
        unit="NAME",
        is_common=True,
    )
    max_model_len: int | Literal["auto"] = _model(
        "auto",
        "maximum length of prompt and output together; auto: the model's own limit",
        words=("auto",),
        unit="TOKENS",
        is_common=True,
    )
    dtype: str = _model(
        "auto",
        "data type of weights and cache; auto: the checkpoint's on cuda, float32 on cpu",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = _model(
        "auto",
        "form of quantised weights in memory; auto, stored: quantised where a kernel exists, otherwise dequantised "
        "(stored warns about it); bfloat16: all dequantised",
        choices=("auto", "stored", "bfloat16"),
    )
    dummy_weights: bool = _model(
        False, "use random weights of the shapes in config.json, to measure without a checkpoint"
    )
    chat_template: str = _model("", "file with a Jinja chat template that replaces the model's own", unit="FILE")
    generation_config: str = _model(
        "auto",
        "sampling settings of requests that set none: auto, those in the model's generation_config.json; none, those "
        "of the OpenAI API; or a file",
        unit="auto|none|FILE",
    )

    tp: int = _parallel(1, "tensor-parallel ranks: heads are split over them", unit="RANKS", is_common=True)
    pp: int = _parallel(1, "pipeline stages: layers are split over them", unit="STAGES", is_common=True)
    cp: int = _parallel(1, "context-parallel ranks: tokens are split over them", unit="RANKS", is_common=True)
    replicas: int = _parallel(
        1, "copies of the model behind one endpoint, each with its own ranks and cache", unit="COPIES", is_common=True
    )
    device: str = _parallel(
        "auto",
        "device of the ranks; auto: cuda if Ray has GPUs, otherwise cpu",
        choices=("auto", "cpu", "cuda"),
        is_common=True,
    )
    cpu_threads: int | Literal["auto"] = _parallel(
        "auto",
        "CPU threads of a rank; auto: OMP_NUM_THREADS where it is set, otherwise its share of the node's cores",
        words=("auto",),
        unit="THREADS",
    )
    pp_layers: str = _parallel(
        "auto", "layers per pipeline stage, such as 12,12,11; auto: balanced by their cost", unit="COUNTS|auto"
    )
    decode_split: str = _parallel(
        "auto",
        "split the weights of decode steps over cp, so that a rank reads only its share; auto: where that saves more "
        "time than the exchanges between ranks cost",
        choices=("auto", "on", "off"),
    )
    peer_memory: bool = _parallel(
        True,
        "exchange tensors between GPUs through peer memory where it is supported and faster; false: always use NCCL",
    )
    routing: str = _parallel(
        "prefix",
        "which replica gets a request: prefix, with the longest cached prefix unless it is busier; load, the least "
        "busy; round_robin, each in turn",
        choices=("prefix", "load", "round_robin"),
    )

    kv_memory: str = _memory(
        "auto",
        "cache size per rank, such as 4GiB; auto: what is left on cuda, a share of the free memory on cpu",
        words=("auto",),
        unit="SIZE",
        is_common=True,
    )
    host_memory: str = _memory(
        "none",
        "host tier size per node, such as 64GiB; auto: a share of the free memory; none: no host tier",
        words=("auto", "none"),
        unit="SIZE",
        is_common=True,
    )
    storage: str = _memory(
        "none",
        "storage tier: file:///DIR?size=50GiB, s3://BUCKET/PREFIX or redis://HOST:PORT/DB ({node} in it is the node's "
        "number); needs host_memory; none: no storage tier. Put passwords in the YAML file; flags are visible to other "
        "users",
        words=("none",),
        unit="URL",
        is_common=True,
    )
    num_pages: int | Literal["auto"] = _memory(
        "auto", "cache size in pages; auto: as many as kv_memory holds", words=("auto",), unit="PAGES"
    )
    page_size: int = _memory(64, "size of a cache page", unit="TOKENS")
    kv_dtype: str = _memory(
        "auto",
        "data type of cached latents (MLA); auto: as dtype; fp8: 8 bits with a scale per 128 numbers",
        choices=("auto", "fp8"),
    )
    prefix_cache: bool = _memory(True, "reuse cached prefixes")
    restore_interval: int | Literal["none"] = _memory(
        2048,
        "distance of restore points inside long prompts, for recurrent and window layers; none: only where prompts end "
        "and branch",
        words=("none",),
        unit="TOKENS",
    )
    restore_points: int | Literal["auto"] = _memory(
        "auto",
        "restore points kept beyond those of running requests; auto: in proportion to num_pages",
        words=("auto",),
        unit="POINTS",
    )
    eviction: str = _memory(
        "lru",
        "what a full tier evicts first: the least recently used, the least frequently used, or by the requests' "
        "cache_priority and cache_ttl_s",
        choices=("lru", "lfu", "priority"),
    )
    write_policy: str = _memory(
        "write_through",
        "when a page is copied to the host tier: once computed, when a second request uses it, or when evicted",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    prefetch: str = _memory(
        "best_effort",
        "whether a request waits for its stored prefix: no, fully, or up to prefetch_timeout_s",
        choices=("best_effort", "wait_complete", "timeout"),
    )
    prefetch_timeout_s: float = _memory(
        2.0, "time limit of one storage call, and of a request's wait with prefetch=timeout", unit="SECONDS"
    )
    prefetch_share: float = _memory(
        0.5, "part of the host tier that prefetches may fill at a time, above 0 and up to 1", unit="FRACTION"
    )

    max_running: int = _scheduling(64, "maximum requests in one batch", unit="REQUESTS", is_common=True)
    draft: str = _scheduling(
        "none",
        "source of draft tokens (speculative decoding): ngram, text repeated from prompt and output; mtp, a layer of "
        "the checkpoint; or the directory or Hub name of a draft model or EAGLE head",
        unit="none|ngram|mtp|MODEL",
        is_common=True,
    )
    draft_tokens: int = _scheduling(4, "maximum draft tokens per request and step", unit="TOKENS")
    adaptive_drafts: bool = _scheduling(True, "adapt the draft length to the acceptance rate and step time")
    max_queue: int = _scheduling(1024, "maximum waiting requests; more are refused with HTTP 429", unit="REQUESTS")
    max_step_tokens: int | Literal["auto"] = _scheduling(
        "auto", "token budget of one step; auto: 512 on cpu, 8192 on cuda", words=("auto",), unit="TOKENS"
    )
    prompt_share: float = _scheduling(
        0.25,
        "minimum share of max_step_tokens for prompts while other requests decode; a smaller share lowers the "
        "latency of those; grows with the fraction of requests waiting to start; above 0 and at most 1 (no limit)",
        unit="FRACTION",
    )
    overlap: str = _scheduling(
        "auto",
        "plan the next step while one runs; auto: on cuda with pp=1",
        choices=("auto", "on", "off"),
    )
    attention: str = _scheduling(
        "auto",
        "attention backend; auto: flashinfer on cuda in half precision where it supports the model, otherwise torch",
        choices=("auto", "flashinfer", "torch"),
    )
    cuda_graphs: bool = _scheduling(
        True, "capture decode steps and other short steps in CUDA graphs at startup, where attention allows it"
    )

    host: str = _server("127.0.0.1", "address to bind to", unit="ADDRESS", is_common=True)
    port: int | Literal["auto"] = _server(
        8000, "port to bind to; auto: a free one", words=("auto",), unit="PORT", is_common=True
    )
    api_key: str = _server(
        "",
        "key that clients must send, as a bearer token or `x-api-key`; prefer RAYCACHE_API_KEY, since flags are "
        "visible to other users",
        unit="KEY",
        is_common=True,
    )
    api_keys: str = _server(
        "",
        "file of tenants, who never share cached tokens: lines of `raycache key`, each a name and the hash of its key",
        unit="FILE",
        is_common=True,
    )
    tls_cert: str = _server("", "certificate chain (PEM) to serve https with", unit="FILE", is_common=True)
    tls_key: str = _server("", "private key (PEM) of the certificate", unit="FILE", is_common=True)
    request_timeout_s: float | Literal["none"] = _server(
        600.0, "time limit of a request; none: no limit", words=("none",), unit="SECONDS"
    )
    default_max_tokens: int | Literal["auto"] = _server(
        "auto",
        "max_tokens of requests that set none; auto: the rest of the context for chats, 16 for completions",
        words=("auto",),
        unit="TOKENS",
    )
    excess_max_tokens: str = _server(
        "refuse",
        "if max_tokens does not fit the context: refuse the request, or cut max_tokens to what fits",
        choices=("refuse", "cut"),
    )
    allow_origin: str = _server(
        "none",
        "origins of web pages that may use the server (CORS), such as https://chat.example.com, separated by commas; "
        "*: all",
        unit="none|*|ORIGIN,...",
    )
    prompt_history: str = _server(
        "64MiB",
        "memory for recent prompts, to tell why a prompt was recomputed (GET /cache/why); none: off",
        words=("none",),
        unit="SIZE",
    )
    drop_attribution: bool = _server(
        True,
        "remove Claude Code's line x-anthropic-billing-header from prompts; it changes with each request, so nothing "
        "after it could be reused",
    )
    drop_lines: str = _server(
        "",
        "remove matching lines from system and user messages of chats, such as 'x-session: .*|Request number .*', so "
        "that prompts that differ only there share a prefix",
        unit="REGEX",
    )
    date_lines: str = _server(
        "",
        "remove the time of day from matching lines in system and user messages of chats, such as 'Current time: .*'",
        unit="REGEX",
    )
    sort_tools: bool = _server(False, "sort the tools of chats by name, and the keys of their schemas")
    max_body: str = _server("8MiB", "largest request body", unit="SIZE")
    max_connections: int = _server(
        4096,
        "maximum open connections; beyond that, the one that has waited longest without a complete request is closed",
        unit="CONNECTIONS",
    )
    header_timeout_s: float = _server(
        10.0, "time limit for a client to send a request's headers, and then its body", unit="SECONDS", least=1
    )
    ingress: str = _server(
        "builtin",
        "HTTP server: builtin, in this process; serve, in num_ingress processes of Ray Serve",
        choices=("builtin", "serve"),
    )
    num_ingress: str = _server(
        "1", "HTTP processes with ingress=serve: a number, or MIN-MAX to scale with the load", unit="N|MIN-MAX"
    )

    address: str = _cluster(
        "local",
        "Ray cluster: local starts one, auto finds a running one, HOST:PORT joins one that this machine belongs to, "
        "http://HOST:8265 launches on a remote one as a job",
        unit="ADDRESS",
        is_common=True,
    )
    placement: str = _cluster(
        "auto",
        "node of each rank; auto: tp inside a node, cp next to it; or RANKS@NODE;..., such as "
        "0-3@10.0.0.1;4-7@10.0.0.2",
        unit="auto|RANKS@NODE;...",
    )
    interface: str = _cluster(
        "",
        "network between nodes: an interface such as eth1 or a subnet such as 10.0.0.0/16 (default: Ray's)",
        unit="NETWORK",
    )
    insecure_cluster: bool = _cluster(
        False,
        "allow a Ray cluster without tokens that other machines can reach: anyone who reaches it can run code on it",
    )
    start_timeout_s: float = _cluster(
        600.0,
        "time limit for ranks to start and load weights, and for a download to make progress",
        unit="SECONDS",
        least=1,
    )
    rank_timeout_s: float = _cluster(
        120.0, "time without an answer after which a rank is lost", unit="SECONDS", least=1
    )
    spare_ranks: str = _cluster(
        "auto",
        "keep a spare process per rank, with everything imported, that takes over when the rank is lost; auto: on cuda",
        choices=("auto", "on", "off"),
    )
    drain_timeout_s: float = _cluster(
        30.0,
        "time limit to save the cache of a draining node or replica, and for a replica's requests to finish",
        unit="SECONDS",
        least=1,
    )

    log_format: str = _observe("text", "format of log lines", choices=("text", "json"), is_common=True)
    otlp_endpoint: str = _observe(
        "",
        "OpenTelemetry collector that gets a trace per request, such as http://HOST:4318",
        unit="URL",
        is_common=True,
    )
    kv_events: str = _observe(
        "none",
        "publish KV events over ZeroMQ in vLLM's format, for routers: tcp://*:PORT waits for readers, "
        "tcp://HOST:PORT connects to one; replays are at PORT + 1000; none: off",
        words=("none",),
        unit="URL",
    )
    dashboard: bool = _observe(True, "start the Ray dashboard with a local cluster")

    def __post_init__(self) -> None:
        for known in fields(self):
            check_value(known, getattr(self, known.name))


def kind_of(known: Field[Any]) -> type:
    """Type of a setting's values that are not one of its words."""
    is_number = known.default in known.metadata["words"] and known.metadata["unit"] not in _TEXTS
    return int if is_number else type(known.default)


def check_value(known: Field[Any], value: object) -> None:
    """Check a value by itself.

    Raises:
        ConfigError: it is of another type, not one of the choices, or too small.
    """
    kind, least, choices = kind_of(known), known.metadata["least"], known.metadata["choices"]
    if value in known.metadata["words"]:
        return
    if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool) is not (kind is bool):
        raise ConfigError(f"{known.name} must be {_wanted(known)}, got {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{known.name}={value!r} is unknown; use one of {', '.join(choices)}")
    if isinstance(value, int | float) and kind is not bool and not (value >= least and value > 0):  # as NaN is not
        raise ConfigError(f"{known.name} must be {_wanted(known)}, got {value}")


def _wanted(known: Field[Any]) -> str:
    kind, least, words = kind_of(known), known.metadata["least"], known.metadata["words"]
    bound = f" of at least {least}" if least else " above 0"
    named = {
        int: f"a whole number{bound}",
        float: f"a number{bound}",
        str: _TEXTS.get(known.metadata["unit"], "a string"),
        bool: "true or false",
    }
    return " or ".join((named[kind], *words))
