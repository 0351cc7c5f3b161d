"""The panels of the dashboard, in rows."""

from __future__ import annotations

from dataclasses import dataclass

from launch.dashboards.promql import now, quantile, rate, share


@dataclass(frozen=True)
class Panel:
    """One graph.

    Attributes:
        unit: Grafana's identifier of the unit.
        queries: (PromQL, legend); {{name}} in a legend shows a label.
        text: description.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def _latency(title: str, name: str, text: str) -> Panel:
    return Panel(title, "s", tuple((quantile(name, at), f"p{100 * at:.0f}") for at in (0.5, 0.9, 0.99)), text)


_LOAD = (
    Panel(
        "Tokens per second",
        "short",
        (
            (rate("prompt_tokens", "replica"), "prompt, replica {{replica}}"),
            (rate("computed_tokens", "replica"), "computed, replica {{replica}}"),
            (rate("output_tokens", "replica"), "output, replica {{replica}}"),
        ),
        "Prompt tokens of requests with output, tokens scheduled for computation, and tokens generated.",
    ),
    Panel(
        "Requests",
        "short",
        (
            (now("requests_running", "replica"), "running, replica {{replica}}"),
            (now("requests_waiting", "replica"), "waiting, replica {{replica}}"),
        ),
    ),
    Panel(
        "Requests ended per second",
        "reqps",
        ((rate("requests_finished", "reason"), "{{reason}}"), (rate("requests_refused"), "rejected, queue full")),
    ),
    Panel("HTTP responses per second", "reqps", ((rate("http_responses", "status"), "{{status}}"),)),
)
_LATENCY = (
    _latency("Time to first token", "time_to_first_token_seconds", "From arrival at the server."),
    _latency("Inter-token latency", "inter_token_latency_seconds", "Between consecutive tokens of a request."),
    _latency("Request duration", "request_duration_seconds", "From arrival at the server to the last token."),
    _latency("Queue time", "queue_time_seconds", "From arrival at the engine until the request starts to run."),
)
_DRAFTS = (
    Panel(
        "Tokens per step of a request",
        "short",
        (
            (
                f"{rate('output_tokens', 'replica')} / "
                f"({rate('output_tokens', 'replica')} - {rate('accepted_draft_tokens', 'replica')} > 0)",
                "replica {{replica}}",
            ),
        ),
        "1 without draft tokens; each accepted draft token adds one.",
    ),
    Panel(
        "Draft tokens per second",
        "short",
        (
            (rate("drafted_tokens", "position"), "drafted at {{position}}"),
            (rate("accepted_draft_tokens", "position"), "accepted at {{position}}"),
        ),
        "By position after the last known token.",
    ),
)
_HITS = (
    Panel(
        "Share of prompt tokens from the cache",
        "percentunit",
        ((share("cached_prompt_tokens", "prompt_tokens", "replica"), "replica {{replica}}"),),
    ),
    Panel(
        "Prompt tokens from the cache per second",
        "short",
        ((rate("cached_prompt_tokens_by_tier", "tier"), "{{tier}}"),),
        "By the tier that held them.",
    ),
    Panel(
        "Cache misses by reason",
        "reqps",
        ((rate("cache_misses", "reason"), "{{reason}}"),),
        "Requests per second that did not reuse their whole prompt, by the first reason after their cached tokens.",
    ),
    Panel(
        "Reused and reusable share of prompt tokens",
        "percentunit",
        (
            (share("tenant_cached_prompt_tokens", "tenant_prompt_tokens"), "reused"),
            (f"1 - {share('tenant_new_prompt_tokens', 'tenant_prompt_tokens')}", "by a cache without limits"),
            (now("achievable_prompt_share"), "by a cache without limits, since the start"),
            (now("achievable_prompt_share_error"), "error of that"),
        ),
        "The second is estimated; in short windows with few requests it is uncertain.",
    ),
    Panel(
        "Share of prompt tokens lost, by cause",
        "percentunit",
        (
            (
                f"{rate('tenant_lost_prompt_tokens', 'cause')} / on () group_left () "
                f"({rate('tenant_prompt_tokens')} > 0)",
                "{{cause}}",
            ),
            (now("tier_doubling_gain", "tier"), "won by twice the {{tier}} tier"),
        ),
        "What a cache without limits would have reused in addition, and what twice a tier would add.",
    ),
    Panel(
        "Warnings",
        "short",
        ((now("cache_warnings", "replica"), "replica {{replica}}"),),
        "For example, a tier that stores but never hits; `raycache cache status` shows their texts.",
    ),
)
_PAGES = (
    Panel(
        "Device pages",
        "short",
        (
            (now("pages_in_use"), "in use"),
            (now("pages_locked"), "cached, in use"),
            (f"{now('pages_cached')} - {now('pages_locked')}", "cached"),
            (now("pages_free"), "free"),
        ),
    ),
    Panel(
        "Pages and slots used",
        "percentunit",
        (
            (
                f"1 - {now('component_units_free', 'tier', 'component')} "
                f"/ ({now('component_units', 'tier', 'component')} > 0)",
                "{{tier}}: {{component}}",
            ),
        ),
        "Per component: pages, window pages, slots of recurrent states.",
    ),
    Panel(
        "Pages evicted per second",
        "short",
        (
            (rate("evicted_pages"), "device"),
            (rate("evicted_restore_points"), "device, restore points"),
            (rate("tier_evicted_pages", "tier"), "{{tier}}"),
        ),
    ),
    Panel(
        "Preemptions per second",
        "short",
        ((rate("preemptions", "replica"), "replica {{replica}}"),),
        "Running requests that had to give up their pages; many mean that the device pool is too small.",
    ),
)
_TIERS = (
    Panel("Bytes moved per second", "Bps", ((rate("move_bytes", "lane"), "{{lane}}"),)),
    Panel(
        "Time in transfers",
        "percentunit",
        ((rate("move_seconds", "lane"), "{{lane}}"),),
        "Fraction of time spent in transfers between tiers.",
    ),
    Panel("Storage used", "bytes", ((now("tier_used_bytes", "tier"), "{{tier}}"),)),
    Panel(
        "Storage errors per second",
        "short",
        tuple(
            (rate(name), legend)
            for name, legend in (
                ("tier_unavailable_requests", "unavailable"),
                ("tier_objects_corrupt", "corrupt"),
                ("tier_objects_foreign", "foreign"),
                ("tier_io_errors", "read or write failed"),
                ("tier_objects_disk_full", "disk full"),
                ("tier_failed_loads", "loads failed"),
            )
        ),
    ),
)
_GANG = (
    Panel("Ready", "short", (("min by (model_name) (" + now("ready", "model_name") + ")", "{{model_name}}"),)),
    Panel(
        "Epoch",
        "short",
        ((f"max by (replica) ({now('epoch', 'replica')})", "replica {{replica}}"),),
        "Number of the current gang of ranks; increases whenever ranks are lost.",
    ),
    Panel(
        "Gangs and engines lost",
        "short",
        ((now("rebuilds"), "gangs"), (now("engines_lost"), "engines")),
    ),
    Panel("Steps per second", "short", ((rate("steps", "replica"), "replica {{replica}}"),)),
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Load": _LOAD,
    "Latency": _LATENCY,
    "Draft tokens": _DRAFTS,
    "Cache hits": _HITS,
    "Pages": _PAGES,
    "Tiers": _TIERS,
    "Ranks": _GANG,
}
