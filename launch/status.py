"""What running services do, asked over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from launch.environment import api_key
from launch.service import Service
from launch.table import render
from raycache.errors import ConfigError

_MAX_BYTES = 4 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Report:
    """One service and its answer.

    Attributes:
        endpoint: its URL.
        service: its state file, or None for a remote one.
        figures: fields of EngineInfo and EngineStats, empty when it did not answer.
        error: why it did not answer, or empty.
    """

    endpoint: str
    service: Service | None
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def ask(endpoint: str, *, service: Service | None, timeout_s: float) -> Report:
    """GET its /status; a service that does not answer is a report too.

    Raises:
        ConfigError: the endpoint is not an HTTP URL.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{endpoint!r} is not an endpoint; write it as http://HOST:PORT")
    request = urllib.request.Request(endpoint.rstrip("/") + "/status")
    if api_key():
        request.add_unredirected_header("Authorization", f"Bearer {api_key()}")
    # A proxy from the environment cannot reach this machine's loopback.
    handlers = [urllib.request.ProxyHandler({})] if url.hostname in _LOOPBACK else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            figures = json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as cause:
        hint = "; set RAYCACHE_API_KEY to its key" if cause.code in (401, 403) else ""
        return Report(endpoint, service, error=f"HTTP {cause.code}{hint}")
    except (OSError, ValueError) as cause:  # URLError and time-outs are OSErrors
        reason = cause.reason if isinstance(cause, urllib.error.URLError) else cause
        return Report(endpoint, service, error=str(reason))
    if not isinstance(figures, dict):
        return Report(endpoint, service, error="its /status is not that of RayCache")
    return Report(endpoint, service, figures=figures)


def as_json(reports: Sequence[Report]) -> str:
    """All that is known, for programs."""
    return json.dumps([asdict(report) for report in reports], indent=2)


def as_table(reports: Sequence[Report]) -> str:
    """The most telling figures, one service a line."""
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
    return render(header, rows=[_row(report) for report in reports])


def _row(report: Report) -> tuple[object, ...]:
    figures, service = report.figures, report.service
    model = figures.get("model") or (service.model if service else "?")
    head = (report.endpoint, model, service.pid if service else "-")
    if report.error:
        return (*head, *["-"] * 6, f"no answer: {report.error}")
    pages = f"{figures.get('pages_in_use', 0)}/{figures.get('pages_total', 0)}"
    prompt, cached = figures.get("prompt_tokens", 0), figures.get("cached_tokens", 0)
    share = f"{100 * cached / prompt:.1f} %" if prompt else "-"
    counts = (len(figures.get("ranks", ())), figures.get("running", 0), figures.get("waiting", 0))
    return (*head, *counts, pages, share, figures.get("output_tokens", 0), "ok")
