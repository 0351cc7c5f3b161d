"""Where KV events are published: the setting `kv_events`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from raycache.errors import ConfigError

_EXAMPLE = "tcp://*:5557 or tcp://ROUTER:5557?replay=6557&topic=kv@pod@model"
_REPLAY_OFFSET = 1000  # Ray Serve's choice, far from the ports of other replicas
_MOST_PORT = 65535


@dataclass(frozen=True)
class EventAddress:
    """Addresses of the sockets of one engine.

    Attributes:
        host: "*" for all interfaces, a loopback address, or a reader to connect to.
        port: of the PUB socket.
        replay_port: of the ROUTER socket.
        topic: first part of each message.
    """

    host: str
    port: int
    replay_port: int
    topic: str = ""

    @classmethod
    def read(cls, url: str) -> EventAddress:
        """Read `tcp://HOST:PORT?replay=PORT&topic=TEXT`.

        Raises:
            ConfigError: it is something else.
        """
        try:
            parts = urlsplit(url)
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            port = parts.port or 0
            replay_port = int(options.pop("replay", port + _REPLAY_OFFSET))
        except ValueError as cause:
            raise ConfigError(f"kv_events={url!r} is not an address ({cause}); write {_EXAMPLE}") from cause
        topic, host = options.pop("topic", ""), parts.hostname or ""
        if parts.scheme != "tcp" or not host or parts.path.strip("/") or parts.username or parts.fragment or options:
            raise ConfigError(f"kv_events={url!r} is not an address; write {_EXAMPLE}")
        if not (0 < port <= _MOST_PORT and 0 < replay_port <= _MOST_PORT) or port == replay_port:
            raise ConfigError(
                f"kv_events={url!r} has port {port}, and {replay_port} for replays; use two ports of 1 to {_MOST_PORT}"
            )
        return cls("127.0.0.1" if host == "localhost" else host, port, replay_port, topic)

    def of_replica(self, number: int) -> EventAddress:
        """The addresses of a replica: its number is added to both ports."""
        return replace(self, port=self.port + number, replay_port=self.replay_port + number)

    @property
    def is_bound(self) -> bool:
        """Whether the PUB socket waits for readers, instead of connecting to one."""
        return self.host in ("*", "0.0.0.0", "::", "::1") or self.host.startswith("127.")

    @property
    def endpoint(self) -> str:
        """Address of the PUB socket."""
        return f"tcp://{_quoted(self.host)}:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        """Address of the ROUTER socket, which always waits for readers."""
        return f"tcp://{_quoted(self.host) if self.is_bound else '*'}:{self.replay_port}"


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host
