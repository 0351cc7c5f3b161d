"""Aliases of metrics under the names of vLLM and SGLang, so that their dashboards work unchanged.

Names as of vLLM 0.12 to 0.32 (vllm/v1/metrics/loggers.py) and SGLang 0.5 (srt/metrics/collector.py). Only metrics with
the same meaning have one; all have the labels model_name and engine, which is the replica's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric as Family

from raycache.observe.figures import PREFIX


@dataclass(frozen=True)
class Alias:
    """Another name of a metric.

    Attributes:
        name: without _total, _bucket, _sum and _count.
        of: name in figures.py.
        labels: renamed labels: our name -> theirs.
        where: labels that a series must have, which its alias has not.
    """

    name: str
    of: str
    labels: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


ALIASES = (
    Alias("vllm:num_requests_running", "requests_running"),
    Alias("vllm:num_requests_waiting", "requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "pages_used_share"),
    Alias("vllm:prefix_cache_queries", "prompt_tokens"),
    Alias("vllm:prefix_cache_hits", "cached_prompt_tokens"),
    Alias("vllm:prompt_tokens", "prompt_tokens"),
    Alias("vllm:generation_tokens", "output_tokens"),
    Alias("vllm:num_preemptions", "preemptions"),
    Alias("vllm:request_success", "requests_finished", {"reason": "finished_reason"}),
    Alias("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    Alias("vllm:inter_token_latency_seconds", "inter_token_latency_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "request_duration_seconds"),
    Alias("vllm:request_queue_time_seconds", "queue_time_seconds"),
    Alias("vllm:request_prefill_time_seconds", "prefill_time_seconds"),
    Alias("vllm:request_decode_time_seconds", "decode_time_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    Alias("vllm:request_prompt_tokens", "request_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "request_generation_tokens"),
    Alias(
        "vllm:cache_config_info",
        "cache_info",
        {
            "page_size": "block_size",
            "pages": "num_gpu_blocks",
            "host_pages": "num_cpu_blocks",
            "prefix_cache": "enable_prefix_caching",
        },
    ),
    Alias("vllm:kv_offload_store_bytes", "move_bytes", where={"lane": "save"}),
    Alias("vllm:kv_offload_store_time", "move_seconds", where={"lane": "save"}),
    Alias("vllm:kv_offload_load_bytes", "move_bytes", where={"lane": "load"}),
    Alias("vllm:kv_offload_load_time", "move_seconds", where={"lane": "load"}),
    Alias("sglang:num_running_reqs", "requests_running"),
    Alias("sglang:num_queue_reqs", "requests_waiting"),
    Alias("sglang:token_usage", "pages_used_share"),
    Alias("sglang:cache_hit_rate", "cached_prompt_share"),
    Alias("sglang:prompt_tokens", "prompt_tokens"),
    Alias("sglang:generation_tokens", "output_tokens"),
    Alias("sglang:cached_tokens", "cached_prompt_tokens_by_tier", {"tier": "cache_source"}),
    Alias("sglang:time_to_first_token_seconds", "time_to_first_token_seconds"),
    Alias("sglang:inter_token_latency_seconds", "inter_token_latency_seconds"),
    Alias("sglang:e2e_request_latency_seconds", "request_duration_seconds"),
    Alias("sglang:queue_time_seconds", "queue_time_seconds"),
    Alias("sglang:prompt_tokens_histogram", "request_prompt_tokens"),
    Alias("sglang:generation_tokens_histogram", "request_generation_tokens"),
)


def aliases(families: Iterable[Family]) -> list[Family]:
    """Return copies of the given families under their other names."""
    known = {family.name: family for family in families}
    return [_renamed(known[PREFIX + alias.of], alias) for alias in ALIASES if PREFIX + alias.of in known]


def deployment_requests(families: Iterable[Family]) -> list[Family]:
    """Return finished requests as Ray Serve counts those of a deployment, if the families have them.

    Ray's boards join the metrics of a process with this one, of which a process can have a single series.
    """
    counted = Family(
        "serve_deployment_request_counter_total", "Finished requests, by the name that Ray's boards read.", "gauge"
    )
    for family in families:
        if family.name == f"{PREFIX}requests_finished" and family.samples:
            model = family.samples[0].labels["model_name"]
            labels = {"deployment": model, "replica": "engines", "application": "raycache", "route": "/v1"}
            counted.add_sample(counted.name, labels, sum(sample.value for sample in family.samples))
    return [counted]


def _renamed(family: Family, alias: Alias) -> Family:
    renamed = Family(alias.name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix == "_created":  # a separate gauge that those dashboards do not read
            continue
        if any(sample.labels.get(name) != value for name, value in alias.where.items()):
            continue
        left_out = {"replica", *alias.where}
        labels = {alias.labels.get(name, name): value for name, value in sample.labels.items() if name not in left_out}
        engine = {"engine": sample.labels.get("replica", "0")}
        renamed.add_sample(alias.name + suffix, {**labels, **engine}, sample.value)
    return renamed
