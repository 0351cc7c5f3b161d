"""Binds the port, before anything else is started."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from launch.http.keys import keys_of
from launch.http.tls import certificate_of
from raycache.config import Config
from raycache.errors import ConfigError

_log = logging.getLogger(__name__)


def bind(config: Config) -> socket.socket:
    """Bind the port before the model is loaded; connections are refused until `serve` listens.

    Returns:
        A socket to pass to `serve` or to close.
    Raises:
        ConfigError: the port is in use, the address does not belong to this machine, or the certificate or the API key
            file cannot be used.
    """
    certificate_of(config)
    keys_of(config)
    port = 0 if config.port == "auto" else config.port
    where = f"{config.host}:{port}"
    try:
        found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host={config.host!r} is not a valid address: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Lingering connections of an earlier server must not prevent binding ...
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # ... but another server must not be able to bind the port while this one does not listen yet.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use; choose another --port, or --port auto for a free one") from error
        raise ConfigError(f"cannot bind to {where}: {error.strerror}; choose another --host or --port") from error
    sock.set_inheritable(False)
    _warn_if_open(config, sock)
    return sock


def endpoint_of(sock: socket.socket, *, scheme: str = "http") -> str:
    """URL of a bound socket for clients on this machine, such as "http://127.0.0.1:8000"."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _warn_if_open(config: Config, sock: socket.socket) -> None:
    if ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback:
        return
    if not (config.api_key or config.api_keys):
        _log.warning(
            "%s is reachable from other machines without an API key: set RAYCACHE_API_KEY or --api-keys", config.host
        )
    elif not config.tls_cert:
        _log.warning(
            "%s is reachable from other machines and API keys are sent unencrypted: set --tls-cert and --tls-key, or "
            "allow access only through an HTTPS proxy",
            config.host,
        )
