"""The engine actor: owns the decider of one replica and its gangs.

One thread runs the engine. Requests and outputs come and go over a connection (connection.py); one thread writes what
comes to the inbox, and one sends what is in the outbox, so that front end and steps never wait for each other. All else
are calls.

Ranks are started before this process imports torch and reads the model, so that their imports go on at the same time.

    requests, cancels -> inbox -> [ engine thread: step, step, ... ] -> outbox -> outputs
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from actors.arena import Arenas
from actors.connection import Address, Listener
from actors.gangs import Gangs
from actors.located import located
from actors.placement import Placement
from raycache.config import Config
from raycache.errors import EngineStoppedError, RankLostError, RayCacheError
from raycache.garbage import freeze_startup_objects, importing
from raycache.observe import logs
from raycache.observe.kv_events import check_installed
from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput, StreamState

if TYPE_CHECKING:
    from raycache.decider.engine import Engine

_log = logging.getLogger(__name__)

Message = tuple[str, RequestOutput | RayCacheError | str]
"""(request id, increment or error), or ("", log line for the operator)."""

FrontMessage = GenerateRequest | str
"""A request to run, or the id of one to cancel."""

HEARTBEAT_S = 5.0
"""After which an empty list of messages is sent."""

T = TypeVar("T")


class EngineActor:
    """Decider of one replica.

    Args:
        device: "cpu" or "cuda".
        arenas: owners of the host tier on the ranks' nodes.
        epoch: epoch of the last gang before this engine's first.
        replica: name of this engine's replica.
    """

    def __init__(
        self, config: Config, device: str, placement: Placement, *, arenas: Arenas, epoch: int, replica: str
    ) -> None:
        log_fields = logs.set_up_actor(config.log_format, replica=replica, epoch=epoch)
        self._name = f"engine of {config.model_name}, replica {replica}"
        self._gangs = Gangs(
            config, placement=placement, arenas=arenas, epoch=epoch, replica=replica, log_fields=log_fields
        )
        self._config, self._device, self._replica = config, device, int(replica)
        self._changed = threading.Condition()  # of the four below
        self._inbox: list[Callable[[], None]] = []
        self._outbox: list[Message] = []
        self._failure: RayCacheError | None = None
        self._is_stopping = False
        self._progress = ("starting the engine", 0.0)
        self._engine: Engine | None = None
        self._listener = Listener(ray.util.get_node_ip_address(), self._receive)
        threading.Thread(target=self._deliver, name="outbox", daemon=True).start()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        return self._name

    @ray.method(concurrency_group="ask")
    def progress(self) -> tuple[str, float]:
        """Phase of startup and fraction done; ("ready", 1.0) at the end.

        Raises:
            RayCacheError: the start failed.
        """
        if self._failure is not None:
            raise self._failure
        return self._progress

    @ray.method(concurrency_group="ask")
    def info(self) -> EngineInfo:
        """Facts of the engine.

        Raises:
            EngineStoppedError: the engine is not ready or has failed.
        """
        return self._ready().info

    @ray.method(concurrency_group="ask")
    def stats(self) -> EngineStats:
        """Current counters and gauges."""
        gangs = self._gangs
        return replace(
            self._ready().stats(),
            epoch=gangs.epoch,
            rebuilds=gangs.rebuilds,
            lost_at=gangs.lost_at,
            rebuild_s=gangs.rebuild_s,
        )

    @ray.method(concurrency_group="ask")
    def stream_states(self, request_ids: Sequence[str]) -> Mapping[str, StreamState]:
        """States of those of the requests that are in progress; does not wait for a step."""
        return self._ready().stream_states(request_ids)

    @ray.method(concurrency_group="ask")
    def check(self) -> None:
        """Assert that pages, slots and locks balance, between two steps."""
        self._between_steps(lambda engine: engine.check())

    @ray.method(concurrency_group="admin")
    def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        """Run a command on the cache tiers, between two steps; see `AsyncEngine.admin`.

        Raises:
            RayCacheError: the command is not possible.
        """
        answer = self._between_steps(lambda engine: engine.admin(command))
        return _within(answer, timeout_s=self._config.rank_timeout_s + command.timeout_s)

    @ray.method(concurrency_group="watch")
    def address(self, after_s: float) -> Address:
        """Where the front end sends requests and receives outputs, told after some time: a caller that has no use for
        it learns from Ray if the actor ends meanwhile."""
        time.sleep(after_s)
        return self._listener.address

    @ray.method(concurrency_group="ask")
    def stop(self, timeout_s: float) -> None:
        """Stop engine and ranks gracefully."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _between_steps(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread; return its result."""
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(work(self._ready()))
            except (AssertionError, RayCacheError) as cause:
                found.set_exception(cause)

        self._post(run)
        return _within(found, timeout_s=self._config.rank_timeout_s)

    def _ready(self) -> Engine:
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure}")
        if self._engine is None:
            raise EngineStoppedError(f"the engine is not ready: {self._progress[0]}")
        return self._engine

    def _post(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(work)
            self._changed.notify_all()

    # --- the connection's threads -------------------------------------------------------------------------------------

    def _receive(self, message: FrontMessage) -> None:
        match message:
            case str():
                self._post(lambda: self._ready().cancel(message))
            case GenerateRequest():

                def add() -> None:
                    try:
                        self._ready().add(message)
                    except RayCacheError as cause:
                        self._put([(message.request_id, cause)])

                self._post(add)

    def _deliver(self) -> None:
        """Send what is in the outbox, and last why the engine has ended."""
        failure = None
        while failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._failure, HEARTBEAT_S)
                messages, self._outbox, failure = self._outbox, [], self._failure
            try:
                self._listener.send(messages)
            except (TypeError, ValueError, OverflowError) as cause:  # this thread must not end without a word
                _log.exception("an output cannot be packed")
                failure = EngineStoppedError(f"an output cannot be sent: {cause}")
        self._listener.send(failure)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _live(self) -> None:
        failure: RayCacheError | None = None
        try:
            self._engine = engine = self._start()
            freeze_startup_objects()
            self._progress = ("ready", 1.0)
            while not self._is_stopping:
                self._turn(engine)
        except RayCacheError as cause:
            failure = cause
        except Exception as cause:  # last resort of the thread: the front end must be told
            _log.exception("the engine failed")
            failure = EngineStoppedError(f"{type(cause).__name__}: {cause}")
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        self._gangs.end(has_last_plan=failure is None and _has_closed(self._engine))

    def _start(self) -> Engine:
        if self._config.event_address is not None:
            check_installed()
        self._gangs.start_ranks(on_progress=self._note_progress)

        with importing():
            from raycache.deployment.deployment import deploy
            from raycache.gang.build import build_engine

        deployment = deploy(located(self._config), device_type=self._device)
        host = self._gangs.open_host(deployment, on_progress=self._note_progress)
        gang = self._gangs.start(deployment, on_progress=self._note_progress)
        return build_engine(
            gang.executor,
            gang.deployment,
            num_pages=gang.num_pages,
            ranks=[{**row, "pages": gang.num_pages} for row in gang.rows],
            host=host,
            replica=self._replica,
        )

    def _turn(self, engine: Engine) -> None:
        """Process the inbox, then run one step or wait for work."""
        self._gangs.keep_spares(on_progress=self._note_progress)
        with self._changed:
            if not self._inbox and not engine.has_work and not self._is_stopping:
                self._changed.wait(self._config.rank_timeout_s / 4)
            inbox, self._inbox = self._inbox, []
        for work in inbox:
            work()
        try:
            if not engine.has_work:
                engine.heartbeat()
                return
            outputs = engine.step()
        except RankLostError as error:
            gang = self._gangs.replace(
                error,
                on_progress=self._note_progress,
                on_loss=lambda line: self._put([("", line)]),
            )
            engine.restart(gang.executor)  # requests continue with the tokens that they have
            self._progress = ("ready", 1.0)
            return
        if outputs:
            self._gangs.note_step()
            self._put([(output.request_id, output) for output in outputs])

    def _note_progress(self, phase: str, share: float) -> None:
        if self._is_stopping:
            raise EngineStoppedError(f"stopped while {phase}")
        self._progress = (phase, share)

    def _put(self, messages: list[Message]) -> None:
        with self._changed:
            self._outbox += messages
            self._changed.notify_all()


def _has_closed(engine: Engine | None) -> bool:
    """Stop an engine gracefully; returns whether that worked."""
    assert engine is not None, "it has run"
    try:
        engine.close()
    except RankLostError as error:
        _log.warning("ranks were gone before the end: %s", error)
        return False
    return True


def _within(found: Future[T], *, timeout_s: float) -> T:
    try:
        return found.result(timeout_s)
    except TimeoutError as cause:
        raise EngineStoppedError("the engine did not run the command in time") from cause
