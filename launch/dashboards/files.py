"""`raycache dashboards`: the files of it, where Ray's Grafana and a Prometheus look for them.

FOLDER/grafana/dashboards/raycache_grafana_dashboard.json    beside the dashboards of Ray
FOLDER/prometheus/raycache_rules.yml                         alert rules
FOLDER/prometheus/raycache.yml                               settings of a Prometheus that reads all of it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.dashboards.alerts import rules
from launch.dashboards.grafana import dashboard
from raycache.errors import ConfigError
from raycache.observe.figures import PREFIX

RAY_FOLDER = Path("/tmp/ray/session_latest/metrics")
"""Of a Ray that was started with `ray start` or `ray up`."""
_DISCOVERY = "prom_metrics_service_discovery.json"
_INTERVAL = "10s"


def write(folder: Path, *, servers: tuple[str, ...] = ()) -> list[Path]:
    """Write the files.

    Args:
        folder: Ray's for metrics, such as `RAY_FOLDER`, or any other.
        servers: HOST:PORT of servers whose /metrics are to be read; none to read Ray's metrics.
    Returns:
        What was written: dashboard, rules, settings.
    Raises:
        ConfigError: it cannot be written.
    """
    import yaml

    boards, prometheus = folder / "grafana" / "dashboards", folder / "prometheus"
    named = _plain if servers else _of_ray
    texts = {
        boards / "raycache_grafana_dashboard.json": named(json.dumps(dashboard(), indent=2)),
        prometheus / "raycache_rules.yml": named(yaml.safe_dump(rules(), sort_keys=False, width=120)),
        prometheus / "raycache.yml": yaml.safe_dump(_settings(folder, servers=servers), sort_keys=False),
    }
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"cannot write to {folder}: {cause}; name another folder") from cause
    return list(texts)


def _settings(folder: Path, *, servers: tuple[str, ...]) -> dict[str, Any]:
    if servers:
        jobs: dict[str, Any] = {"job_name": "raycache", "static_configs": [{"targets": list(servers)}]}
    else:
        jobs = {"job_name": "ray", "file_sd_configs": [{"files": [str(_discovery(folder))]}]}
    return {
        "global": {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": ["raycache_rules.yml"],
        "scrape_configs": [jobs],
    }


def _discovery(folder: Path) -> Path:
    """The file in which Ray keeps the addresses of its agents."""
    of_session = folder.absolute().parent / _DISCOVERY
    return of_session if of_session.exists() else RAY_FOLDER.parent / _DISCOVERY


def _plain(text: str) -> str:
    return text


def _of_ray(text: str) -> str:
    """With the names that Ray gives to our metrics."""
    return text.replace(PREFIX, f"ray_{PREFIX}")
