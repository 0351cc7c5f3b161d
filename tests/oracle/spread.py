"""An engine whose ranks are on several "nodes" of this machine: a board, an arena and an owner for each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raycache.config import Config
from raycache.decider.engine import Engine
from raycache.deployment.deployment import deploy
from raycache.errors import RankLostError
from raycache.gang.build import build_engine
from raycache.gang.processes import ProcessGang
from raycache.host.directory import SHARED_MEMORY, new_name
from raycache.host.link import HostLink
from raycache.host.nodes import are_all_gone, open_all, work_on_all
from raycache.host.service import HostService, Opened
from raycache.types import CacheAction, CacheCommand, GenerateRequest, RequestOutput, SamplingParams

_TIMEOUT_S = 120.0
_numbers = itertools.count()


@dataclass
class Spread:
    """One engine and what it uses.

    Attributes:
        engine: the decider, on node 0.
        gang: the ranks.
        opened: the arena of each node.
    """

    engine: Engine
    gang: ProcessGang
    opened: list[Opened]

    def ask(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], RequestOutput]:
        """The tokens after a prompt, the likeliest each time, and the first increment."""
        name = f"request {next(_numbers)}"
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.add(GenerateRequest(name, tuple(prompt), sampling))
        found, deadline = list[RequestOutput](), time.monotonic() + _TIMEOUT_S
        while self.engine.has_work:
            found += self.engine.step()
            assert time.monotonic() < deadline, "a request or a move hangs"
        self.engine.check()
        return [token for output in found for token in output.token_ids], found[0]

    def clear(self, *tiers: str) -> None:
        """Forget what tiers hold."""
        self.engine.admin(CacheCommand(CacheAction.CLEAR, tiers=tiers))


@contextmanager
def host_services(num_nodes: int) -> Iterator[list[HostService]]:
    """One owner per node; nothing is left of them."""
    owners = [HostService(SHARED_MEMORY / new_name()) for _ in range(num_nodes)]
    try:
        yield owners
    finally:
        for owner in owners:
            owner.close()


@contextmanager
def spread(
    model_dir: Path, owners: Sequence[HostService], *, nodes: tuple[int, ...], epoch: int = 1, **settings: object
) -> Iterator[Spread]:
    """An engine over the owners' tiers.

    Args:
        model_dir: of the model.
        owners: one per node.
        nodes: node of each rank.
        epoch: of the engine.
        settings: of `Config`.
    """
    config = Config(model=str(model_dir), device="cpu", page_size=8, host_memory="4MiB", **settings)  # type: ignore[arg-type]
    deployment = deploy(config, device_type="cpu")
    assert are_all_gone(owners, timeout_s=60)
    opened = open_all(owners, deployment, epoch=epoch, nodes=nodes)
    gang = ProcessGang(deployment, arenas=[each.path for each in opened], nodes=nodes)
    link = HostLink(
        path=opened[0].path,
        sizes=opened[0].spec.sizes,
        work=work_on_all([owner.work for owner in owners]),
        has_storage=bool(opened[0].spec.storage),
        epoch=epoch,
        nodes=nodes,
    )
    try:
        engine = build_engine(gang.executor, deployment, num_pages=gang.num_pages, host=link)
        yield Spread(engine, gang, opened)
        engine.close()
        gang.join(30)
    except RankLostError:
        gang.kill()
        raise
    finally:
        gang.kill()
