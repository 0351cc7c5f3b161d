"""`raycache launch`: starts a service, runs it until a signal, and stops it.

bind port -> check model -> Ray -> replicas (placement, engine actor, ranks) -> HTTP server -> table -> ... -> stop in
reverse order. With ingress=serve, Ray Serve runs replicas and HTTP server (ray_serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from actors.cluster import Cluster, connect, device_type, disconnect
from actors.metrics import publishing
from actors.replicas import Replicas
from actors.starter import Starter
from launch import table
from launch.cli import cache, signals
from launch.environment import hub_variables, keep_job_variables
from launch.http.app import build_app
from launch.http.replicas import ReplicasApi
from launch.http.serve import bind, serve
from launch.observe.requests import Observed, observe
from launch.service import register
from raycache.api.chat import ChatTemplate
from raycache.api.defaults import Defaults
from raycache.api.repairs import Repairs
from raycache.api.tokenizer import Tokenizer
from raycache.checkpoint.hub_models import outlined, pinned, pinned_models
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.observe import logs
from raycache.routing.totals import total_info
from raycache.types import EngineInfo

_TOKEN_HINT = " (`ray get-auth-token` prints its token, if it asks for one)"


class Service(Protocol):
    """Engines and an HTTP server.

    Attributes:
        info: of the engines.
    """

    info: EngineInfo

    async def run(self, *, stop: asyncio.Event, on_started: Callable[[str], None]) -> None:
        """Serve until `stop` is set.

        Args:
            on_started: called with the endpoint once clients can connect.
        Raises:
            RayCacheError: the service failed.
        """
        ...


def run(config: Config) -> int:
    """Serve a model until SIGINT, SIGTERM or SIGHUP, or until its engines fail permanently; returns the exit status.

    Raises:
        RayCacheError: the start or the service failed; everything is cleaned up.
    """
    logs.set_up(config.log_format)
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(signals.unwinding())
        seen = cleanup.enter_context(observe(config))
        sock = cleanup.enter_context(contextlib.closing(bind(config)))
        progress = cleanup.enter_context(_Progress())
        progress.show("checking the model", 0.0)
        config = pinned(config)
        with outlined(config) as here:
            tokenizer = Tokenizer.of(here, vocab_size=check_model(here).vocab_size)
            defaults = Defaults.of(here)
        ChatTemplate.load(tokenizer, path=config.chat_template)  # fails now instead of after the weights are loaded
        Repairs.of(config)
        progress.show("starting Ray", 0.0)
        keep_job_variables()
        cluster = connect(config, variables=hub_variables() if pinned_models(config) else {})
        cleanup.callback(disconnect, cluster.temp_dir)
        if config.ingress == "serve":
            from launch.ray_serve import serving

            service: Service = cleanup.enter_context(serving(config, sock=sock, on_progress=progress.show))
        else:
            starter = Starter(config, device=device_type(config))
            cleanup.callback(starter.stop)
            service = _Builtin(
                config,
                sock,
                starter=starter,
                tokenizer=tokenizer,
                defaults=defaults,
                seen=seen,
                progress=progress,
            )
        progress.close()
        cleanup.callback(signals.ignore)
        asyncio.run(_serve(service, config=config, cluster=cluster))
    return 0


class _Builtin:
    """Engines driven by this process, and its own HTTP server."""

    def __init__(
        self,
        config: Config,
        sock: socket.socket,
        *,
        starter: Starter,
        tokenizer: Tokenizer,
        defaults: Defaults,
        seen: Observed,
        progress: _Progress,
    ) -> None:
        self._config, self._sock, self._seen = config, sock, seen
        started = starter.start_all(on_progress=progress.show)
        self._engine = Replicas(config, starter, started)
        self.info = total_info({name: facts for name, (_, facts) in started.items()})
        routes = ReplicasApi(self._engine, config=config).routes()
        self._app = build_app(
            self._engine,
            config=config,
            info=self.info,
            tokenizer=tokenizer,
            defaults=defaults,
            routes=routes,
            observed=seen,
        )

    async def run(self, *, stop: asyncio.Event, on_started: Callable[[str], None]) -> None:
        watch = asyncio.create_task(self._engine.watch())
        # Exit, so that a supervisor can restart the service, instead of responding only 503.
        watch.add_done_callback(lambda ended: stop.set())
        async with publishing(self._engine, self._seen.metrics):
            await serve(self._app, sock=self._sock, stop=stop, on_started=on_started, config=self._config)
        if watch.done():
            watch.result()
        watch.cancel()


async def _serve(service: Service, *, config: Config, cluster: Cluster) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in signals.stop_signals():
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as registered:

        def on_started(endpoint: str) -> None:
            registered.enter_context(
                register(
                    endpoint,
                    model=service.info.model,
                    ray_address=cluster.address,
                    dashboard=cluster.dashboard_url,
                    certificate=config.tls_cert,
                )
            )
            print(_summary(service.info, endpoint=endpoint, dashboard=cluster.dashboard_url, config=config), flush=True)

        try:
            await service.run(stop=stop, on_started=on_started)
        finally:
            print("stopping", file=sys.stderr, flush=True)


def _summary(info: EngineInfo, *, endpoint: str, dashboard: str, config: Config) -> str:
    rows = [
        [
            *([row["replica"]] if config.replicas > 1 else []),
            row["rank"],
            row["coords"],
            row["node"],
            row["device"],
            row["pages"],
            row["pages"] * info.page_size // config.cp,
        ]
        for row in info.ranks
    ]
    tokens = info.num_pages * info.page_size
    each = ["replica"] if config.replicas > 1 else []
    return "\n".join(
        [
            table.render([*each, "rank", "position", "node", "device", "pages", "tokens"], rows=rows),
            "",
            f"model      {info.model}, up to {info.max_model_len:,} tokens per request",
            f"cache      {tokens:,} tokens in {info.num_pages:,} pages{' per replica' if each else ''}",
            *cache.summary(info.tiers),
            f"endpoint   {endpoint}/v1",
            f"dashboard  {dashboard + _TOKEN_HINT if dashboard else 'none'}",
            "Press Ctrl-C to stop.",
        ]
    )


class _Progress:
    """Shows the progress of the start: one updated line on a terminal, otherwise a line per phase."""

    def __init__(self) -> None:
        self._topic = ""
        self._width = 0
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, phase: str, share: float) -> None:
        """Show the phase and the fraction of it that is done; 0: unknown."""
        has_share = share and phase.startswith(("loading", "downloading"))
        line = f"{phase} [{'#' * round(20 * share):20}] {share:.0%}" if has_share else phase
        if self._is_terminal:
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif (topic := phase.partition(":")[0]) != self._topic:
            print(topic, file=sys.stderr, flush=True)
            self._topic = topic

    def close(self) -> None:
        """Clear the line."""
        if self._is_terminal and self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
        self._width = 0
