"""What the tokens of many streams cost a server: of an engine that computes nothing, over a real one's connection.

    python -m benchmarks.streaming demos/hybrids/kda_mla --streams 64,256 --step-ms 5,10

The engine gives every stream a token per step, at a fixed pace, to a server in a process of its own, from which a
client reads. Shows the server's CPU time per token, the tokens of an event, and how long the streams take in relation
to the steps: about 1 where the server keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from actors import front
from actors.connection import Address, Connection, Listener
from benchmarks.figures import write_json
from benchmarks.tokens import plain_token_ids
from launch.http.app import build_app
from launch.http.bind import bind
from launch.http.serve import serve
from raycache.api.tokenizer import Tokenizer
from raycache.config import Config
from raycache.garbage import freeze_startup_objects
from raycache.types import EngineInfo, EngineStats, FinishReason, GenerateRequest, RequestOutput

_ROUNDS = 3
_TIMEOUT_S = 60.0


class PacedEngine:
    """Gives all requests a token per step once `count` have come."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._requests: list[GenerateRequest] = []
        self._has_come = threading.Condition()
        self.listener = Listener("127.0.0.1", self._take)

    def _take(self, message: GenerateRequest | str) -> None:
        if isinstance(message, GenerateRequest):
            with self._has_come:
                self._requests.append(message)
                self._has_come.notify()

    def run(self, count: int, *, tokens: int, step_s: float) -> float:
        """Answer `count` requests; returns the time of the first step."""
        with self._has_come:
            if not self._has_come.wait_for(lambda: len(self._requests) == count, _TIMEOUT_S):
                raise RuntimeError(f"{len(self._requests)} of {count} requests came")
            requests, self._requests = self._requests, []
        begin_s = time.perf_counter()
        for step in range(tokens):
            reason = FinishReason.LENGTH if step == tokens - 1 else None
            made = [RequestOutput(each.request_id, (self._token(step),), finish_reason=reason) for each in requests]
            self.listener.send([(each.request_id, each) for each in made])
            time.sleep(max(begin_s + (step + 1) * step_s - time.perf_counter(), 0.0))
        return begin_s

    def _token(self, step: int) -> int:
        return self._token_ids[step * 7919 % len(self._token_ids)]


def run_server(model: str, address: Address, ready: Pipe) -> None:
    """Serve an engine at an address; tells where."""
    connection = Connection()

    async def receive() -> Any:
        return await connection.receive(timeout_s=_TIMEOUT_S)

    async def ask(method: str) -> EngineStats:
        return EngineStats()

    async def status() -> dict[str, Any]:
        return {}

    actor = SimpleNamespace(submit=connection.send, cancel=connection.send, receive=receive, ask=ask)
    supervisor = SimpleNamespace(
        engine=actor, note_token=lambda: None, arenas=SimpleNamespace(status=status), num_lost=0
    )
    # The real front end, whose supervisor starts no actor.
    vars(front).update(Supervisor=lambda *_, **__: supervisor, NodeWatch=lambda *_, **__: SimpleNamespace(run=_forever))
    config = Config(model=model, port="auto", max_running=512)
    vocab_size = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
    tokenizer = Tokenizer.of(config, vocab_size=vocab_size)
    info = EngineInfo("paced", model, tokenizer.vocab_size, (), 1 << 20, 16, 64, 8)

    async def run() -> None:
        await connection.open(address)
        freeze_startup_objects()  # as a real server does
        engine: Any = front.RayEngine(config, device="cpu", placement=SimpleNamespace())  # type: ignore[arg-type]
        app = build_app(engine, config=config, info=info, tokenizer=tokenizer)
        await serve(app, sock=bind(config), stop=asyncio.Event(), on_started=ready.send, config=config)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def _forever() -> None:
    await asyncio.Event().wait()


def read_streams(endpoint: str, count: int, *, tokens: int) -> int:
    """Send requests and read until all streams have ended; returns the number of events."""
    url = urlsplit(endpoint)
    body = json.dumps({"model": "paced", "prompt": [1], "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    request = "\r\n".join([*lines, "", body]).encode()
    events = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(count):
            client = socket.create_connection((url.hostname, url.port))
            client.sendall(request)
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]  # a socket was registered
                if not received.startswith(b"HTTP/1.1 200") and received.startswith(b"HTTP/"):
                    raise RuntimeError(f"refused: {received.decode()}")
                events += received.count(b"data: {")
                if not received:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    return events


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        cpu_us: CPU time of the server per token.
        per_event: tokens.
        share: time until the last token has come over that of all steps.
    """

    streams: int
    step_ms: float
    cpu_us: float
    per_event: float
    share: float


def measure(
    engine: PacedEngine, endpoint: str, server: psutil.Process, *, count: int, tokens: int, step_s: float
) -> Line:
    found = []
    for _ in range(_ROUNDS):
        before = cpu_s(server)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.run, count, tokens=tokens, step_s=step_s)
            events = read_streams(endpoint, count, tokens=tokens)
            took_s = time.perf_counter() - running.result()
        cpu_us = 1e6 * (cpu_s(server) - before) / (count * tokens)
        found.append((cpu_us, count * tokens / events, took_s / (tokens * step_s)))
    return Line(count, 1e3 * step_s, *map(statistics.median, zip(*found, strict=True)))


def cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    token_ids = plain_token_ids(options.model)
    engine = PacedEngine(token_ids)
    ready, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=run_server, args=(options.model, engine.listener.address, theirs), daemon=True)
    server.start()
    try:
        if not ready.poll(_TIMEOUT_S):
            raise SystemExit("the server did not start")
        endpoint = ready.recv()
        lines, process = [], psutil.Process(server.pid)
        print("streams  step ms  CPU us per token  tokens per event  time over that of the steps")
        for count, step_ms in itertools.product(options.streams, options.step_ms):
            line = measure(engine, endpoint, process, count=count, tokens=options.tokens, step_s=1e-3 * step_ms)
            print(f"{count:7d}{step_ms:9.1f}{line.cpu_us:18.1f}{line.per_event:18.2f}{line.share:29.2f}", flush=True)
            lines.append(asdict(line))
    finally:
        server.kill()
    if options.json:
        write_json(options.json, {"lines": lines})
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with a tokenizer and config.json")
    parser.add_argument("--streams", type=lambda text: list(map(int, text.split(","))), default=[64, 256])
    parser.add_argument("--step-ms", type=lambda text: list(map(float, text.split(","))), default=[5.0, 10.0])
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--json", type=Path, help="write the lines to this file, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
