"""The engine actor: owns the decider of one replica and the gang that executes for it.

One thread runs the engine; the actor's methods only leave things in its inbox or read what it has put out, so that no
caller ever waits for a step and no step for a caller.

    submit, cancel -> inbox -> [ engine thread: step, step, ... ] -> outbox -> poll
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.answers import ActorLostError
from actors.arena import Arenas, RemoteOwner
from actors.gang import Gang
from actors.placement import Places
from raycache.checkpoint.hub_models import located
from raycache.config import Config
from raycache.decider.engine import Engine
from raycache.deployment.deployment import Deployment, deploy
from raycache.errors import EngineStoppedError, RankLostError, RayCacheError
from raycache.gang.build import build_engine
from raycache.host.link import HostLink
from raycache.host.nodes import are_all_gone, open_all, work_on_all
from raycache.observe import logs
from raycache.types import CacheCommand, EngineInfo, EngineStats, GenerateRequest, RequestOutput

_log = logging.getLogger(__name__)
_MAX_REBUILDS = 4
"""Gangs that may be lost one after another without a step in between, before the engine gives up."""


Message = tuple[str, RequestOutput | RayCacheError | str]
"""Request id, and an increment or why it was refused; or "", and a line for the operator."""

_KILL_TIMEOUT_S = 60.0
"""For a rank that was killed to be dead; Ray takes some seconds for one that does not answer it."""

T = TypeVar("T")


class EngineActor:
    """Decider of one replica.

    Args:
        config: of the service.
        device: "cpu" or "cuda".
        places: for the ranks.
        arenas: owners of the host tier on the nodes of the places; None without one.
        epoch: of the last gang before this engine's first.
        replica: name of this engine among others.
    """

    def __init__(
        self, config: Config, device: str, places: Places, *, arenas: Arenas | None, epoch: int, replica: str
    ) -> None:
        self._log_fields = logs.set_up(config.log_format, replica=replica, epoch=epoch)
        self._config, self._replica = config, replica
        self._device = device
        self._places = places
        self._owners: list[RemoteOwner] = [] if arenas is None else arenas.owners()
        self._inbox: list[Callable[[], None]] = []
        self._outbox: list[Message] = []
        self._changed = threading.Condition()
        self._progress = ("starting ranks", 0.0)
        self._failure: RayCacheError | None = None
        self._is_stopping = False
        self._engine: Engine | None = None
        self._gang: Gang | None = None
        self._host: HostLink | None = None
        self._arenas: dict[str, Path] = {}
        self._epoch = epoch
        self._losses = self._rebuilds = 0
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        """What the Ray dashboard and logs call it."""
        return f"engine of {self._config.model_name}, replica {self._replica}"

    # --- called by the front end --------------------------------------------------------------------------------------

    @ray.method(concurrency_group="ask")
    def progress(self) -> tuple[str, float]:
        """Phase of the start and its share done; ("ready", 1.0) at the end.

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
            EngineStoppedError: it is not ready or has failed.
        """
        return self._ready().info

    @ray.method(concurrency_group="ask")
    def stats(self) -> EngineStats:
        """Counters and balances.

        Raises:
            EngineStoppedError: it is not ready or has failed.
        """
        return dataclasses.replace(self._ready().stats(), epoch=self._epoch, rebuilds=self._rebuilds)

    @ray.method(concurrency_group="ask")
    def check(self) -> None:
        """Assert all balances, between two steps."""
        self._between_steps(lambda engine: engine.check())

    @ray.method(concurrency_group="admin")
    def admin(self, command: CacheCommand) -> Mapping[str, Any]:
        """Carry out a command on the tiers, between two steps; see `AsyncEngine.admin`.

        Raises:
            RayCacheError: it cannot be done.
        """
        return self._within(self._between_steps(lambda engine: engine.admin(command)), timeout_s=command.timeout_s)

    @ray.method(concurrency_group="flush")
    def flush(self, command: CacheCommand) -> Mapping[str, Any]:
        """The same for a command that takes long, beside which others are carried out."""
        return self._within(self._between_steps(lambda engine: engine.admin(command)), timeout_s=command.timeout_s)

    @ray.method(concurrency_group="submit")
    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; what comes of it is polled."""
        self._post(lambda: self._add(request))

    @ray.method(concurrency_group="submit")
    def cancel(self, request_id: str) -> None:
        """End a request; its pages are free in the next step."""
        self._post(lambda: self._ready().cancel(request_id))

    @ray.method(concurrency_group="poll")
    def poll(self, timeout_s: float) -> list[Message]:
        """What happened since the last poll; waits for the first message.

        Args:
            timeout_s: after which an empty list is returned.
        Raises:
            EngineStoppedError: nothing will ever come; an ActorLostError if another engine could go on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._failure, timeout_s)
            messages, self._outbox = self._outbox, []
        if not messages and isinstance(self._failure, ActorLostError):
            raise self._failure  # another engine may have more luck
        if not messages and self._failure is not None:
            raise EngineStoppedError(str(self._failure))
        return messages

    @ray.method(concurrency_group="ask")
    def stop(self, timeout_s: float) -> None:
        """End engine and ranks in good order."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _between_steps(self, work: Callable[[Engine], T]) -> T:
        """What the engine's thread answers."""
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(work(self._ready()))
            except (AssertionError, RayCacheError) as cause:
                found.set_exception(cause)

        self._post(run)
        return self._within(found)

    def _within(self, found: Future[T], *, timeout_s: float = 0.0) -> T:
        try:
            return found.result(self._config.rank_timeout_s + timeout_s)
        except TimeoutError as cause:
            raise EngineStoppedError("the engine did not carry out the command in time") from cause

    def _post(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(work)
            self._changed.notify_all()

    def _ready(self) -> Engine:
        if self._failure is not None:
            raise EngineStoppedError(f"the engine has failed: {self._failure}")
        if self._engine is None:
            raise EngineStoppedError(f"the engine is not ready: {self._progress[0]}")
        return self._engine

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._start()
            while not self._is_stopping:
                self._turn()
        except RayCacheError as cause:
            self._fail(cause)
        except Exception as cause:  # the thread's last resort: whoever polls must hear of it
            _log.exception("the engine failed")
            self._fail(EngineStoppedError(f"{type(cause).__name__}: {cause}"))
        self._end()

    def _start(self) -> None:
        deployment = deploy(located(self._config), device_type=self._device)
        self._config = dataclasses.replace(self._config, pp_layers=deployment.config.pp_layers)
        if self._owners:
            self._host = self._open_host(deployment)
        gang = self._new_gang(deployment)
        self._engine = build_engine(
            gang.executor,
            gang.deployment,
            num_pages=gang.num_pages,
            ranks=[{**row, "pages": gang.num_pages} for row in gang.rows],
            host=self._host,
        )
        self._progress = ("ready", 1.0)

    def _open_host(self, deployment: Deployment) -> HostLink:
        """Have the arena made, or find that of an engine before, whose size it keeps."""
        self._note_progress("making the host tier", 0.0)
        node_ids = list(dict.fromkeys(self._places.nodes))
        nodes = tuple(map(node_ids.index, self._places.nodes))
        opened = open_all(self._owners, deployment, epoch=self._epoch, nodes=nodes)
        self._arenas = {node: each.path for node, each in zip(node_ids, opened, strict=True)}
        return HostLink(
            path=opened[0].path,
            sizes=opened[0].spec.sizes,
            work=work_on_all([owner.work for owner in self._owners]),
            has_storage=all(each.spec.storage for each in opened),
            epoch=self._epoch,
            nodes=nodes if len(node_ids) > 1 else (),
        )

    def _turn(self) -> None:
        """Take the inbox in, then make one step, or wait for something to do."""
        engine = self._ready()
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
            self._recover(error)
            return
        if outputs:
            self._losses = 0
            self._put([(output.request_id, output) for output in outputs])

    def _recover(self, error: RankLostError) -> None:
        """Replace a lost gang by one of the next epoch; requests go on with the tokens that they have."""
        assert self._gang is not None and self._engine is not None, "steps come after the start"
        self._gang.kill()
        self._engine.restart(self._rebuilt(error, self._gang).executor)
        self._progress = ("ready", 1.0)

    def _rebuilt(self, error: RankLostError, lost: Gang) -> Gang:
        """The next gang that starts whole: one can lose a rank while it starts, as a running one can."""
        # Neither the pool nor the form of the weights may change under requests that were accepted for them.
        weights = "stored" if lost.deployment.config.weights == "auto" else lost.deployment.config.weights
        pinned = {"num_pages": lost.num_pages, "weights": weights}
        deployment = dataclasses.replace(lost.deployment, config=dataclasses.replace(lost.deployment.config, **pinned))
        self._config = dataclasses.replace(self._config, **pinned)
        while self._losses < _MAX_REBUILDS:
            self._losses += 1
            self._rebuilds += 1
            self._put([("", f"{error}; rebuilding the gang as epoch {self._epoch + 1}")])
            try:
                return self._new_gang(deployment)
            except RankLostError as cause:
                error = cause
        raise error

    def _new_gang(self, deployment: Deployment) -> Gang:
        self._epoch += 1
        self._log_fields["epoch"] = self._epoch
        # Ranks of a lost gang end by themselves, but they may still be writing into an arena.
        if self._arenas and not are_all_gone(self._owners, timeout_s=_KILL_TIMEOUT_S):
            raise ActorLostError(f"ranks of the gang before still use the host tier after {_KILL_TIMEOUT_S:.0f} s")
        self._gang = Gang(
            deployment,
            self._config,
            places=self._places,
            epoch=self._epoch,
            replica=self._replica,
            arenas=self._arenas,
            on_progress=self._note_progress,
        )
        _log.info("epoch %d runs on %d ranks", self._epoch, self._config.world_size)
        return self._gang

    def _note_progress(self, phase: str, share: float) -> None:
        if self._is_stopping:
            raise EngineStoppedError(f"stopped while {phase}")
        self._progress = (phase, share)

    def _add(self, request: GenerateRequest) -> None:
        try:
            self._ready().add(request)
        except RayCacheError as cause:
            self._put([(request.request_id, cause)])

    def _put(self, messages: list[Message]) -> None:
        with self._changed:
            self._outbox += messages
            self._changed.notify_all()

    def _fail(self, error: RayCacheError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _end(self) -> None:
        if self._gang is None:
            return
        if self._failure is None and self._engine is not None:
            try:
                self._engine.close()
                self._gang.join(5.0)
                return
            except RankLostError as error:
                _log.warning("ranks were gone before the end: %s", error)
        self._gang.kill()
