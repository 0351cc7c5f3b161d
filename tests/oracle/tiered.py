"""An engine over the twin's device, host and storage, all parts of which can fail or be lost and come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

from raycache.cache.catalog import Catalog
from raycache.cache.costs import Costs
from raycache.cache.evict import Eviction
from raycache.cache.host_tier import HostTier, WritePolicy
from raycache.cache.keys import Identity, page_chain
from raycache.cache.kv_events import KvEvents, NoKvEvents, Publisher
from raycache.cache.prefetches import Waiting
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.cache.storage_tier import StorageTier
from raycache.decider.budget import StepBudget
from raycache.decider.drafts import Drafts
from raycache.decider.engine import Engine
from raycache.decider.scheduler import Scheduler
from raycache.memory.component import FULL, window_pages
from raycache.observe.kv_events import Medium
from raycache.storage.lanes import StorageLanes
from raycache.types import EngineInfo, GenerateRequest, RequestOutput, SamplingParams, packed
from tests.oracle.drafters import KnownTexts
from tests.oracle.twin import EOS, VOCAB, TwinExecutor, continuation
from tests.oracle.twin_host import Trouble, TwinHost, TwinMover
from tests.oracle.twin_storage import StorageTrouble, TwinLanes, TwinStorage


@dataclass(frozen=True)
class Setup:
    """What an engine is made with.

    Attributes:
        device_pages, host_pages: of the sequence.
        device_points, host_points: restore points that there is room for, beside what running requests need.
        stages: of the pipeline.
        plans_ahead: whether a step is planned while the one before runs; with one stage.
        most_drafts: draft tokens per row.
        are_from_ranks: whether ranks make them.
        has_storage: whether there is a storage tier.
        most_objects: that it takes.
        trouble, storage_trouble: what goes wrong.
        seed: of the random numbers of what goes wrong.
    """

    page_size: int = 4
    device_pages: int = 16
    host_pages: int = 64
    device_points: int = 4
    host_points: int = 8
    window: int = 0
    has_state: bool = False
    stages: int = 1
    plans_ahead: bool = False
    max_step_tokens: int = 16
    max_running: int = 4
    max_queue: int = 1000
    max_model_len: int = 10_000
    interval: int = 0
    most_drafts: int = 0
    are_from_ranks: bool = False
    policy: WritePolicy = WritePolicy.THROUGH
    eviction: Eviction = Eviction.LRU
    has_storage: bool = False
    waiting: Waiting = Waiting.COMPLETE
    prefetch_timeout_s: float = 1000.0
    prefetch_share: float = 0.5
    most_objects: int = 1 << 30
    trouble: Trouble = field(default_factory=Trouble)
    storage_trouble: StorageTrouble = field(default_factory=StorageTrouble)
    seed: int = 0

    def sizes(self, *, is_host: bool) -> SpaceSizes:
        """Pools of a tier. On the device points share what they hold with running requests."""
        pages = window_pages(self.window, self.page_size)
        points = self.host_points if is_host else 2 * self.max_running + self.device_points
        return SpaceSizes(
            num_pages=self.host_pages if is_host else self.device_pages,
            page_size=self.page_size,
            windows={"window": (self.window, points * pages)} if self.window else {},
            states={"state": points + self.most_drafts * self.max_running * (not is_host)} if self.has_state else {},
        )

    @property
    def widths(self) -> dict[str, int]:
        """Most units of each space in a restore point."""
        found = {"window": window_pages(self.window, self.page_size)} if self.window else {}
        return found | ({"state": 1} if self.has_state else {})


class Tiered:
    """An engine that can be killed.

    Args:
        publisher: of the KV events, if there are any.
    Attributes:
        engine, host, cache, storage_tier: as they are now.
        memory, storage: what survives them.
        drafter: of the draft tokens, if there are any.
        num_bad_loads: slots that did not hold what the decider thought, in gangs before this one.
    """

    def __init__(self, setup: Setup, *, publisher: Publisher | None = None) -> None:
        self.setup, self._publisher = setup, publisher
        self._random = Random(setup.seed)
        self.drafter = KnownTexts([], vocab=VOCAB)
        self.memory = TwinHost()
        sizes = setup.sizes(is_host=True)
        windows = {space: window for space, (window, _) in sizes.windows.items()}
        state_space = next(iter(sizes.states), "")
        self.storage = TwinStorage(
            self.memory,
            page_size=setup.page_size,
            windows=windows,
            state_space=state_space,
            most=setup.most_objects,
            trouble=setup.storage_trouble,
            random=self._random,
        )
        self._units = {FULL: sizes.num_pages} | {space: count for space, (_, count) in sizes.windows.items()}
        self._units |= sizes.states
        num_bytes = Catalog.num_bytes(sizes=self._units, page_size=setup.page_size, part_widths=setup.widths)
        self.catalog_memory = bytearray(num_bytes)
        self._num_bad_loads = 0
        self._build()

    @property
    def num_bad_loads(self) -> int:
        """Loads from slots that did not hold what the decider thought."""
        return self._num_bad_loads + self.mover.num_bad_loads

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 1, salt: str = "", name: str = "r") -> RequestOutput:
        """Run one request to its end, and all moves that it causes; its first increment, the tokens checked."""
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        tokens, _ = continuation(prompt, sampling, max_len=self.engine.info.max_model_len)
        self.drafter.texts.append([*prompt, *tokens])
        self.engine.add(GenerateRequest(name, prompt, sampling, cache_salt=salt, page_chain=self.chain(prompt, salt)))
        outputs = self.settle()
        assert [token for output in outputs for token in output.token_ids] == tokens
        return outputs[0]

    def chain(self, prompt: Sequence[int], salt: str) -> bytes:
        """Digests as they come with the request of a front end."""
        return page_chain(Identity("twin", self.setup.page_size, salt=salt), packed(prompt))

    def root(self, salt: str) -> bytes:
        """Root digest of a salt."""
        return Identity("twin", self.setup.page_size, salt=salt).seed()

    def settle(self, *, most: int = 2000) -> list[RequestOutput]:
        """Step until nothing is left to do."""
        outputs: list[RequestOutput] = []
        for _ in range(most):
            if not self.engine.has_work:
                return outputs
            outputs += self.engine.step()
            self.engine.check()
        raise AssertionError(f"never ends: {self.engine.stats()}")

    def counts(self) -> dict[str, float]:
        """Figures of the host tier."""
        return self.cache.tiers()["host"]

    def forget(self, *tiers: str) -> None:
        """Clear tiers that nobody uses."""
        if "device" in tiers:
            self.cache.clear()
        if "host" in tiers:
            self.host.clear()
        if "storage" in tiers:
            self.storage.forget()
            self.storage_tier.blocks.want()

    def start_engine(self) -> None:
        """The engine and its gang are gone; another one finds what they left."""
        self._end_gang()
        self.lanes.cancel_all()
        self._build()

    def start_gang(self) -> None:
        """The gang is gone; the engine goes on with another."""
        self._end_gang()
        self.executor = self._gang()
        self.engine.restart(self.executor)

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self.mover.trouble = Trouble(most_late=self.setup.trouble.most_late)
        self.storage.trouble = StorageTrouble(most_ticks=self.setup.storage_trouble.most_ticks)
        self.setup = replace(self.setup, trouble=self.mover.trouble, storage_trouble=self.storage.trouble)

    def catalog(self) -> Catalog:
        """Another view of the catalog."""
        return Catalog(
            memoryview(self.catalog_memory),
            sizes=self._units,
            page_size=self.setup.page_size,
            part_widths=self.setup.widths,
        )

    def _end_gang(self) -> None:
        self._num_bad_loads += self.mover.num_bad_loads
        self.mover.die()

    def _gang(self) -> TwinExecutor:
        self.mover = TwinMover(self.memory, trouble=self.setup.trouble, random=self._random)
        depth = 2 if self.setup.plans_ahead else self.setup.stages
        return TwinExecutor(self.setup.sizes(is_host=False), depth=depth, mover=self.mover, drafter=self.drafter)

    def _build(self) -> None:
        setup, identity = self.setup, Identity("twin", self.setup.page_size)
        events: KvEvents | NoKvEvents = NoKvEvents()
        if self._publisher is not None:
            events = KvEvents(self._publisher, plain_root=identity.seed())
        host_sizes = setup.sizes(is_host=True)
        self.host = HostTier(
            host_sizes,
            catalog=self.catalog(),
            policy=setup.policy,
            eviction=setup.eviction,
            listener=events.tier(Medium.CPU, host_sizes),
        )
        self.host.recover(self.memory.hold)
        costs = Costs()
        self.lanes = TwinLanes(self.storage, random=self._random)
        self.storage_tier = StorageTier(
            self.host,
            cast(StorageLanes, self.lanes),
            waiting=setup.waiting,
            timeout_s=setup.prefetch_timeout_s,
            share=setup.prefetch_share,
            costs=costs,
            events=events.storage(setup.page_size),
        )
        self.storage_tier.is_attached = setup.has_storage
        self.cache = SequenceCache(
            setup.sizes(is_host=False),
            is_kept=True,
            eviction=setup.eviction,
            host=self.host,
            storage=self.storage_tier,
            costs=costs,
            events=events,
        )
        self.executor = self._gang()
        self.engine = Engine(
            self.executor,
            info=EngineInfo(
                model="twin",
                model_dir="",
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                max_model_len=min(setup.max_model_len, setup.device_pages * setup.page_size),
                page_size=setup.page_size,
                num_pages=setup.device_pages,
                max_queue=setup.max_queue,
            ),
            scheduler=Scheduler(
                cache=self.cache,
                budget=StepBudget(setup.max_step_tokens),
                max_running=setup.max_running,
                micro_batches=setup.stages,
                eos_token_ids=(EOS,),
                restore_interval=setup.interval,
                drafts=Drafts(
                    self.drafter if setup.most_drafts and not setup.are_from_ranks else None,
                    most=setup.most_drafts,
                    are_from_ranks=setup.are_from_ranks,
                    is_adaptive=False,
                ),
            ),
            identity=identity,
            timeout_s=5.0,
        )
