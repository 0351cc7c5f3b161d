"""What /metrics shows: by our names, by those of other servers, for one replica and for several."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors.metrics import RayMetrics, publishing
from launch.dashboards import panels
from launch.dashboards.alerts import ALERTS
from raycache.observe.aliases import ALIASES
from raycache.observe.figures import ENGINE, FRONT, Kind
from raycache.observe.metrics import Metrics
from raycache.types import EngineStats, FinishReason, GenerateRequest, Miss, RequestOutput

_ROOT = Path(__file__).resolve().parents[2]
_STATS = EngineStats(
    running=3,
    waiting=2,
    prompt_tokens=1000,
    cached_tokens=250,
    computed_tokens=900,
    output_tokens=80,
    finished={"stop": 5, "error": 1},
    preemptions=4,
    refused=6,
    pages_total=64,
    cache_info={"page_size": "16", "pages": "64", "host_pages": "8", "prefix_cache": "True"},
    pages_in_use=10,
    pages_locked=6,
    pages_free=40,
    cached_by_tier={"device": 200, "host": 50},
    tiers={
        "host": {"saved_bytes": 4096, "save_s": 0.5, "loaded_bytes": 512, "load_s": 0.25, "pages_total": 8},
        "storage": {"persisted_bytes": 512, "persist_s": 2.0, "corrupt": 1, "queue": 9},
    },
    components={"device": {"full": (64, 40), "state": (8, 7)}, "host": {"full": (8, 8)}},
    epoch=3,
    rebuilds=2,
)


def values(metrics: Metrics) -> dict[str, float]:
    """Series -> value, as a parser of the text finds them; each name belongs to one family."""
    families = list(text_string_to_metric_families(metrics.render().decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    found = Metrics("m")
    with found.watch(GenerateRequest("a", [1, 2, 3])) as watch:
        watch.take(RequestOutput("a", (7,), queued_s=0.3))
        watch.take(RequestOutput("a", (8, 9)))
    found.count_response(200)
    found.show(_STATS)
    return found


def test_figures_of_the_engine_by_our_names(metrics: Metrics) -> None:
    found = values(metrics)
    for name, value in {
        "raycache_requests_running{model_name=m,replica=0}": 3,
        "raycache_requests_refused_total{model_name=m,replica=0}": 6,
        "raycache_move_bytes_total{lane=save,model_name=m,replica=0}": 4096,
        "raycache_move_seconds_total{lane=persist,model_name=m,replica=0}": 2.0,
        "raycache_component_units{component=state,model_name=m,replica=0,tier=device}": 8,
        "raycache_component_units_free{component=full,model_name=m,replica=0,tier=device}": 40,
        "raycache_tier_objects_corrupt_total{model_name=m,replica=0,tier=storage}": 1,
        "raycache_tier{model_name=m,replica=0,tier=storage,what=queue}": 9,
        "raycache_pages_used_share{model_name=m,replica=0}": 0.25,
        "raycache_epoch{model_name=m,replica=0}": 3,
        "raycache_rebuilds_total{model_name=m,replica=0}": 2,
        "raycache_ready{model_name=m}": 1,
        "raycache_http_responses_total{model_name=m,status=200}": 1,
        "raycache_queue_time_seconds_bucket{le=0.25,model_name=m}": 0,
        "raycache_queue_time_seconds_bucket{le=0.5,model_name=m}": 1,
        "raycache_inter_token_latency_seconds_count{model_name=m}": 2,
    }.items():
        assert found[name] == value, name


def test_the_same_by_the_names_that_other_dashboards_read(metrics: Metrics) -> None:
    found = values(metrics)
    for name, value in {
        "vllm:prefix_cache_queries_total{engine=0,model_name=m}": 1000,
        "vllm:prefix_cache_hits_total{engine=0,model_name=m}": 250,
        "vllm:kv_cache_usage_perc{engine=0,model_name=m}": 0.25,
        "vllm:num_requests_running{engine=0,model_name=m}": 3,
        "vllm:num_requests_waiting{engine=0,model_name=m}": 2,
        "vllm:generation_tokens_total{engine=0,model_name=m}": 80,
        "vllm:request_success_total{engine=0,finished_reason=stop,model_name=m}": 5,
        "vllm:time_to_first_token_seconds_count{engine=0,model_name=m}": 1,
        "vllm:request_prompt_tokens_sum{engine=0,model_name=m}": 3,
        "vllm:request_generation_tokens_sum{engine=0,model_name=m}": 3,
        "vllm:request_prefill_time_seconds_count{engine=0,model_name=m}": 1,
        "vllm:request_decode_time_seconds_count{engine=0,model_name=m}": 1,
        "vllm:request_time_per_output_token_seconds_count{engine=0,model_name=m}": 1,
        "vllm:kv_offload_store_bytes_total{engine=0,model_name=m}": 4096,
        "vllm:kv_offload_store_time_total{engine=0,model_name=m}": 0.5,
        "vllm:cache_config_info{block_size=16,enable_prefix_caching=True,engine=0,model_name=m,num_cpu_blocks=8,"
        "num_gpu_blocks=64}": 1,
        "sglang:cache_hit_rate{engine=0,model_name=m}": 0.25,
        "sglang:token_usage{engine=0,model_name=m}": 0.25,
        "sglang:num_running_reqs{engine=0,model_name=m}": 3,
        "sglang:num_queue_reqs{engine=0,model_name=m}": 2,
        "sglang:cached_tokens_total{cache_source=host,engine=0,model_name=m}": 50,
    }.items():
        assert found[name] == value, name
    assert {alias.of for alias in ALIASES} <= {metric.name for metric in (*ENGINE, *FRONT)}
    assert all(any(name.startswith(alias.name) for name in found) for alias in ALIASES)


def test_rays_boards_for_llms_find_what_they_read(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    published: dict[str, set[str]] = {}

    class Gauge:
        def __init__(self, name: str, text: str, *, tag_keys: tuple[str, ...]) -> None:
            self._name = name
            published[name] = set(tag_keys)

        def set(self, value: float, *, tags: dict[str, str]) -> None:
            assert set(tags) == published[self._name], "series of a metric differ in their labels"

    monkeypatch.setattr("actors.metrics.Gauge", Gauge)
    RayMetrics().publish(metrics.families())
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in published)
    boards = Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    read: set[str] = set()
    for path in (boards / "serve_llm_dashboard_panels.py", boards / "serve_llm_sglang_dashboard_panels.py"):
        read |= set(re.findall(r"\bray_((?:vllm|sglang)_[a-z0-9_]+)", path.read_text(encoding="utf-8")))
    assert published["serve_deployment_request_counter_total"] == {"deployment", "replica", "application", "route"}
    known = {*published, *(re.sub(r"_bucket$", "", name) for name in published)}
    assert len(read) > 40
    assert {name for name in read - known if not re.match("vllm_nixl|vllm_external_prefix_cache", name)} == {
        "sglang_num_aborted_requests_total",
        "sglang_num_paused_reqs",
        "vllm_kv_offload_cpu_cache_read_usage_perc",
        "vllm_kv_offload_cpu_cache_usage_perc",
        "vllm_kv_offload_cpu_cache_write_usage_perc",
        "vllm_kv_offload_load_size_count",
        "vllm_kv_offload_lookup_sync_delay_seconds",
        "vllm_kv_offload_store_size_count",
        "vllm_num_requests_swapped",
    }
    assert published["vllm_request_success_total"] == {"model_name", "engine", "finished_reason"}


def test_tokens_that_come_with_the_first_one_have_gaps_too() -> None:
    metrics = Metrics("m")
    with metrics.watch(GenerateRequest("a", [1, 2, 3])) as watch:
        watch.take(RequestOutput("a", (7, 8, 9)))
        watch.take(RequestOutput("a", (10,)))
    assert values(metrics)["raycache_inter_token_latency_seconds_count{model_name=m}"] == 3


def test_times_of_a_request_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("raycache.observe.metrics.time.monotonic", lambda: now_s)
    metrics = Metrics("m")
    with metrics.watch(GenerateRequest("a", [1, 2, 3])) as watch:
        for at_s, ids in ((2.0, (7,)), (3.0, (8,)), (6.0, (9, 10))):
            now_s = at_s
            watch.take(RequestOutput("a", ids, queued_s=0.5))
        now_s = 6.25
    found = values(metrics)
    for name, seconds in {
        "queue_time": 0.5,
        "prefill_time": 1.5,
        "decode_time": 4.0,
        "time_per_output_token": 4.0 / 3,
        "time_to_first_token": 2.0,
        "request_duration": 6.25,
    }.items():
        assert found[f"raycache_{name}_seconds_sum{{model_name=m}}"] == seconds, name


def test_replicas_are_shown_each_for_itself(metrics: Metrics) -> None:
    metrics.show(EngineStats(running=8, replicas={"0": EngineStats(running=3), "b": EngineStats(running=5)}))
    found = values(metrics)
    running = {name: value for name, value in found.items() if name.startswith("raycache_requests_running")}
    assert running == {
        "raycache_requests_running{model_name=m,replica=0}": 3,
        "raycache_requests_running{model_name=m,replica=b}": 5,
    }
    assert found["vllm:num_requests_running{engine=b,model_name=m}"] == 5


def test_only_requests_that_came_to_an_end_have_durations_and_sizes() -> None:
    def counts(metrics: Metrics) -> list[float]:
        names = ("request_duration_seconds", "request_prompt_tokens", "request_generation_tokens")
        found = values(metrics)
        return [found[f"raycache_{name}_count{{model_name=m}}"] for name in names]

    metrics, request = Metrics("m"), GenerateRequest("a", [1, 2, 3])
    with pytest.raises(ValueError), metrics.watch(request):
        raise ValueError("refused")
    for reason in (None, FinishReason.ERROR, FinishReason.CANCELLED):
        with pytest.raises(ValueError), metrics.watch(request) as watch:
            watch.take(RequestOutput("a", (7,)))
            watch.take(RequestOutput("a", finish_reason=reason))
            raise ValueError("failed, or its client went")
    assert counts(metrics) == [0, 0, 0]
    with metrics.watch(request) as watch:  # a stop string ended it, of which the engine knows nothing
        watch.take(RequestOutput("a", (7,)))
    with pytest.raises(ValueError), metrics.watch(request) as watch:
        watch.take(RequestOutput("a", finish_reason=FinishReason.TIMEOUT))
        raise ValueError("too late")
    assert counts(metrics) == [2, 2, 2]


def test_counters_by_reason_and_status_begin_with_0() -> None:
    metrics = Metrics("m")
    found = values(metrics)
    for reason in FinishReason:
        assert found[f"raycache_requests_finished_total{{model_name=m,reason={reason},replica=0}}"] == 0
    for miss in Miss:
        assert (f"raycache_cache_misses_total{{model_name=m,reason={miss},replica=0}}" in found) == bool(miss)
    for status in (200, 429, 500, 503):
        assert found[f"raycache_http_responses_total{{model_name=m,status={status}}}"] == 0
    metrics.show(EngineStats(finished={"stop": 4}))
    assert values(metrics)["raycache_requests_finished_total{model_name=m,reason=stop,replica=0}"] == 4


def test_an_engine_that_is_away_leaves_its_last_figures(metrics: Metrics) -> None:
    metrics.show(None)
    found = values(metrics)
    assert found["raycache_ready{model_name=m}"] == 0
    assert found["raycache_requests_running{model_name=m,replica=0}"] == 3


def test_a_round_of_publishing_that_fails_is_told_once_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds: list[int] = []

    class Failing:
        def publish(self, families: object) -> None:
            rounds.append(len(rounds))
            if len(rounds) not in (4, 5):
                raise ValueError("a name that Ray does not take")

    class Engine:
        async def stats(self) -> EngineStats:
            return _STATS

    async def scenario() -> None:
        async with asyncio.timeout(30), publishing(Engine(), Metrics("m"), every_s=0.001):  # type: ignore[arg-type]
            while len(rounds) < 8:
                await asyncio.sleep(0.001)

    monkeypatch.setattr("actors.metrics.RayMetrics", Failing)
    asyncio.run(scenario())
    told = [record for record in caplog.records if "could not publish" in record.message]
    assert len(told) == 2 and all(record.exc_info for record in told)  # it worked in between


def test_front_and_engines_can_be_told_apart(metrics: Metrics) -> None:
    parts = [{family.name for family in metrics.families(of_engines=each, of_front=not each)} for each in (True, False)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {family.name for family in metrics.families()}
    assert {"raycache_ready", "raycache_epoch"} <= parts[0]
    assert parts[1] == {f"raycache_{metric.name}" for metric in FRONT if metric.name != "ready"}


def test_whoever_watches_requests_sees_their_ends() -> None:
    seen: list[object] = []

    class Watcher:
        def begin(self, request: GenerateRequest) -> Watcher:
            seen.append(request.request_id)
            return self

        def take(self, output: RequestOutput) -> None:
            seen.append(output.token_ids)

        def end(self, error: BaseException | None) -> None:
            seen.append(error)

    metrics, failure = Metrics("m", observer=Watcher()), ValueError()
    with pytest.raises(ValueError), metrics.watch(GenerateRequest("a", [1])) as watch:
        watch.take(RequestOutput("a", (7,)))
        raise failure
    assert seen == ["a", (7,), failure]


def test_names_are_those_of_the_documentation_and_of_the_dashboard() -> None:
    text = (_ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(raycache_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert documented == {metric.full_name: metric.kind.value for metric in (*ENGINE, *FRONT)}
    assert set(re.findall(r"^\| `((?:vllm|sglang):\w+)` \|", text, re.MULTILINE)) == {
        name_there(alias.name, alias.of) for alias in ALIASES
    }
    text = (_ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(RayCache\w+)` \|", text, re.MULTILINE)) == {alert.name for alert in ALERTS}
    used = " ".join(query for row in panels.ROWS.values() for panel in row for query, _ in panel.queries)
    for metric in ENGINE + FRONT:
        if metric.name.startswith(("requests_", "move_", "cache", "component_", "rebuilds", "time_to")):
            assert metric.full_name in used or metric.name in ("cached_prompt_share", "cache_info"), metric.name


def name_there(name: str, of: str) -> str:
    kind = next(metric.kind for metric in (*ENGINE, *FRONT) if metric.name == of)
    return f"{name}_total" if kind is Kind.COUNTER else name
