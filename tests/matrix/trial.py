"""One engine with its scheduler and cache on a gang of ranks, all of them real; only the sampling is forced.

Every new position of every plan is emitted. Its logits are compared with the float64 ones of its dialogue, and the
dialogue's next token is answered, so that one wrong logit does not change what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycache.cache.sequences import Holding, SequenceCache
from raycache.config import Config
from raycache.engine.build import build_engine
from raycache.engine.engine import Engine
from raycache.engine.plan import Admit, Row, RowResult, StepPlan, emissions
from raycache.engine.scheduler import Scheduler
from raycache.models.base import read_config
from raycache.parallel.board import Acks
from raycache.parallel.sharding import Coords, Split
from raycache.types import GenerateRequest, SamplingParams
from tests.matrix.gang import Gang
from tests.matrix.ranks import Load, Poison, Read, Rows, Run
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
        cut_by: see types.RequestOutput.
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
        self._owners: deque[list[str]] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Send the plan so that all of its positions are emitted."""
        assert self.scheduler is not None, "made with the engine"
        owners = {request.slot: request.request_id for request in self.scheduler._running}
        self._owners.append([owners[row.slot] for row in plan.rows])
        rows = {row.slot: row for row in plan.rows}
        for admit in plan.admits:
            asked = self._asked[owners[admit.slot]]
            asked.reused = max(asked.reused, rows[admit.slot].start)
            self.on_admit(owners[admit.slot], admit, rows[admit.slot])
        self._gang.ask(Run(_all_emitted(plan).pack()))

    def collect(self, plan: StepPlan) -> list[RowResult]:
        """Compare the logits of every row; the next token of its dialogue where one is sampled."""
        owners = self._owners.popleft()
        logits = _join(_all_emitted(plan), self._gang.answers(), self._gang.split)
        results = []
        for row, owner, found in zip(plan.rows, owners, logits, strict=True):
            asked, stop = self._asked[owner], row.start + row.num_tokens
            tokens = np.frombuffer(row.tokens, np.int32).tolist()
            assert tokens == asked.dialogue.ids[row.start : stop], "other tokens are computed than asked for"
            asked.compare(row.start, found)
            results.append(RowResult(token=asked.dialogue.ids[stop] if row.output_position >= 0 else None))
        return results

    def acks(self) -> Acks:
        """No pages move."""
        return Acks()

    def close(self) -> None:
        """Take the answers that are on their way."""
        self._gang.drain()


class Trial:
    """Asks and compares.

    Args:
        gang: with the model of `base` loaded, see `load`.
        corpus: the model and its dialogues.
        base: settings that the gang's pools were made with.
        settings: of the scheduler, which differ from those.
    """

    def __init__(self, gang: Gang, corpus: Corpus, base: Config, **settings: int) -> None:
        config = replace(base, **settings)  # type: ignore[arg-type]
        self.asked: list[Asked] = []
        self.problems: list[str] = []
        self.corpus = corpus
        self.gang = gang
        self._by_id: dict[str, Asked] = {}
        self.executor = ForcedExecutor(gang, self._by_id)
        gang.tell(Poison())
        self.engine: Engine = build_engine(
            self.executor,
            config,
            model=read_config(Path(config.model)),
            device_type="cpu",
            num_pages=config.num_pages,
        )
        self.executor.scheduler = self.engine._scheduler

    @property
    def cache(self) -> SequenceCache:
        """Of the engine."""
        return self.engine._scheduler._cache

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
            asked.cached, asked.cut_by = output.cached_tokens, output.cut_by
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

    def hit(self, name: str, *, cached: int, cut_by: str = "") -> Asked:
        """Ask, and expect that so many tokens come from the cache; `cut_by` names what kept more from doing so."""
        (asked,) = self.ask(name)
        self.expect(asked.cached == cached, f"{name}: {asked.cached} tokens cached, expected {cached}")
        self.expect(asked.cut_by == cut_by, f"{name}: cut by {asked.cut_by!r}, expected {cut_by!r}")
        return asked

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
        holding = self.cache.begin(np.asarray(ids, np.int32).tobytes(), is_matched=True, now=1 << 20)
        read(holding)
        self.cache.end(holding)
        self.engine.check()

    def rows(self, holding: Holding) -> list[Rows]:
        """What every rank keeps of a prefix: pages from its begin on, states at its end."""
        units = {space: [page for page in ids if page >= 0] for space, ids in holding.tables().items()}
        self.gang.ask(Read({**units, "state": [holding.state] if holding.state >= 0 else []}))
        return self.gang.answers()


def load(gang: Gang, corpus: Corpus) -> Config:
    """Load a family into all ranks; the settings of their pools."""
    split = gang.split
    config = Config(
        model=str(corpus.model_dir),
        tp=split.tp,
        pp=split.pp,
        cp=split.cp,
        device="cpu",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        restore_points=24,
        restore_interval=0,
        max_running=6,
        max_step_tokens=512,
    )
    gang.ask(Load(config))
    gang.answers()
    return config


def _all_emitted(plan: StepPlan) -> StepPlan:
    return replace(plan, rows=[replace(row, targets=row.tokens, output_position=-1) for row in plan.rows], num_top=0)


def _join(plan: StepPlan, answers: Sequence[NDArray[np.float32] | None], split: Split) -> list[NDArray[np.float32]]:
    """Logits [T, V] per row, out of those that the ranks of the last stage emit."""
    found: list[dict[int, NDArray[np.float32]]] = [{} for _ in plan.rows]
    for cp, places in enumerate(emissions(plan, cp_size=split.cp)):
        same = [answers[split.rank(Coords(pp=split.pp - 1, cp=cp, tp=tp))] for tp in range(split.tp)]
        first = same[0]
        assert first is not None, "the last stage has logits"
        for other in same[1:]:
            assert other is not None and np.array_equal(first, other, equal_nan=True), "tp ranks differ"
        lines = iter(first)
        for i, positions in places:
            found[i].update({position: next(lines) for position in positions.tolist()})
    return [np.stack([lines[position] for position in range(len(lines))]) for lines in found]
