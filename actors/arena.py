"""The actors that own a gang's host tier, one per node, as those who call them see them; they outlive engine and ranks.

Ray restarts an actor that dies; it then finds arena and storage in its directory (raycache/host/directory.py). Until
then its callers get misses. If a node is lost, all owners start anew, because a page has rows on every node.

    front end -> Arenas: operators' commands -+-> ArenaActor on node a
    engine    -> RemoteOwner, one per node -+-> ArenaActor on node b

The engine imports this module before it starts ranks, so nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.answers import ActorLostError, answer, answer_now
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.host import directory as host_directory
from raycache.types import CacheAction, CacheCommand

if TYPE_CHECKING:
    from raycache.cache.storage_commands import StorageCommand, StorageResult
    from raycache.host.service import Opened
    from raycache.host.spec import HostSpec

OWNER = "the arena's owner"
"""What messages call it."""
_COMMAND_TIMEOUT_S = 600.0
"""Timeout of an operator's command; emptying a large storage takes a while."""
_SCRUB_TIMEOUT_S = 3600.0
_STATUS_TIMEOUT_S = 1.0
"""Timeout of storage counters, which a health report can do without."""


@dataclass(frozen=True)
class Arenas:
    """The owners on all nodes of a gang. Plain data, which is sent to the engine actor.

    Attributes:
        actors: node id -> owner, in the order of the nodes' lowest ranks.
    """

    config: Config
    actors: Mapping[str, Any]
    replica: str = "0"

    @classmethod
    def start(cls, config: Config, nodes: Iterable[str], *, replica: str = "0") -> Arenas:
        """Create an owner on each node; none without a host tier.

        Args:
            nodes: node ids, possibly repeated, such as one per rank.
        """
        return cls(config, {}, replica).moved(nodes, timeout_s=0.0)

    def moved(self, nodes: Iterable[str], *, timeout_s: float) -> Arenas:
        """Owners for a gang that has moved: kept on nodes that it still uses, ended on others.

        Args:
            nodes: as for `start`.
            timeout_s: how long to wait for an owner to end; one on a lost node is not waited for.
        """
        wanted = dict.fromkeys(nodes) if self.config.has_host_tier else {}
        _end([actor for node, actor in self.actors.items() if node not in wanted], timeout_s=timeout_s)
        actors = {node: self.actors.get(node) or _start(self.config, node, replica=self.replica) for node in wanted}
        return Arenas(self.config, actors, self.replica)

    def owners(self) -> list[RemoteOwner]:
        """As the decider uses them."""
        timeouts = {"start_timeout_s": self.config.start_timeout_s, "timeout_s": self.config.rank_timeout_s}
        return [RemoteOwner(actor, **timeouts) for actor in self.actors.values()]

    async def carry_out(self, command: CacheCommand) -> dict[str, Any]:
        """Execute the storage's part of an operator's command on all nodes.

        Raises:
            ConfigError: the command is not possible. If one node cannot attach a storage, none does.
        """
        if not self.actors and command.kind is not CacheAction.CLEAR:
            raise ConfigError(
                f"{command.kind} needs a host tier, but there is none; start the server with --host-memory"
            )
        if command.kind is CacheAction.SCRUB:
            command = replace(command, timeout_s=command.timeout_s or _SCRUB_TIMEOUT_S)
        if command.kind is CacheAction.ATTACH:
            return await self._attach(command)
        done = await self._ask(partial(_told, command), timeout_s=_COMMAND_TIMEOUT_S + command.timeout_s)
        return _joined(done)

    async def status(self) -> dict[str, Any]:
        """Counters of the storage, summed over nodes; empty without one, or while an owner is away."""
        found = await self._answers(
            lambda actor: actor.status.options(concurrency_group="ask").remote(), timeout_s=_STATUS_TIMEOUT_S
        )
        return _sum([each for each in found if isinstance(each, dict)], count=len(found))

    def status_now(self, *, timeout_s: float) -> dict[str, Any]:
        """The same, from a thread.

        Raises:
            ActorLostError: an owner is away.
        """
        refs = list(map(_status, self.actors.values()))
        return _sum([answer_now(ref, of=OWNER, timeout_s=timeout_s) for ref in refs], count=len(refs))

    def close(self, *, timeout_s: float) -> None:
        """End the owners, which frees the host tier's memory now or soon after."""
        _end(list(self.actors.values()), timeout_s=timeout_s)

    async def _attach(self, command: CacheCommand) -> dict[str, Any]:
        """Attach a storage on all nodes; if one of them fails, restore the previous state."""
        before = await self._ask(lambda actor: actor.spec.remote())
        found = await self._answers(partial(_told, command))
        refused = [each for each in found if isinstance(each, BaseException)]
        if not refused:
            return _joined(found)
        for actor, spec, each in zip(self.actors.values(), before, found, strict=True):
            if not isinstance(each, BaseException):
                back = actor.attach.remote(spec.storage) if spec.storage else actor.detach.remote()
                await answer(back, of=OWNER, timeout_s=_COMMAND_TIMEOUT_S)
        raise _refusal(refused[0])

    async def _ask(self, call: Callable[[Any], Any], *, timeout_s: float = _COMMAND_TIMEOUT_S) -> list[Any]:
        """Answers of all.

        Raises:
            RayCacheError: the first of them that is an error.
        """
        found = await self._answers(call, timeout_s=timeout_s)
        for each in found:
            if isinstance(each, BaseException):
                raise _refusal(each)
        return found

    async def _answers(self, call: Callable[[Any], Any], *, timeout_s: float = _COMMAND_TIMEOUT_S) -> list[Any]:
        """Call all owners concurrently; return their results or errors."""
        answers = [answer(call(actor), of=OWNER, timeout_s=timeout_s) for actor in self.actors.values()]
        return await asyncio.gather(*answers, return_exceptions=True)


