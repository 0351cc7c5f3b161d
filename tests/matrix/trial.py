"""One engine with its scheduler and cache on a gang of ranks, all of them real; only the sampling is forced.

Every new position of every plan is emitted. Its logits are compared with the float64 ones of its dialogue, and the
dialogue's next token is answered, so that one wrong logit does not change what comes after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycache.cache.costs import ENOUGH, Pace
from raycache.cache.holding import Holding, Use
from raycache.cache.sequences import SequenceCache
from raycache.config import Config
from raycache.decider.engine import Engine
from raycache.decider.scheduler import Scheduler
from raycache.deployment.deployment import Deployment
from raycache.deployment.stages import with_stages
from raycache.gang.build import build_engine
from raycache.host.link import HostLink
from raycache.models.base import read_config
from raycache.parallel.board import Acks
from raycache.parallel.sharding import Coords, Split
from raycache.types import GenerateRequest, SamplingParams
from raycache.wire.plan import Admit, Masks, Row, StepPlan
from raycache.wire.results import RowResult, emissions
from tests.matrix.gang import TIMEOUT_S, Gang, RankFailedError
from tests.matrix.ranks import Host, Load, Poison, Read, Rows, Run
from tests.matrix.sequences import ANSWER, Corpus, Dialogue

NUM_PAGES = 128
PAGE_SIZE = 8


@dataclass
class Asked:
    """A request and what came of it.

    Attributes:
        request_id: unique in a trial.
        dialogue: that it follows.
        end: tokens that are computed until it is answered.
        cached: tokens that were reused.
        by_tier, miss, cut_by: see types.RequestOutput.
        error: largest difference of a logit to float64; infinite if one is not finite.
        wrong_tokens: generated positions whose best token is another one.
        reused: most tokens that were in the cache when it began to run, or went on after it had to give way.
        computed: positions whose logits were seen.
        is_done: whether its last token came.
        is_cancelled: whether it was not to be answered.
    """

    request_id: str
    dialogue: Dialogue
    end: int
    cached: int = -1
    by_tier: Mapping[str, int] = field(default_factory=dict)
    miss: str = ""
    cut_by: str = ""
    error: float = 0.0
    wrong_tokens: int = 0
    reused: int = 0
    computed: set[int] = field(default_factory=set)
    is_done: bool = False
    is_cancelled: bool = False

    def compare(self, start: int, logits: NDArray[np.float32]) -> None:
        """Take in the logits [T, V] after the tokens from `start` on."""
        stop = start + len(logits)
        error = float(np.abs(logits - self.dialogue.logits[start:stop]).max())
        self.error = max(self.error, error if np.isfinite(error) else float("inf"))
        self.computed.update(range(start, stop))
        first = max(start, self.dialogue.prompt_len - 1)
        wanted = self.dialogue.ids[first + 1 : stop + 1]
        found = logits[first - start :].argmax(1)[: len(wanted)] if wanted else []
        self.wrong_tokens += int(np.count_nonzero(np.asarray(found) != wanted))


@dataclass
class Flight:
    """What is known of a plan that is on its way.

    Attributes:
        owners: ids of the requests of its rows.
        admitted: those that begin to run, and where.
        loading: those of them that wait for pages from the host.
    """

    owners: list[str]
    admitted: dict[str, int] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)


class ForcedExecutor:
    """Executes plans on a gang and answers with the tokens of the dialogues.

    Args:
        gang: with the model loaded.
        asked: by request id; grows while it runs.
    Attributes:
        depth: plans in flight.
        on_admit: called before a plan that admits a request is sent: (its id, its admission, its first row).
    """

    def __init__(self, gang: Gang, asked: dict[str, Asked]) -> None:
        self.depth = gang.split.pp
        self.on_admit: Callable[[str, Admit, Row], None] = lambda request_id, admit, row: None
        self.scheduler: Scheduler | None = None
        self._gang = gang
        self._asked = asked
        self._flying: deque[Flight] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Send the plan so that all of its positions are emitted."""
        assert self.scheduler is not None, "made with the engine"
        owners = {run.slot: run for run in self.scheduler.queues.running}
        flight = Flight([owners[row.slot].request.spec.request_id for row in plan.rows])
        rows = {row.slot: row for row in reversed(plan.rows)}  # the first of each
        for admit in plan.admits:
            run, row = owners[admit.slot], rows[admit.slot]
            request_id = run.request.spec.request_id
            flight.admitted[request_id] = row.start
            if run.holding.load is not None:
                flight.loading.add(request_id)
            self.on_admit(request_id, admit, row)
        self._flying.append(flight)
        self._gang.ask(Run(_all_emitted(plan).pack()))

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        raise AssertionError("no dialogue has a grammar")

    def collect(self, plan: StepPlan) -> list[RowResult]:
        """Compare the logits of every row; the next token of its dialogue where one is sampled.

        Rows of a load that failed are computed from anything: nobody may look at them, and they count as not computed.
        """
        flight, answers = self._flying.popleft(), self._gang.answers()
        lost = flight.loading if self._has_bad_load(plan) else set()
        logits = _join(_all_emitted(plan), answers, self._gang.split, is_alike=not lost) if plan.rows else []
        results = []
        for row, owner, found in zip(plan.rows, flight.owners, logits, strict=True):
            asked, stop = self._asked[owner], row.start + row.num_tokens
            tokens = np.frombuffer(row.tokens, np.int32).tolist()
            assert tokens == asked.dialogue.ids[row.start : stop], "other tokens are computed than asked for"
            if owner not in lost:
                asked.reused = max(asked.reused, flight.admitted.get(owner, 0))
                asked.compare(row.start, found)
            results.append(RowResult([asked.dialogue.ids[stop]] if row.output_position >= 0 else []))
        return results

    def acks(self) -> Acks:
        """How far all ranks are with page moves."""
        return self._gang.acks()

    def _has_bad_load(self, plan: StepPlan) -> bool:
        numbers, deadline = [moves.number for moves in plan.loads], time.monotonic() + TIMEOUT_S
        while numbers and self.acks().loads < numbers[-1]:
            if time.monotonic() > deadline:
                raise RankFailedError(f"loads {numbers} were not acknowledged")
            time.sleep(0.0001)
        return bool(numbers) and self.acks().bad_load >= numbers[0]

    def close(self) -> None:
        """Take the answers that are on their way."""
        self._gang.drain()


