"""HTTP client for a running server, with the standard library only."""

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


class ResponseError(RayCacheError):
    """A server did not respond, or returned an error."""


def base_url(endpoint: str) -> str:
    """Strip the trailing /v1 of the endpoint that `raycache launch` prints for OpenAI clients."""
    return endpoint.rstrip("/").removesuffix("/v1").rstrip("/")


def ask(
    endpoint: str,
    *,
    path: str,
    key: str,
    timeout_s: float,
    body: Mapping[str, Any] | None = None,
    certificate: str = "",
) -> dict[str, Any]:
    """GET a path, or POST a JSON body to it.

    Args:
        endpoint: such as "http://127.0.0.1:8000", with or without /v1.
        path: such as "/status".
        key: API key; empty: none.
        timeout_s: for the response.
        body: None: GET.
        certificate: PEM file with the exact certificate expected, whatever its name; empty: any certificate trusted by
            RAYCACHE_CA_FILE or this machine.
    Returns:
        The JSON object in the response.
    Raises:
        ConfigError: the endpoint is not an HTTP URL, or a certificate file cannot be read.
        ResponseError: no response or an error; the message does not include the endpoint.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{endpoint!r} is not a valid endpoint; write it as http://HOST:PORT")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base_url(endpoint) + path, data, {"Content-Type": "application/json"})
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
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            found = json.loads(response.read(_MAX_BYTES))
    except urllib.error.HTTPError as cause:
        raise ResponseError(_refusal(cause, has_key=bool(key))) from cause
    except (OSError, ValueError) as cause:  # URLError and TimeoutError are OSErrors
        reason = cause.reason if isinstance(cause, urllib.error.URLError) else cause
        hint = "; set RAYCACHE_CA_FILE to its CA" if isinstance(reason, ssl.SSLCertVerificationError) else ""
        raise ResponseError(f"{reason}{hint}") from cause
    if not isinstance(found, dict):
        raise ResponseError(f"{path} did not return what RayCache returns")
    return found


def _refusal(response: urllib.error.HTTPError, *, has_key: bool) -> str:
    """The HTTP status, with the error message of a RayCache server."""
    hint = ""
    if response.code == 401:
        hint = "; the API key is wrong" if has_key else "; pass its key with --api-key or set RAYCACHE_API_KEY to it"
    try:
        message = json.loads(response.read(_MAX_BYTES))["error"]["message"]
    except (OSError, ValueError, TypeError, LookupError):
        return f"HTTP {response.code}{hint}"
    return f"HTTP {response.code}{hint}: {' '.join(str(message).split())}"