def _start(config: Config, node: str, *, replica: str) -> Any:
    from actors.arena_actor import ArenaActor
    from raycache.storage.lanes import NUM_LANES

    options: dict[str, Any] = {
        "enable_task_events": False,  # of its calls
        # A scrub and a clear at a time; a new engine waits for neither.
        "concurrency_groups": {"work": NUM_LANES, "gone": 2, "long": 2, "ask": 1},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    kind: Any = ray.remote(num_cpus=0, max_restarts=-1, **options)(ArenaActor)
    return kind.remote(host_directory.SHARED_MEMORY / host_directory.new_name(), config, replica)


def _status(actor: Any) -> Any:
    return actor.status.options(concurrency_group="ask").remote()


def _told(command: CacheCommand, actor: Any) -> Any:
    is_long = command.kind in (CacheAction.SCRUB, CacheAction.CLEAR)
    return actor.carry_out.options(concurrency_group="long" if is_long else None).remote(command)


def _end(actors: Sequence[Any], *, timeout_s: float) -> None:
    """End owners. Files of one that does not end in time are removed by its directory's watcher."""
    closing = [actor.close.remote() for actor in actors]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
    for actor in actors:
        ray.kill(actor)


def _refusal(error: BaseException) -> BaseException:
    if isinstance(error, ActorLostError):
        refusal = ConfigError(f"{error}; it is being restarted, try again")
        refusal.__cause__ = error
        return refusal
    return error


def _joined(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of all nodes."""
    whole: dict[str, Any] = {}
    for name, first in done[0].items() if done else ():
        values = [each[name] for each in done]
        match name:
            case "storage" | "detached":
                whole[name] = _joined_names(values)
            case "seconds":
                whole[name] = max(values)
            case "is_whole":
                whole[name] = all(values)
            case "bytes_limit":
                whole[name] = first  # of each node
            case _:
                whole[name] = sum(values)
    return whole


def _joined_names(names: Sequence[Any]) -> str:
    """Names of all nodes' storages; one name if they are equal."""
    return ", ".join(dict.fromkeys(names))


def _sum(found: Sequence[dict[str, Any]], *, count: int) -> dict[str, Any]:
    if not found or len(found) < count or not all(found):
        return {}
    figures = {name: sum(each[name] for each in found) for name in found[0] if name not in ("name", "is_up")}
    return {"name": _joined_names([each["name"] for each in found]), "is_up": all(e["is_up"] for e in found), **figures}


class RemoteOwner:
    """An owner as the decider sees it, from any thread: an `Owner` of raycache/host/nodes.py.

    Args:
        actor: the `ArenaActor`.
        start_timeout_s: time limit to make an arena: touching its memory first can take seconds per GiB.
        timeout_s: time limit of a command, after which the owner counts as away.
    """

    def __init__(self, actor: Any, *, start_timeout_s: float, timeout_s: float) -> None:
        self._actor = actor
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s

    def spec(self) -> HostSpec | None:
        found: HostSpec | None = self._ask(self._actor.spec.remote())
        return found

    def budget(self, host_memory: str) -> int:
        return int(self._ask(self._actor.budget.remote(host_memory)))

    def are_ranks_gone(self, timeout_s: float) -> bool:
        ref = self._actor.are_ranks_gone.options(concurrency_group="gone").remote(timeout_s)
        return bool(answer_now(ref, of=OWNER, timeout_s=timeout_s + self._timeout_s))

    def drop(self) -> None:
        self._ask(self._actor.drop.remote())

    def open(self, spec: HostSpec, *, epoch: int) -> Opened:
        found: Opened = self._ask(self._actor.open.remote(spec, epoch=epoch))
        return found

    def work(self, command: StorageCommand) -> StorageResult:
        """Raises OSError while the owner or its storage is away."""
        try:
            ref = self._actor.work.options(concurrency_group="work").remote(command.sent())
            found: StorageResult = answer_now(ref, of=OWNER, timeout_s=self._timeout_s)
        except (ActorLostError, RayTaskError) as cause:
            raise OSError(str(cause)) from cause
        return found

    def _ask(self, ref: Any) -> Any:
        return answer_now(ref, of=OWNER, timeout_s=self._start_timeout_s)
