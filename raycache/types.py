"""Data types shared by all modules: requests, outputs and engine state.

Frozen dataclasses with no behaviour but their own validation, independent of pages, ranks and HTTP.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raycache.errors import RequestError

MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per position for `logprobs` (the limit of the OpenAI API)."""

PackedTokens = bytes | bytearray
"""Token ids as packed little-endian int32: 4 bytes a token, compared with memcmp."""


def packed(tokens: Sequence[int]) -> bytes:
    """Pack token ids; those of an `array("i")` are copied as they are."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens.tobytes()
    return array("i", tokens).tobytes()


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the model's context length
    CANCELLED = "cancelled"  # the client disconnected or cancelled
    TIMEOUT = "timeout"  # its deadline passed
    ERROR = "error"  # the engine failed while running it


class Miss(StrEnum):
    """Why the rest of a prompt was not reused from the cache: the first reason after its cached tokens.

    None of them reveals a hit under another tenant's salt, that is, that somebody else has sent the same prompt.
    """

    NONE = ""  # everything reusable was reused
    NEVER_SEEN = "never_seen"  # no tier has ever held it
    SHORTER_THAN_PAGE = "shorter_than_page"  # only whole pages are cached
    EVICTED_DEVICE = "evicted_device"  # evicted, and no lower tier has it
    EVICTED_HOST = "evicted_host"
    EVICTED_STORAGE = "evicted_storage"
    STATE_MISSING = "state_missing"  # pages are cached, a component's state is not; see RequestOutput.cut_by
    IDENTITY = "identity_mismatch"  # written for other weights, adapter or row format
    CHECKSUM = "checksum"  # the bytes found were not those written
    TIMEOUT = "timeout"  # storage has or may have it, but did not deliver it in time
    SLOWER = "slower_than_recompute"  # loading it would have taken longer than computing it
    NO_CAPACITY = "no_capacity"  # no free pages in the tier above


class CacheAction(StrEnum):
    """Operator actions on the cache tiers of a running engine."""

    STATUS = "status"
    ATTACH = "attach"
    DETACH = "detach"
    CLEAR = "clear"
    RESIZE = "resize"
    SCRUB = "scrub"
    INSPECT = "inspect"
    FLUSH = "flush"
    TREE = "tree"


TIERS = ("device", "host", "storage")
"""Tiers of the cache, fastest first."""


@dataclass(frozen=True, slots=True)
class TreeQuery:
    """What TREE looks for: the largest cached prefixes.

    Attributes:
        limit: prefixes to return per tier.
        depth: levels of prefixes; the first one is the tenants'.
        tenants: (salt, name) of known ones. Tokens are shown of the first only.
        is_all: whether to look at all tenants, or at those only.
    """

    limit: int
    depth: int
    tenants: tuple[tuple[str, str], ...]
    is_all: bool


@dataclass(frozen=True, slots=True)
class CacheCommand:
    """An operator's command. The result is a plain mapping; see AsyncEngine.admin in api/engine.py.

    Attributes:
        url: for ATTACH: URL of the storage.
        size: for RESIZE: size limit of the storage in bytes.
        tiers: for CLEAR: which of TIERS.
        prompt: for INSPECT: token ids.
        cache_salt: for INSPECT: salt of the prompt's tenant.
        timeout_s: for FLUSH and SCRUB: time limit, after which they report what they have done so far; for TREE: how
            long callers wait.
        tree: for TREE.
        replica: name of the target replica; empty: all.
    """

    kind: CacheAction
    url: str = ""
    size: int = 0
    tiers: tuple[str, ...] = ()
    prompt: tuple[int, ...] = ()
    cache_salt: str = ""
    timeout_s: float = 0.0
    tree: TreeQuery | None = None
    replica: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Defaults are those of the OpenAI API.

    Attributes:
        temperature: sampling temperature; 0: greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
        seed: the same seed gives the same tokens in any batch; None: chosen at random.
        repetition_penalty: > 0; divides positive (multiplies negative) logits of tokens seen in prompt or output
            ("CTRL", arXiv 1909.05858, section 4.1).
        presence_penalty: in [-2, 2]; subtracted once from the logit of each token in the output.
        frequency_penalty: in [-2, 2]; subtracted once per occurrence in the output.
        logit_bias: token id -> value in [-100, 100] added to its logit.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: token ids that end the output like the end-of-sequence token does.
        max_tokens: maximum tokens to generate; None: up to the context length.
        min_tokens: tokens to generate before the end-of-sequence token or one of stop_token_ids can be sampled; stop
            texts, and a grammar that allows nothing else, end the output before.
        ignore_eos: continue after the end-of-sequence token.
        logprobs: number of alternatives to report per generated token (0: only the chosen one); None: no logprobs.
        grammar: in llguidance's dialect of Lark; tokens that would leave it are never sampled. "": none.
        prompt_logprobs: number of alternatives to report per prompt token, which recomputes the whole prompt; None: no
            prompt logprobs.
    Raises:
        RequestError: a value is out of its range; `field` names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0, got 0; use temperature=0 for greedy decoding", field="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _in_range("logit_bias", bias, -100.0, 100.0)
            _in_range("logit_bias", token, 0, 2**31 - 1)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string", field="stop")
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it, or raise max_tokens",
                field="min_tokens",
            )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _in_range(name, count, 0, MAX_TOP_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # `not (low <= value)` instead of `value < low`, to reject NaN too.
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", field=name)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt for the engine.

    Attributes:
        request_id: unique among requests in progress.
        prompt: token ids, at least one.
        priority: lower values run first; equal priorities run in order of arrival.
        timeout_s: seconds from arrival after which it ends with FinishReason.TIMEOUT; None: no limit.
        cache_salt: requests with different salts never share cached tokens; "" is a salt like any other.
        cache_priority: with eviction=priority, its cached tokens are evicted after those of lower priority.
        cache_ttl_s: seconds after which cache_priority counts as 0; 0: never.
        affinity: requests with the same one prefer the same replica, if no other has more of their prompt; "": none.
        output: tokens generated before an engine was lost; generation continues after them and returns only new ones.
        page_chain: digests of the prompt's pages, from whoever tokenised it (raycache/cache/keys.py), so that the
            engine need not make them; b"": none. Never what a client sent: pages are stored under these digests.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    cache_priority: int = 0
    cache_ttl_s: float = 0.0
    affinity: str = ""
    output: Sequence[int] = ()
    page_chain: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token and of its most likely alternatives, natural log, of the model's own distribution.

    Attributes:
        token_id: the token at this position.
        logprob: its log-probability, before temperature, penalties and filters.
        top: (token id, log-probability) of the most likely tokens, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """Output increment of one step for one request; increments arrive in order.

    Do not modify it: it is not frozen only because a frozen one takes several times as long to make, to pickle and to
    unpickle, once per token.

    Attributes:
        token_ids: tokens generated since the last increment, including a final stop token.
        logprobs: one per token in `token_ids`, if requested.
        prompt_logprobs: in the first increment, one per prompt token (None for the first), if requested.
        finish_reason: set in the last increment.
        cached_tokens: prompt tokens reused from the cache.
        cut_by: component, such as "state", whose missing rows prevented more reuse, or "".
        cached_by_tier: tier (of TIERS) -> tokens reused from it; adds up to cached_tokens.
        miss: why the rest of the prompt was not reused.
        queued_s: seconds from arrival at the engine to the first start.
        num_starts: how often it was started; more than once after preemption or loss of its ranks.
        drafted_tokens, accepted_tokens: draft tokens verified, and accepted.
        error: what failed, with FinishReason.ERROR.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cut_by: str = ""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    miss: Miss = Miss.NONE
    queued_s: float = 0.0
    num_starts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters and gauges. Counters only grow while the engine lives.

    Attributes:
        steps: steps planned.
        running, waiting: current requests.
        prompt_tokens: prompt tokens of all requests that got their first token.
        cached_tokens: those of prompt_tokens that came from the cache.
        computed_tokens: tokens submitted to the ranks.
        output_tokens: tokens generated.
        drafted, accepted: draft tokens verified, and accepted, by position after the last known token, from 1.
        finished: finish reason -> requests.
        preemptions: times that a running request lost its pages to others.
        evicted_pages: cached pages freed for others.
        pages_total, pages_free, pages_in_use, pages_cached: the device pool; the last three add up to the first.
        pages_locked: cached pages that running requests hold.
        restore_points: cached positions from which sequences with windows or recurrent states can resume.
        evicted_restore_points: restore points freed for others.
        spaces: window and state spaces -> (total, free) pages or slots.
        cached_by_tier: cached_tokens by tier.
        misses: Miss -> requests whose reuse ended for that reason, NONE excepted.
        tiers: host and storage -> counters and gauges by name, such as {"host": {"pages_total": 512}}.
        components: tier -> component space -> (total, free) units of it: pages, or slots of states.
        cache_info: page_size, pages, host_pages and prefix_cache, as texts.
        warnings: one line each, such as about a tier that stores and never hits.
        refused: requests rejected because the queue was full.
        epoch: number of the running gang.
        rebuilds: gangs lost and replaced.
        engines_lost: engine processes lost and replaced.
        lost_at: when the loss of the last gang that was replaced was noticed, in seconds since 1970; 0 for none.
        rebuild_s: phase of its replacement -> seconds, until the next gang was ready.
        replicas: name of each replica -> its own counters, of which the others are the sums. Empty without replicas.
    """

    steps: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    drafted: Mapping[int, int] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)
    finished: Mapping[str, int] = field(default_factory=dict)
    preemptions: int = 0
    evicted_pages: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_in_use: int = 0
    pages_cached: int = 0
    pages_locked: int = 0
    restore_points: int = 0
    evicted_restore_points: int = 0
    spaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    components: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    cache_info: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    refused: int = 0
    epoch: int = 0
    rebuilds: int = 0
    engines_lost: int = 0
    lost_at: float = 0.0
    rebuild_s: Mapping[str, float] = field(default_factory=dict)
    replicas: Mapping[str, EngineStats] = field(default_factory=dict)


class StreamPhase(StrEnum):
    """Where a request in progress is."""

    WAITING = "waiting"  # for its first turn
    LOADING = "loading"  # its prefix is being fetched from storage, or loaded to the device
    RUNNING = "running"  # its prompt is being computed, or it generates
    PREEMPTED = "preempted"  # it ran, lost its pages to others or its ranks, and waits to continue


@dataclass(frozen=True, slots=True)
class StreamState:
    """A request in progress, as its engine sees it.

    Attributes:
        computed_tokens: tokens whose state is there, reused or computed; 0 while it waits.
        output_tokens: tokens generated.
        cached_by_tier: tier (of TIERS) -> prompt tokens reused from it, as of its first start.
        replica: name of the replica that has it; "" if there is only one.
    """

    phase: StreamPhase
    computed_tokens: int = 0
    output_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    replica: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine for its front end.

    Attributes:
        model: name that clients use.
        model_dir: directory of config, weights and tokenizer.
        vocab_size: token ids lie in [0, vocab_size).
        eos_token_ids: tokens that end an output.
        max_model_len: limit of prompt plus output, in tokens.
        page_size: tokens per page.
        num_pages: pages of the device pool.
        max_queue: maximum waiting requests.
        ranks: one row per rank for status output: rank, coords, node, device, kv bytes.
        tiers: one of TIERS -> {"tokens": n, "bytes": n, "components": {name: bytes}}; storage has "name" and "bytes".
        decode_weights: what a rank reads of its weights in a decode step: "all", "split over cp", or "all: REASON".
        chained_weights: fingerprint of the weights for `GenerateRequest.page_chain`; "" if no tier needs digests.
    """

    model: str
    model_dir: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    page_size: int
    num_pages: int
    max_queue: int
    ranks: tuple[Mapping[str, Any], ...] = ()
    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    decode_weights: str = "all"
    chained_weights: str = ""
