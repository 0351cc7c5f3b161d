"""Asking a running server over HTTP, with the standard library."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from launch.environment import ca_file
from launch.http.tls import trust, trust_exactly
from raycache.errors import ConfigError, RayCacheError

_MAX_BYTES = 4 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class AnswerError(RayCacheError):
    """A server did not answer, or refused."""


def ask(
    endpoint: str,
    *,
    path: str,
    key: str,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
    certificate: str = "",
) -> dict[str, Any]:
    """GET a path, or POST a body to it.

    Args:
        endpoint: such as "http://127.0.0.1:8000".
        path: such as "/status".
        key: API key; empty for none.
        timeout_s: for an answer.
        body: to post as JSON.
        certificate: PEM file that a server on this machine must show, whatever its name; else it must be one that
            RAYCACHE_CA_FILE or this machine trusts.
    Returns:
        The JSON object that the server answers.
    Raises:
        ConfigError: the endpoint is not an HTTP URL, or a file of certificates cannot be read.
        AnswerError: no answer, or not a good one; the text says why, without the endpoint.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{endpoint!r} is not an endpoint; write it as http://HOST:PORT")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(endpoint.rstrip("/") + path, data, {"Content-Type": "application/json"})
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    # A proxy from the environment cannot reach this machine's loopback.
    handlers: list[urllib.request.BaseHandler] = []
    if url.hostname in _LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    if url.scheme == "https":
        trusted = trust_exactly(certificate) if certificate else trust(ca_file())
        handlers.append(urllib.request.HTTPSHandler(context=trusted))
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            found = json.loads(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as cause:
        raise AnswerError(_refusal(cause)) from cause
    except (OSError, ValueError) as cause:  # URLError and time-outs are OSErrors
        reason = cause.reason if isinstance(cause, urllib.error.URLError) else cause
        hint = "; set RAYCACHE_CA_FILE to its CA" if isinstance(reason, ssl.SSLCertVerificationError) else ""
        raise AnswerError(f"{reason}{hint}") from cause
    if not isinstance(found, dict):
        raise AnswerError(f"its {path} is not that of RayCache")
    return found


def _refusal(answer: urllib.error.HTTPError) -> str:
    """The status, and the server's own words if it is one of ours."""
    hint = "; set RAYCACHE_API_KEY to its key" if answer.code == 401 else ""
    try:
        words = json.loads(answer.read(_MAX_BYTES))["error"]["message"]
    except (OSError, ValueError, TypeError, LookupError):
        return f"HTTP {answer.code}{hint}"
    return f"HTTP {answer.code}{hint}: {' '.join(str(words).split())}"
