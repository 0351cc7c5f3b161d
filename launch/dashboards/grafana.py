"""The dashboard in Grafana's JSON format."""

from __future__ import annotations

from typing import Any

from launch.dashboards.panels import ROWS, Panel
from launch.dashboards.promql import series

UID = "raycache"
_WIDTH, _HEIGHT = 12, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Build the dashboard, with two panels per line."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 2 * _WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False})
        y += 1
        for index, panel in enumerate(row):
            at = {"x": index % 2 * _WIDTH, "y": y + index // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": at, **_panel(panel)})
        y += -(-len(row) // 2) * _HEIGHT
    return {
        "uid": UID,
        "title": "RayCache",
        "tags": ["raycache", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [_datasource(), _variable("model", "ready"), _variable("replica", "requests_running")]},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2}


def _variable(name: str, metric: str) -> dict[str, Any]:
    """A drop-down for the values of a label; all are selected by default."""
    label = "model_name" if name == "model" else name
    query = f"label_values({series(metric, is_filtered=False)}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
