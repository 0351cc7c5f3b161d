"""`raycache launch`: starts a service, runs it until a signal, and stops it.

bind port -> Ray, and beside it: import torch, check model -> replicas (placement, engine actor, ranks) -> HTTP server
-> table -> ... -> stop in reverse order. With ingress=serve, Ray Serve runs replicas and HTTP server (ray_serve.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import uvloop

from actors.cluster import Cluster, connect, device_type, disconnect
from launch import table
from launch.cli import cache, signals
from launch.cli.beside import Beside
from launch.environment import hub_variables, keep_job_variables
from launch.http.bind import bind
from launch.observe.requests import Observed, observe
from launch.service import register
from raycache.checkpoint.hub_id import hub_id
from raycache.config import Config
from raycache.garbage import importing
from raycache.observe import logs
from raycache.types import EngineInfo

if TYPE_CHECKING:
    from launch.cli.builtin import Checked

_log = logging.getLogger(__name__)
_CHECK_END_S = 10.0
"""For the model's check to end when the start has failed."""
_TOKEN_HINT = " (`ray get-auth-token` prints its token, if it requires one)"


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
        interrupt = cleanup.enter_context(signals.unwinding())
        seen = cleanup.enter_context(observe(config))
        sock = cleanup.enter_context(contextlib.closing(bind(config)))
        progress = cleanup.enter_context(_Progress(interrupt, log_format=config.log_format))
        progress.show("checking the model", 0.0)
        checking = Beside(partial(_checked, config, progress))
        cleanup.callback(checking.end, _CHECK_END_S)
        if config.address != "local":
            checking.result()  # joining takes no time, and a cluster in use should not see what cannot be served
        keep_job_variables()
        with checking.interrupting():
            cluster = connect(config, variables=hub_variables() if any(map(hub_id, config.directories)) else {})
        cleanup.callback(disconnect, cluster.temp_dir)
        interrupt.check()
        checked = checking.result()
        service = cleanup.enter_context(_service(checked, sock, seen=seen, progress=progress))
        progress.close()
        cleanup.callback(signals.ignore)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(service, config=checked.config, cluster=cluster))
    return 0


def _checked(config: Config, progress: _Progress) -> Checked:
    with importing():
        from launch.cli.builtin import check

    checked = check(config)
    progress.show("starting Ray", 0.0)  # which has begun, but is only now what the start waits for
    return checked


@contextlib.contextmanager
def _service(checked: Checked, sock: socket.socket, *, seen: Observed, progress: _Progress) -> Iterator[Service]:
    config = checked.config
    if config.ingress == "serve":
        from launch.ray_serve import serving

        with serving(config, sock=sock, on_progress=progress.show) as served:
            yield served
        return

    from actors.starter import Starter
    from launch.cli.builtin import Builtin

    starter = Starter(config, device=device_type(config))
    try:
        yield Builtin(config, sock, starter=starter, checked=checked, seen=seen, on_progress=progress.show)
    finally:
        starter.stop()


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
            print(_summary(service.info, endpoint=endpoint, cluster=cluster, config=config), flush=True)

        try:
            await service.run(stop=stop, on_started=on_started)
        finally:
            _say("stopping", log_format=config.log_format)


def _say(text: str, *, log_format: str) -> None:
    """Write a line to stderr, or a log record in JSON."""
    if log_format == "json":
        _log.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def _summary(info: EngineInfo, *, endpoint: str, cluster: Cluster, config: Config) -> str:
    dashboard = cluster.dashboard_url
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
    transports = sorted({row["transport"] for row in info.ranks} - {""})
    each = ["replica"] if config.replicas > 1 else []
    return "\n".join(
        [
            table.render([*each, "rank", "position", "node", "device", "pages", "tokens"], rows=rows),
            "",
            f"model      {info.model}, up to {info.max_model_len:,} tokens per request",
            f"cache      {tokens:,} tokens in {info.num_pages:,} pages{' per replica' if each else ''}",
            *cache.summary(info.tiers),
            *([f"exchanges  {', '.join(transports)}"] if transports else []),
            f"endpoint   {endpoint}/v1",
            f"dashboard  {dashboard + _TOKEN_HINT if dashboard else 'none'}",
            *([f"logs       {cluster.temp_dir}/session_latest/logs, until it stops"] if cluster.temp_dir else []),
            "Press Ctrl-C to stop.",
        ]
    )


class _Progress:
    """Shows the progress of the start: one updated line on a terminal, otherwise a line per phase."""

    def __init__(self, interrupt: signals.Interrupt, *, log_format: str) -> None:
        self._interrupt = interrupt
        self._topic = ""
        self._width = 0
        self._log_format = log_format
        self._is_terminal = log_format != "json" and sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, phase: str, share: float) -> None:
        """Show the phase and the fraction of it that is done; 0: unknown.

        Raises:
            KeyboardInterrupt: the start has been interrupted.
        """
        self._interrupt.check()
        has_share = share and phase.startswith(("loading", "downloading"))
        line = f"{phase} [{'#' * round(20 * share):20}] {share:.0%}" if has_share else phase
        if self._is_terminal:
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif (topic := phase.partition(":")[0]) != self._topic:
            _say(topic, log_format=self._log_format)
            self._topic = topic

    def close(self) -> None:
        """Clear the line."""
        if self._is_terminal and self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
        self._width = 0