class FixedPace(Pace):
    """Not moved by measurements."""

    def note(self, seconds: float, num_tokens: int) -> None:
        """Do nothing."""


class Trial:
    """Asks and compares.

    Args:
        gang: with the model of `base` loaded, see `load`.
        corpus: the model and its dialogues.
        base: settings that the gang's pools were made with.
        host: the tier below the device, or None.
        settings: of the scheduler, which differ from those.
    """

    def __init__(
        self, gang: Gang, corpus: Corpus, base: Config, *, host: HostLink | None = None, **settings: int
    ) -> None:
        config = replace(base, **settings)  # type: ignore[arg-type]
        self.asked: list[Asked] = []
        self.problems: list[str] = []
        self.corpus = corpus
        self.gang = gang
        self._by_id: dict[str, Asked] = {}
        self.executor = ForcedExecutor(gang, self._by_id)
        gang.tell(Poison())
        gang.ask(Host(None if host is None else host.path))
        gang.answers()
        self.engine: Engine = build_engine(
            self.executor,
            Deployment(config, read_config(Path(config.model)), "cpu"),
            num_pages=config.num_pages,
            host=host,
        )
        self.executor.scheduler = self.engine._scheduler
        self.set_pace(compute_s=0.0)

    @property
    def cache(self) -> SequenceCache:
        """Of the engine."""
        return self.engine._scheduler.cache

    def add(self, name: str, *, length: int = 0, num_tokens: int = ANSWER, priority: int = 0) -> Asked:
        """Queue a dialogue's prompt, or the first `length` tokens of it."""
        dialogue = self.corpus.dialogues[name]
        prompt = dialogue.prompt[: length or dialogue.prompt_len]
        asked = Asked(f"{len(self.asked)} {name}", dialogue, end=len(prompt) + num_tokens - 1)
        self.asked.append(asked)
        self._by_id[asked.request_id] = asked
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.add(GenerateRequest(asked.request_id, prompt, sampling, priority=priority))
        return asked

    def cancel(self, asked: Asked) -> None:
        """End a request before its answer is complete."""
        asked.is_cancelled = True
        self.engine.cancel(asked.request_id)

    def step(self) -> None:
        """One step of the engine, after which every page must be where it belongs."""
        for output in self.engine.step():
            asked = self._by_id[output.request_id]
            asked.cached, asked.by_tier = output.cached_tokens, dict(output.cached_by_tier)
            asked.miss, asked.cut_by = str(output.miss), output.cut_by
            asked.is_done = output.finish_reason is not None
        self.engine.check()

    def ask(self, *names: str, num_tokens: int = ANSWER) -> list[Asked]:
        """Queue some prompts together, and run until all are answered."""
        asked = [self.add(name, num_tokens=num_tokens) for name in names]
        self.finish()
        return asked

    def finish(self) -> None:
        """Run until nothing is left to do."""
        while self.engine.has_requests:
            self.step()
        for asked in self.asked:
            if asked.is_cancelled:
                continue
            missing = set(range(asked.reused, asked.end)) - asked.computed
            self.expect(asked.is_done, f"{asked.request_id} was not answered")
            self.expect(not missing, f"{asked.request_id}: {sorted(missing)} were neither cached nor computed")

    def hit(
        self,
        name: str,
        *,
        cached: int = -1,
        cut_by: str = "",
        tiers: Mapping[str, int] | None = None,
        miss: str | None = None,
        length: int = 0,
    ) -> Asked:
        """Ask for a prompt, or the first tokens of it, and compare what came from the cache.

        Args:
            name: of the dialogue.
            cached: tokens from the cache; -1 for the sum of the tiers'.
            cut_by: what kept more from being reused.
            tiers: tokens from each; None if that does not matter.
            miss: why it was not more; None if that does not matter, as it is without tiers.
            length: of the prompt, 0 for all of it.
        """
        asked = self.add(name, length=length)
        self.finish()
        found = {"cached": asked.cached, "cut_by": asked.cut_by}
        wanted: dict[str, object] = {"cached": cached if tiers is None else sum(tiers.values()), "cut_by": cut_by}
        if tiers is not None:
            found["tiers"], wanted["tiers"] = str(asked.by_tier), str({k: v for k, v in tiers.items() if v})
            miss = miss or ""
        if miss is not None:
            found["miss"], wanted["miss"] = asked.miss, miss
        self.expect(found == wanted, f"{asked.request_id}: {found}, expected {wanted}")
        return asked

    def settle(self) -> None:
        """Run until all pages are where they go to."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.engine.has_work:
            self.step()
            if time.monotonic() > deadline:
                raise RankFailedError("pages move without end")
        self.finish()

    def evict_pages(self, count: int) -> None:
        """Evict pages from the device, `count` or all that nothing holds."""
        device = self.cache.device
        device.pages.free(device.evict_pages(count))

    def forget_device(self) -> None:
        """Let the device's tree forget all, and spoil all that its pools hold: tokens can come from below only."""
        self.settle()
        self.cache.clear()
        self.gang.tell(Poison())

    def set_pace(self, *, compute_s: float) -> None:
        """How long computing a token is taken to last: what is measured on a busy machine decides nothing here.

        Args:
            compute_s: seconds per token; 0 for so long that moving is always worth it.
        """
        self.engine._scheduler.cache.costs.compute = FixedPace(compute_s, num_measured=ENOUGH)

    def expect(self, is_so: bool, problem: str) -> None:
        """Note a problem, unless it is so."""
        if not is_so and problem not in self.problems:
            self.problems.append(problem)

    @property
    def error(self) -> float:
        """The largest of all requests."""
        return max((asked.error for asked in self.asked), default=0.0)

    @property
    def wrong_tokens(self) -> int:
        """Of all requests."""
        return sum(asked.wrong_tokens for asked in self.asked)

    def held(self, ids: Sequence[int], read: Callable[[Holding], None]) -> None:
        """Lock the longest cached prefix of some tokens while it is looked at."""
        use = Use(self.engine.root(""))
        holding = self.cache.begin(np.asarray(ids, np.int32).tobytes(), is_matched=True, now=1 << 20, use=use)
        read(holding)
        holding.end()
        self.engine.check()

    def rows(self, holding: Holding) -> list[Rows]:
        """What every rank keeps of a prefix: pages from its begin on, states at its end."""
        units = {space: [page for page in ids if page >= 0] for space, ids in holding.tables().items()}
        self.gang.ask(Read({**units, "state": [holding.units.state] if holding.units.state >= 0 else []}))
        return self.gang.answers()


