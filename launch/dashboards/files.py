"""`raycache dashboards`: writes its files where Ray's Grafana and Prometheus find them.

FOLDER/grafana/dashboards/raycache_grafana_dashboard.json    beside Ray's dashboards
FOLDER/prometheus/raycache_rules.yml                         alert rules
FOLDER/prometheus/raycache.yml                               Prometheus configuration that uses them
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
"""The metrics folder of a Ray started with `ray start` or `ray up`."""
_DISCOVERY = "prom_metrics_service_discovery.json"
_INTERVAL = "10s"


def write(folder: Path, *, servers: tuple[str, ...] = ()) -> list[Path]:
    """Write the files.

    Args:
        folder: Ray's metrics folder, such as `RAY_FOLDER`, or any other.
        servers: HOST:PORT of servers whose /metrics to scrape; empty: scrape Ray's metrics.
    Returns:
        The files written: dashboard, rules, configuration.
    Raises:
        ConfigError: the folder is not writable.
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
    """The service discovery file with the addresses of Ray's agents."""
    of_session = folder.absolute().parent / _DISCOVERY
    return of_session if of_session.exists() else RAY_FOLDER.parent / _DISCOVERY


def _plain(text: str) -> str:
    return text


def _of_ray(text: str) -> str:
    """Add Ray's prefix to the names of metrics."""
    return text.replace(PREFIX, f"ray_{PREFIX}")
