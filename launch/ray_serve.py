"""The service as a Ray Serve application, for `launch --ingress serve`, `serve deploy` and KubeRay's RayService.

import_path: launch.ray_serve:app
args: {model: /models/smollm2, cp: 2}        settings; or {config: /etc/raycache.yaml}, or both

RAYCACHE_API_KEY and RAYCACHE_STORAGE in the environment (`runtime_env`) work as for `raycache launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from actors.hub import HubClient
from actors.ingress import ServedIngress, application
from actors.metrics import publish_front
from actors.progress import OnProgress
from launch.environment import api_key, storage
from launch.flags import from_yaml
from launch.http.app import build_app
from launch.http.bind import endpoint_of
from launch.http.replicas import ReplicasApi
from launch.observe.requests import observe
from raycache.api.defaults import Defaults
from raycache.api.tokenizer import Tokenizer
from raycache.checkpoint.hub_models import described, pinned
from raycache.config import Config
from raycache.observe import logs
from raycache.types import EngineInfo

_log = logging.getLogger(__name__)


def app(args: Mapping[str, Any]) -> Any:
    """Build the application; called by Serve.

    Args:
        args: settings; they override the environment, which overrides the YAML file named by `config`.
    Raises:
        ConfigError: a setting is invalid.
    """
    settings = dict(args)
    path = settings.pop("config", None)
    values = from_yaml(Path(path)) if path else {}
    values |= {name: text for name, text in {"api_key": api_key(), "storage": storage()}.items() if text}
    config = Config.from_mapping({**values, **settings, "ingress": "serve"})
    if not (config.api_key or config.api_keys):
        _log.warning("anyone who can reach Ray Serve's proxy can use the service: set RAYCACHE_API_KEY or api_keys")
    return application(pinned(config), build=build)


def build(engine: HubClient, config: Config, info: EngineInfo) -> ASGIApp:
    """Build the ASGI application of one ingress process."""
    logs.set_up(config.log_format)
    here = described(config)
    tokenizer, defaults = Tokenizer.of(here, vocab_size=info.vocab_size), Defaults.of(here)
    observed = contextlib.ExitStack().enter_context(observe(config))  # until the process ends
    publish_front(observed.metrics)
    routes = ReplicasApi(engine, config=config).routes()
    return build_app(
        engine, config=config, info=info, tokenizer=tokenizer, defaults=defaults, routes=routes, observed=observed
    )


@contextlib.contextmanager
def serving(config: Config, *, sock: socket.socket, on_progress: OnProgress) -> Iterator[_Served]:
    """Run the service for the `with` block, starting Serve on the cluster.

    Args:
        sock: bound to the port; closed here so that Serve's proxy can use it.
    Raises:
        ConfigError: the application did not start.
    """
    endpoint = endpoint_of(sock, scheme="https" if config.tls_cert else "http")
    port = sock.getsockname()[1]
    sock.close()
    on_progress("starting Ray Serve and the replicas", 0.0)
    ingress = ServedIngress(config, build=build, port=port)
    try:
        yield _Served(ingress, endpoint)
    finally:
        ingress.stop()


class _Served:
    """A running Serve application."""

    def __init__(self, ingress: ServedIngress, endpoint: str) -> None:
        self.info = ingress.info
        self._ingress, self._endpoint = ingress, endpoint

    async def run(self, *, stop: asyncio.Event, on_started: Callable[[str], None]) -> None:
        watch = asyncio.create_task(self._ingress.watch())
        watch.add_done_callback(lambda ended: stop.set())
        on_started(self._endpoint)
        await stop.wait()
        if watch.done():
            watch.result()
        watch.cancel()
