"""`raycache status`: the state of running services, queried over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.cli import client
from launch.environment import api_key
from launch.service import Service
from launch.table import render


@dataclass(frozen=True)
class Report:
    """One service and its response.

    Attributes:
        service: from its state file; None for a remote one.
        figures: fields of EngineInfo and EngineStats; empty without a response.
        error: why there is no response, or empty.
    """

    endpoint: str
    service: Service | None
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def ask(endpoint: str, *, service: Service | None, timeout_s: float, key: str = "") -> Report:
    """GET /status; without a response, the report holds the error.

    Args:
        key: API key; empty: that of RAYCACHE_API_KEY.
    Raises:
        ConfigError: the endpoint is not an HTTP URL.
    """
    try:
        certificate = service.certificate if service else ""
        figures = client.ask(
            endpoint, path="/status", key=key or api_key(), timeout_s=timeout_s, certificate=certificate
        )
    except client.ResponseError as cause:
        return Report(endpoint, service, error=str(cause))
    return Report(endpoint, service, figures=figures)


def as_json(reports: Sequence[Report]) -> str:
    """Format all fields as JSON."""
    return json.dumps([asdict(report) for report in reports], indent=2)


def as_table(reports: Sequence[Report]) -> str:
    """Format the most important statistics, one service per line."""
    header = (
        "ENDPOINT",
        "MODEL",
        "PID",
        "RANKS",
        "RUNNING",
        "WAITING",
        "PAGES USED",
        "CACHED PROMPT",
        "OUTPUT TOKENS",
        "STATE",
    )
    return render(header, rows=[row for report in reports for row in (_row(report), *_replica_rows(report))])


def _replica_rows(report: Report) -> list[tuple[object, ...]]:
    """One row per replica, if there are several."""
    rows = []
    for name, figures in report.figures.get("replicas", {}).items():
        ranks = [rank for rank in report.figures.get("ranks", ()) if rank.get("replica") == name]
        own = Report("", None, {**figures, "model": "", "ranks": ranks})
        rows.append((f"  replica {name}", "", "", *_row(own)[3:]))
    return rows


def _row(report: Report) -> tuple[object, ...]:
    figures, service = report.figures, report.service
    model = figures.get("model") or (service.model if service else "?")
    head = (report.endpoint, model, service.pid if service else "-")
    if report.error:
        return (*head, *["-"] * 6, f"no response: {report.error}")
    pages = f"{figures.get('pages_in_use', 0)}/{figures.get('pages_total', 0)}"
    prompt, cached = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
    share = f"{100 * cached / prompt:.1f} %" if prompt else "-"
    if len(tiers := figures.get("cached_by_tier", {})) > 1 and prompt:
        share += f" ({', '.join(f'{tier} {100 * count / prompt:.1f}' for tier, count in tiers.items())})"
    counts = (len(figures.get("ranks", ())), figures.get("running", 0), figures.get("waiting", 0))
    warnings = figures.get("warnings")
    state = f"ok, warnings: {len(warnings)}, see raycache cache status" if warnings else "ok"
    return (*head, *counts, pages, share, figures.get("output_tokens", 0), state)
