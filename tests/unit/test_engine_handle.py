"""What a front end is told when its engine actor, the node, or only the connection between them is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from actors import handle
from actors.answers import ActorLostError
from actors.connection import Address, Listener
from actors.engine import EngineActor
from actors.handle import EngineHandle
from actors.messages import pack, unpack
from raycache.config import Config
from raycache.errors import EngineStoppedError, RayCacheError
from raycache.types import RequestOutput


class Actor:
    """An engine actor without Ray.

    Attributes:
        lost: why calls of it fail; None while it lives.
    """

    def __init__(self) -> None:
        self.listener = Listener("127.0.0.1", lambda message: None)
        self.reachable = self.listener.address
        self.lost: RayCacheError | None = None
        self._has_ended = asyncio.Event()
        self.address, self.progress = map(self._method, (self._address, self._progress))

    def die(self, error: RayCacheError) -> None:
        self.lost = error
        self._has_ended.set()

    def _method(self, run: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        async def call(*arguments: Any) -> Any:
            found = await run(*arguments)
            if self.lost is not None:
                raise self.lost
            return found

        return SimpleNamespace(remote=call)

    async def _address(self, after_s: float) -> Address:
        if after_s:
            await asyncio.wait([asyncio.create_task(self._has_ended.wait())], timeout=after_s)
        return self.reachable

    async def _progress(self) -> tuple[str, float]:
        return "ready", 1.0


def made(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> EngineHandle:
    kind = SimpleNamespace(remote=lambda *given, **named: actor)
    monkeypatch.setattr(handle, "ray", SimpleNamespace(remote=lambda **options: lambda cls: kind))
    placement: Any = SimpleNamespace(nodes=["a" * 56])
    arenas: Any = None
    return EngineHandle(Config(model="/m"), device="cpu", placement=placement, arenas=arenas, epoch=0, replica="0")


Case = Callable[[Actor, EngineHandle], Coroutine[Any, Any, None]]


def run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    async def within() -> None:
        actor = Actor()
        await asyncio.wait_for(case(actor, made(actor, monkeypatch)), 30)

    asyncio.run(within())


def test_outputs_come_and_a_failure_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        output = [("a", RequestOutput("a", (1, 2)))]
        sending = asyncio.create_task(asyncio.to_thread(actor.listener.send, output))
        assert await engine.receive() == output
        await sending
        await asyncio.to_thread(actor.listener.send, ActorLostError("the arena died"))
        with pytest.raises(ActorLostError, match="the arena died"):
            await engine.receive()
        await asyncio.to_thread(actor.listener.send, RayCacheError("no such file"))
        with pytest.raises(EngineStoppedError, match="no such file"):
            await engine.receive()

    run(case, monkeypatch)


def test_a_lost_node_ends_the_wait_though_the_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        waiting = asyncio.create_task(engine.receive())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        actor.die(ActorLostError("the engine actor died: its node is gone"))
        with pytest.raises(ActorLostError, match="its node is gone"):
            await waiting

    run(case, monkeypatch)


def test_an_actor_whose_process_has_ended_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        waiting = asyncio.create_task(engine.receive())
        await asyncio.sleep(0.1)
        actor.lost = ActorLostError("the engine actor died: killed")
        assert engine._connection._writer is not None
        engine._connection._writer.transport.abort()
        with pytest.raises(ActorLostError, match="killed"):
            await waiting

    run(case, monkeypatch)


def test_a_connection_that_breaks_alone_counts_as_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        waiting = asyncio.create_task(engine.receive())
        await asyncio.sleep(0.1)
        assert engine._connection._writer is not None
        engine._connection._writer.transport.abort()
        with pytest.raises(ActorLostError, match="which Ray still reaches"):
            await waiting
        assert not engine._connection.is_open

    run(case, monkeypatch)


def test_a_silent_engine_is_lost_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        monkeypatch.setattr(handle, "_SILENT_S", 1.0)
        waiting = asyncio.create_task(engine.receive())
        while not engine._connection.is_open:
            await asyncio.sleep(0.01)
        actor.lost = ActorLostError("what a call says of a frozen actor, after another minute")
        with pytest.raises(ActorLostError, match="was silent for 1 s"):
            await waiting
        assert not engine._connection.is_open

    run(case, monkeypatch)


def test_a_port_that_cannot_be_reached_is_named_and_no_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case(actor: Actor, engine: EngineHandle) -> None:
        actor.reachable = Address("127.0.0.1", 9, bytes(32))
        with pytest.raises(EngineStoppedError, match=r"127\.0\.0\.1, port 9, .*all ports") as raised:
            await engine.receive()
        assert not isinstance(raised.value, ActorLostError)

    run(case, monkeypatch)


def test_an_output_that_cannot_be_sent_ends_the_engine_with_a_reason() -> None:
    actor: Any = EngineActor.__new__(EngineActor)
    actor._changed, actor._outbox, actor._failure = threading.Condition(), [("a", object())], None
    sent = []
    actor._listener = SimpleNamespace(send=lambda message: sent.append(unpack(pack(message))))
    actor._deliver()
    assert [str(each) for each in sent] == ["an output cannot be sent: object is no part of a message"]
    assert isinstance(sent[0], EngineStoppedError)
