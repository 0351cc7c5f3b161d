"""`raycache launch`: from settings to a server that answers, and back to nothing.

bind port -> check model -> Ray -> places -> engine actor and ranks -> HTTP server -> table -> ... -> stop in reverse
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

from actors.cluster import Cluster, connect, device_type, disconnect, reserve
from actors.front import RayEngine
from launch import cache, table
from launch.http import build_app
from launch.serve import bind, serve
from launch.service import register
from raycache.config import Config
from raycache.engine.build import check_model
from raycache.server.chat import ChatTemplate
from raycache.server.tokenizer import Tokenizer
from raycache.types import EngineInfo

_TOKEN_HINT = " (if it asks for a token: `ray get-auth-token` prints it)"


def run(config: Config) -> int:
    """Serve a model until SIGINT, SIGTERM or SIGHUP, or until its engine fails for good.

    Args:
        config: of the service.
    Returns:
        Exit status.
    Raises:
        RayCacheError: why it cannot serve, or serve on; nothing is left running.
    """
    with contextlib.ExitStack() as cleanup:
        cleanup.enter_context(_signals_unwind())
        sock = cleanup.enter_context(contextlib.closing(bind(config)))
        progress = cleanup.enter_context(_Progress())
        progress.show("checking the model", 0.0)
        check_model(config)
        tokenizer = Tokenizer(config.model)
        ChatTemplate.load(tokenizer, path=config.chat_template)  # or it would be refused after the weights are loaded
        progress.show("starting Ray", 0.0)
        cluster = connect(config)
        cleanup.callback(disconnect, cluster.temp_dir)
        device = device_type(config)
        places = reserve(
            config, device=device, on_wait=lambda missing: progress.show(f"waiting for Ray: {missing}", 0.0)
        )
        engine = RayEngine(config, device=device, places=places)
        cleanup.callback(engine.stop)
        info = engine.wait_ready(timeout_s=config.start_timeout_s, on_progress=progress.show)
        app = build_app(engine, config=config, info=info, tokenizer=tokenizer)
        progress.close()
        cleanup.callback(_ignore, _stop_signals())
        asyncio.run(_serve(app, sock, engine=engine, config=config, info=info, cluster=cluster))
    return 0


async def _serve(
    app: object, sock: socket.socket, *, engine: RayEngine, config: Config, info: EngineInfo, cluster: Cluster
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _stop_signals():
        loop.add_signal_handler(number, stop.set)
    watch = loop.create_task(engine.watch())
    # Whoever runs this command can start it again; a server that only answers 503 helps nobody.
    watch.add_done_callback(lambda ended: stop.set())
    with contextlib.ExitStack() as registered:

        def on_started(endpoint: str) -> None:
            registered.enter_context(
                register(endpoint, model=info.model, ray_address=cluster.address, dashboard=cluster.dashboard_url)
            )
            print(_summary(info, endpoint=endpoint, dashboard=cluster.dashboard_url, config=config), flush=True)

        await serve(app, sock=sock, stop=stop, on_started=on_started)  # type: ignore[arg-type]
    print("stopping", file=sys.stderr, flush=True)
    if watch.done():
        watch.result()
    watch.cancel()


def _summary(info: EngineInfo, *, endpoint: str, dashboard: str, config: Config) -> str:
    rows = [
        [
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
    return "\n".join(
        [
            table.render(["rank", "place", "node", "device", "pages", "tokens held"], rows=rows),
            "",
            f"model      {info.model} (context of {info.max_model_len} tokens)",
            f"cache      {info.num_pages} pages of {info.page_size} tokens: {tokens} tokens fit",
            *cache.summary(info.tiers),
            f"endpoint   {endpoint}/v1",
            f"dashboard  {dashboard + _TOKEN_HINT if dashboard else 'none'}",
            "Ctrl-C stops it.",
        ]
    )


class _Progress:
    """What the start is doing: one line that is rewritten on a terminal, a line per phase elsewhere."""

    def __init__(self) -> None:
        self._phase = ""
        self._width = 0
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, phase: str, share: float) -> None:
        """Tell the phase, and the share of it that is done (0 to 1; 0 when it is not known)."""
        line = f"{phase} {share:.0%}" if share and phase == "loading weights" else phase
        if self._is_terminal:
            print(f"\r{line.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        elif phase != self._phase:
            print(phase, file=sys.stderr, flush=True)
        self._phase = phase

    def close(self) -> None:
        """End the line."""
        if self._is_terminal and self._width:
            print(f"\r{' ' * self._width}\r", end="", file=sys.stderr, flush=True)
        self._width = 0


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let the signals that stop unwind the stack, so that what was started is stopped.

    SIGINT too: a shell starts background jobs with SIGINT ignored, and Python keeps that.
    """
    numbers = _stop_signals()

    def interrupt(number: int, frame: object) -> None:
        _ignore(numbers)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_signals() -> list[signal.Signals]:
    """SIGHUP is one (the terminal was closed), unless it is ignored: then nohup wants us to go on."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


def _ignore(numbers: list[signal.Signals]) -> None:
    """An impatient second signal must not end the stopping half-way, with Ray's processes left; it has deadlines."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
