"""What `raycache launch` does apart from starting Ray: check the model, and drive engines and an HTTP server.

Importing this takes longer than importing Ray, and goes on while Ray starts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from actors.metrics import publishing
from actors.progress import OnProgress
from actors.replicas import Replicas
from actors.starter import Starter
from launch.http.app import build_app
from launch.http.replicas import ReplicasApi
from launch.http.serve import serve
from launch.observe.requests import Observed
from raycache.api.chat import ChatTemplate
from raycache.api.defaults import Defaults
from raycache.api.repairs import Repairs
from raycache.api.tokenizer import Tokenizer
from raycache.checkpoint.hub_models import outlined, pinned
from raycache.config import Config
from raycache.deployment.deployment import check_model
from raycache.garbage import freeze_startup_objects
from raycache.routing.totals import total_info


@dataclass(frozen=True)
class Checked:
    """A model that can be served.

    Attributes:
        config: settings, with the commits of models of the Hub.
    """

    config: Config
    tokenizer: Tokenizer
    defaults: Defaults


def check(config: Config) -> Checked:
    """Check the model and its tokenizer, which fails sooner than ranks that read them.

    Raises:
        RayCacheError: the model cannot be served with these settings.
    """
    config = pinned(config)
    with outlined(config) as here:
        tokenizer = Tokenizer.of(here, vocab_size=check_model(here).vocab_size)
        defaults = Defaults.of(here)
    ChatTemplate.load(tokenizer, path=config.chat_template)
    Repairs.of(config)
    return Checked(config, tokenizer, defaults)


class Builtin:
    """Engines driven by this process, and its own HTTP server."""

    def __init__(
        self,
        config: Config,
        sock: socket.socket,
        *,
        starter: Starter,
        checked: Checked,
        seen: Observed,
        on_progress: OnProgress,
    ) -> None:
        self._config, self._sock, self._seen = config, sock, seen
        started = starter.start_all(on_progress=on_progress)
        self._engine = Replicas(config, starter, started)
        self.info = total_info({name: facts for name, (_, facts) in started.items()})
        routes = ReplicasApi(self._engine, config=config).routes()
        self._app = build_app(
            self._engine,
            config=config,
            info=self.info,
            tokenizer=checked.tokenizer,
            defaults=checked.defaults,
            routes=routes,
            observed=seen,
        )

    async def run(self, *, stop: asyncio.Event, on_started: Callable[[str], None]) -> None:
        watch = asyncio.create_task(self._engine.watch())
        # Exit, so that a supervisor can restart the service, instead of responding only 503.
        watch.add_done_callback(lambda ended: stop.set())
        freeze_startup_objects()
        async with publishing(self._engine, self._seen.metrics):
            await serve(self._app, sock=self._sock, stop=stop, on_started=on_started, config=self._config)
        if watch.done():
            watch.result()
        watch.cancel()
