"""Each alert rule fires where it should and nowhere else, as Prometheus itself sees it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.dashboards.alerts import ALERTS
from launch.dashboards.files import write

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the program promtool")

_ONE = '{model_name="m"}'
_REPLICA = '{model_name="m",replica="0"}'
_STORAGE = '{model_name="m",replica="0",tier="storage"}'
_HOST = '{model_name="m",replica="0",tier="host"}'
# Alert -> series that make it fire, as promtool writes them: a value every minute, "0x4" is four times more the same.
_TROUBLE: dict[str, dict[str, str]] = {
    "RayCacheNotReady": {f"raycache_ready{_ONE}": "1 0x59"},
    "RayCacheGone": {f"raycache_ready{_ONE}": "1x50"},
    "RayCacheRanksLost": {f"raycache_rebuilds_total{_REPLICA}": "0x56 1x3"},
    "RayCacheRanksLostRepeatedly": {f"raycache_rebuilds_total{_REPLICA}": "0x55 5x3"},
    "RayCacheEngineLost": {f"raycache_engines_lost_total{_REPLICA}": "0x56 1x3"},
    "RayCacheQueueFull": {f"raycache_requests_refused_total{_REPLICA}": "0x56 3x3"},
    "RayCacheRequestsFail": {
        'raycache_requests_finished_total{model_name="m",replica="0",reason="stop"}': "0+10x60",
        'raycache_requests_finished_total{model_name="m",replica="0",reason="error"}': "0+1x60",
    },
    "RayCacheServerErrors": {
        'raycache_http_responses_total{model_name="m",status="200"}': "0+10x60",
        'raycache_http_responses_total{model_name="m",status="503"}': "0+1x60",
    },
    "RayCacheSlowFirstToken": {
        'raycache_time_to_first_token_seconds_bucket{model_name="m",le="10.0"}': "0x60",
        'raycache_time_to_first_token_seconds_bucket{model_name="m",le="30.0"}': "0+5x60",
        'raycache_time_to_first_token_seconds_bucket{model_name="m",le="+Inf"}': "0+5x60",
    },
    "RayCacheTierNeverHits": {f"raycache_cache_warnings{_REPLICA}": "1x60"},
    "RayCacheTierUnavailable": {f"raycache_tier_unavailable_requests_total{_STORAGE}": "0+1x60"},
    "RayCacheStorageCorrupt": {f"raycache_tier_objects_corrupt_total{_STORAGE}": "0x56 1x3"},
    "RayCacheStorageFull": {f"raycache_tier_objects_disk_full_total{_STORAGE}": "0x56 1x3"},
    "RayCacheMovesFail": {f"raycache_tier_failed_loads_total{_HOST}": "0x56 1x3"},
    "RayCachePreempts": {f"raycache_preemptions_total{_REPLICA}": "0+10x60"},
}
_CALM = {
    f"raycache_ready{_ONE}": "0 1x59",
    f"raycache_rebuilds_total{_REPLICA}": "2x60",
    f"raycache_engines_lost_total{_REPLICA}": "1x60",
    f"raycache_requests_refused_total{_REPLICA}": "7x60",
    'raycache_requests_finished_total{model_name="m",replica="0",reason="stop"}': "0+100x60",
    'raycache_requests_finished_total{model_name="m",replica="0",reason="error"}': "0+1x60",
    'raycache_http_responses_total{model_name="m",status="200"}': "0+10x60",
    'raycache_http_responses_total{model_name="m",status="404"}': "0+10x60",
    'raycache_time_to_first_token_seconds_bucket{model_name="m",le="10.0"}': "0+5x60",
    'raycache_time_to_first_token_seconds_bucket{model_name="m",le="+Inf"}': "0+5x60",
    f"raycache_cache_warnings{_REPLICA}": "1x10 0x49",
    f"raycache_tier_objects_corrupt_total{_STORAGE}": "4x60",
    f"raycache_tier_failed_loads_total{_HOST}": "1x60",
    f"raycache_preemptions_total{_REPLICA}": "0+1x60",
}


def test_every_alert_fires_when_it_should_and_no_other(tmp_path: Path) -> None:
    assert set(_TROUBLE) == {alert.name for alert in ALERTS}
    # One that is lost again and again is lost, too.
    also = {"RayCacheRanksLostRepeatedly": {"RayCacheRanksLost"}}
    cases = [case(series, fires={name} | also.get(name, set())) for name, series in _TROUBLE.items()]
    check(tmp_path, [*cases, case(_CALM, fires=set())])


def case(series: dict[str, str], *, fires: set[str]) -> dict[str, Any]:
    """What promtool is to find after an hour."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert.name}"}}) or vector(0)',
                "eval_time": "59m",
                "exp_samples": [{"value": int(alert.name in fires)}],
            }
            for alert in ALERTS
        ],
    }


def check(folder: Path, cases: list[dict[str, Any]]) -> None:
    _, rules, _ = write(folder, servers=("127.0.0.1:1",))
    tests = folder / "tests.yml"
    tests.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