def load(gang: Gang, corpus: Corpus) -> Config:
    """Load a family into all ranks; the settings of their pools. Stages are the split's, or chosen as in service."""
    split = gang.split
    config = Config(
        model=str(corpus.model_dir),
        tp=split.tp,
        pp=split.pp,
        pp_layers=",".join(map(str, split.stages)) or "auto",
        cp=split.cp,
        device="cpu",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        restore_points=24,
        restore_interval="none",
        max_running=6,
        max_step_tokens=512,
        decode_split="on",  # steps with a longer row are computed in the other way
    )
    config = with_stages(config, read_config(corpus.model_dir))
    gang.ask(Load(config))
    gang.answers()
    return config


def _all_emitted(plan: StepPlan) -> StepPlan:
    return replace(plan, rows=[replace(row, targets=row.tokens, output_position=-1) for row in plan.rows], num_top=0)


def _join(
    plan: StepPlan, answers: Sequence[NDArray[np.float32] | None], split: Split, *, is_alike: bool
) -> list[NDArray[np.float32]]:
    """Logits [T, V] per row, out of those that the ranks of the last stage emit; tp ranks have to agree if alike."""
    found: list[dict[int, NDArray[np.float32]]] = [{} for _ in plan.rows]
    for cp, places in enumerate(emissions(plan, cp_size=split.cp)):
        same = [answers[split.rank(Coords(pp=split.pp - 1, cp=cp, tp=tp))] for tp in range(split.tp)]
        first = same[0]
        assert first is not None, "the last stage has logits"
        for other in same[1:]:
            is_same = other is not None and np.array_equal(first, other, equal_nan=True)
            assert is_same or not is_alike, "tp ranks differ"
        lines = iter(first)
        for i, positions in places:
            found[i].update({position: next(lines) for position in positions})
    return [np.stack([lines[position] for position in range(len(lines))]) for lines in found]
