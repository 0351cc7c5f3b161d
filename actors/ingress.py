"""HTTP ingress with Ray Serve: an application of two deployments.

    client -> Serve's proxy -> Ingress (ASGI application, 1 to n processes) -> HubActor -> engines
                               Engines: owns the hub; replaced by Serve if the hub is lost

The only file that imports ray.serve; serve_llm.py imports ray.serve.llm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors.answers import answer, ours
from actors.hub import HubClient, start_hub
from raycache.config import Config
from raycache.errors import ConfigError, EngineStoppedError
from raycache.types import EngineInfo

_HUB = "the hub actor"
_CHECK_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 40.0
_LOOK_S = 2.0
_PROXY = {"runtime_env": {"env_vars": {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}}}
"""By default Serve kills a proxy that is not ready within 5 s; on a busy machine the imports alone take longer."""
_LOGS = {"log_level": "WARNING", "enable_access_log": False}

BuildApp = Callable[[HubClient, Config, EngineInfo], ASGIApp]
"""Builds the ASGI application in an ingress process; pickled by reference, so it must be importable."""


class Engines:
    """Owns the hub, which ends with it."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        self._hub = start_hub(config)
        try:
            self._info: EngineInfo = await self._hub.start.remote()
        except RayTaskError as error:
            raise ours(error) from error

    async def hub(self) -> tuple[Any, EngineInfo]:
        """Return the hub's handle and its engines' info."""
        return self._hub, self._info

    async def check_health(self) -> None:
        """Called by Serve, which replaces a deployment that raises.

        Raises:
            EngineStoppedError: no engine is left.
        """
        await answer(self._hub.check_health.remote(), of=_HUB, timeout_s=_CHECK_TIMEOUT_S)

    async def __del__(self) -> None:
        """Called by Serve before it ends this process."""
        await answer(self._hub.stop.remote(), of=_HUB, timeout_s=_STOP_TIMEOUT_S)


class Ingress:
    """One HTTP process.

    Args:
        engines: handle of the other deployment.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engines: DeploymentHandle[Engines], config: Config, build: BuildApp
    ) -> None:
        hub, info = await engines.hub.remote()
        self._client = HubClient(hub)
        self._engines = engines
        self._app = build(self._client, config, info)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve after the constructor."""
        return self._app

    async def check_health(self) -> None:
        """Called by Serve; switches to the new hub after the engines were replaced."""
        hub, _ = await self._engines.hub.remote()
        self._client.follow(hub)


def application(config: Config, *, build: BuildApp) -> serve.Application:
    """Build the Serve application."""
    light = {"num_cpus": 0}
    engines = serve.deployment(
        name="Engines",
        ray_actor_options=light,
        max_ongoing_requests=1000,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=_STOP_TIMEOUT_S,
    )(Engines)
    least, most = config.ingress_range
    size: dict[str, Any] = {"num_replicas": least}
    if most > least:
        size = {"num_replicas": None, "autoscaling_config": {"min_replicas": least, "max_replicas": most}}
    ingress = serve.deployment(
        name="Ingress",
        ray_actor_options=light,
        max_ongoing_requests=config.max_connections,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        **size,
    )(serve.ingress()(Ingress))
    return ingress.bind(engines.bind(config), config, build)


class ServedIngress:
    """Runs the application on the cluster that this process is connected to, starting Ray Serve there.

    Raises:
        ConfigError: Serve already runs there, or the application did not start; everything is cleaned up.
    Attributes:
        info: of the engines.
    """

    def __init__(self, config: Config, *, build: BuildApp, port: int) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if serve.status().applications or serve.status().proxies:
            raise ConfigError(
                f"Ray Serve already runs on the cluster {config.address}; deploy launch.ray_serve:app there with "
                "`serve deploy`, or use --ingress builtin"
            )
        http = {"host": config.host, "port": port}
        if config.tls_cert:
            http |= {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key}
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self.stop)
            try:
                _start_proxy(http, timeout_s=config.start_timeout_s)
                serve.run(application(config, build=build), name=config.model_name, logging_config=_LOGS)
                handle = serve.get_deployment_handle("Engines", config.model_name)
                _, self.info = handle.hub.remote().result(timeout_s=_CHECK_TIMEOUT_S)
            except (RuntimeError, TimeoutError, RayActorError, RayTaskError) as cause:
                raise ConfigError(f"the Serve application did not start: {' '.join(str(cause).split())}") from cause
            unless_started.pop_all()
        self._name = config.model_name

    async def watch(self) -> None:
        """Wait until the application ends.

        Raises:
            EngineStoppedError: it was deleted or has failed.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            status = (await asyncio.to_thread(serve.status)).applications.get(self._name)
            if status is None or status.status in ("DEPLOY_FAILED", "DELETING"):
                raise EngineStoppedError(f"the Serve application is {status.status if status else 'gone'}")

    def stop(self) -> None:
        """Shut down the application and Serve; running requests have drain_timeout_s to finish."""
        serve.shutdown()


def _start_proxy(http: dict[str, Any], *, timeout_s: float) -> None:
    """Start Serve and wait for its proxy, for longer than Serve's own minute.

    Raises:
        TimeoutError: the proxy is not ready within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(TimeoutError):
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=_LOGS, controller_options=_PROXY)
        return
    while "HEALTHY" not in serve.status().proxies.values():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Serve's proxy is not ready after {timeout_s:.0f} s; see --start-timeout-s")
        time.sleep(_LOOK_S)
