"""What the decider costs per step: schedule, pack, broadcast, collect and complete, without a model.

The decider is the real one, and so are the wire and the rank processes; but a rank answers every plan at once, with
token 0. All requests are in decode.

Then the same with ranks whose device takes some time for each plan, once with every step planned when the one before is
back and once planned ahead: how long the device has nothing to do between two steps.

    python -m benchmarks.decider --cp 8 --batch 64
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.figures import percentile, write_json
from raycache.cache.keys import Identity
from raycache.cache.sequences import SequenceCache
from raycache.cache.spaces import SpaceSizes
from raycache.config import Config
from raycache.decider.batch import Batch
from raycache.decider.budget import StepBudget
from raycache.decider.drafts import Drafts
from raycache.decider.engine import Engine
from raycache.decider.scheduler import Scheduler
from raycache.gang.executors import GangExecutor
from raycache.gang.processes import ProcessRanks, meet_here
from raycache.parallel.board import AckBoard, Acks, Lane
from raycache.parallel.collectives import Group
from raycache.parallel.context import build_group
from raycache.parallel.sharding import Split
from raycache.rank.member import Invitation
from raycache.types import EngineInfo, GenerateRequest, RequestOutput, SamplingParams
from raycache.wire.control import receive_plan, result_ranks, send_result
from raycache.wire.plan import Masks, StepPlan
from raycache.wire.results import RowResult, read_results, result_lens, result_width

_HOST = "127.0.0.1"
_PAGE_SIZE = 64
_VOCAB_SIZE = 1000
_WARM_STEPS = 50


def main() -> None:
    options = _options()
    split = _split(options)
    print(f"decider, {split.world_size} ranks (tp={split.tp} pp={split.pp} cp={split.cp}), batch of {options.batch}")
    alone = measure_alone(options)
    report("in this process, without ranks", alone)
    wired = measure_gang(options)
    report("with rank processes", wired)
    gaps = measure_gaps(options) if split.pp == 1 else {}
    if options.json:
        figures = {"split": vars(split), "batch": options.batch, "alone": alone, "ranks": wired, "gaps": gaps}
        write_json(options.json, figures)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decider", description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="requests in decode (default: %(default)s)")
    parser.add_argument("--prompt-len", type=int, default=500, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps to time (default: %(default)s)")
    parser.add_argument(
        "--device-ms", type=float, default=10.0, help="of a step that takes time (default: %(default)s)"
    )
    parser.add_argument("--profile", action="store_true", help="print the functions that take the most time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args()


def _split(options: argparse.Namespace) -> Split:
    return Split(tp=options.tp, pp=options.pp, cp=options.cp)


class Spent:
    """Seconds per part of the step under way. Part "gap" is the time in which the ranks have no plan."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._num_in_flight = 0
        self._idle_since_s = time.perf_counter()

    def submitted(self) -> None:
        if not self._num_in_flight:
            self.parts["gap"] += time.perf_counter() - self._idle_since_s
        self._num_in_flight += 1

    def collected(self) -> None:
        self._num_in_flight -= 1
        self._idle_since_s = time.perf_counter()

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - start_s

    def take(self) -> dict[str, float]:
        parts, self.parts = dict(self.parts), defaultdict(float)
        return parts


class TimedScheduler(Scheduler):
    """The scheduler, with its time told."""

    def __init__(self, spent: Spent, **settings: Any) -> None:
        super().__init__(**settings)
        self._spent = spent

    def schedule(self, now_s: float) -> tuple[list[RequestOutput], Batch | None]:
        with self._spent.on("schedule"):
            return super().schedule(now_s)

    def complete(self, batch: Batch, results: Sequence[RowResult], acks: Acks) -> list[RequestOutput]:
        with self._spent.on("complete"):
            return super().complete(batch, results, acks)


class TimedGroup(Group):
    """The decider's end of a control group, with its time told."""

    def __init__(self, group: Group, spent: Spent) -> None:
        super().__init__(rank=group.rank, size=group.size)
        self._group = group
        self._spent = spent

    def ibroadcast(self, tensor: Tensor, *, root: int) -> Callable[[], None]:
        with self._spent.on("broadcast"):
            return self._group.ibroadcast(tensor, root=root)

    def irecv(self, tensor: Tensor, *, source: int) -> Callable[[], None]:
        with self._spent.on("wait for ranks"):
            received = self._group.irecv(tensor, source=source)

        def wait() -> None:
            with self._spent.on("wait for ranks"):
                received()

        return wait


class TimedExecutor(GangExecutor):
    """The executor of a gang, with its time told."""

    def __init__(self, control: Group, spent: Spent, *, split: Split, board: AckBoard, plans_ahead: bool) -> None:
        super().__init__(TimedGroup(control, spent), split=split, board=board, timeout_s=60.0, plans_ahead=plans_ahead)
        self._spent = spent

    def submit(self, plan: StepPlan) -> None:
        with self._spent.on("submit"):
            super().submit(plan)
        self._spent.submitted()

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        with self._spent.on("collect"):
            results = super().collect(plan)
        self._spent.collected()
        return results


class EchoExecutor:
    """Packs plans and reads answers like the executor of a gang, and sends nothing.

    Args:
        split: of the gang.
        spent: to tell the time to.
        device_s: what its device takes for a plan.
        plans_ahead: whether plans are sent while it works on another.
    """

    def __init__(self, split: Split, spent: Spent, *, device_s: float = 0.0, plans_ahead: bool = False) -> None:
        self._spent = spent
        self._cp_size = split.cp
        self._device_s = device_s
        self._ends: deque[float] = deque([0.0])
        self.depth = 2 if plans_ahead else split.pp

    def submit(self, plan: StepPlan) -> None:
        with self._spent.on("submit"):
            plan.pack()
        self._spent.submitted()
        self._ends.append(max(self._ends[-1], time.perf_counter()) + self._device_s)

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        raise AssertionError("no request has a grammar")

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        self._ends.popleft()
        if self._device_s:
            time.sleep(max(0.0, self._ends[0] - time.perf_counter()))
        self._spent.collected()
        answers = null_answers(plan, cp_size=self._cp_size)
        with self._spent.on("collect"):
            return read_results(plan, answers)

    def acks(self) -> Acks:
        return Acks()

    def close(self) -> None:
        pass


def null_answers(plan: StepPlan, *, cp_size: int) -> list[NDArray[np.int64]]:
    """What cp ranks without a model answer: token 0 everywhere."""
    return [_zeros(count, result_width(plan)) for count in result_lens(plan, cp_size=cp_size)]


@cache
def _zeros(count: int, width: int) -> NDArray[np.int64]:
    return np.zeros((count, width), np.int64)


@contextmanager
def null_gang(split: Split, *, device_s: float) -> Iterator[tuple[Group, AckBoard]]:
    """Rank processes without a model, which take so long for a plan; the decider's end of their control group, and
    their board."""
    config = Config(model="none", tp=split.tp, pp=split.pp, cp=split.cp, page_size=_PAGE_SIZE)
    meeting, invitations = meet_here(config, device_type="cpu")
    ranks = ProcessRanks(partial(_run_null_rank, device_s=device_s), invitations)
    try:
        executor, _ = meeting.join(lambda: ranks.receive(60.0))
        yield executor.control, meeting.board
    finally:
        meeting.board.unlink()
        ranks.join(5.0)
        ranks.end()


def _run_null_rank(connection: Connection, invitation: Invitation, *, device_s: float) -> None:
    config, spec = invitation.config, invitation.spec
    split = config.split
    torch.set_num_threads(1)
    board = AckBoard(invitation.board, num_ranks=split.world_size)
    control = build_group(
        invitation.handles["control"], member=spec.rank, epoch=1, host=_HOST, device=torch.device("cpu")
    )
    connection.send("joined")
    answers = spec.rank in result_ranks(split)
    cp_rank = split.coords(spec.rank).cp
    is_last = False
    while not is_last:
        plan = receive_plan(control)
        is_last = plan.is_last
        if device_s:
            time.sleep(device_s)
        if answers and not is_last:
            send_result(plan, null_answers(plan, cp_size=split.cp)[cp_rank], control)
        board.post(spec.rank, Lane.STEP, plan.step)


def measure_alone(options: argparse.Namespace, *, device_s: float = 0.0, plans_ahead: bool = False) -> dict[str, Any]:
    """As `measure`, in this process."""
    spent = Spent()
    executor = EchoExecutor(_split(options), spent, device_s=device_s, plans_ahead=plans_ahead)
    return measure(executor, spent, options=options)


def measure_gang(options: argparse.Namespace, *, device_s: float = 0.0, plans_ahead: bool = False) -> dict[str, Any]:
    """As `measure`, with rank processes."""
    split, spent = _split(options), Spent()
    with null_gang(split, device_s=device_s) as (control, board):
        executor = TimedExecutor(control, spent, split=split, board=board, plans_ahead=plans_ahead)
        return measure(executor, spent, options=options)


def measure_gaps(options: argparse.Namespace) -> dict[str, Any]:
    """Steps that take some time on the device, planned one by one and ahead; prints and returns their figures."""
    found: dict[str, Any] = {}
    print(f"\nsteps of {options.device_ms:g} ms on the device, and how long it has no plan between two of them:")
    for place, measure_there in (("alone", measure_alone), ("ranks", measure_gang)):
        for name, plans_ahead in (("one by one", False), ("ahead", True)):
            figures = measure_there(options, device_s=options.device_ms / 1e3, plans_ahead=plans_ahead)
            found[f"{place}, {name}"] = {"gap_ms": figures["gap"], "step_ms": figures["mean"]}
            print(f"  {place}, {name:11} {figures['gap']:7.3f} ms   ({figures['mean']:.3f} ms per step)")
    return found


def measure(executor: Any, spent: Spent, *, options: argparse.Namespace) -> dict[str, Any]:
    """Time steps with all requests in decode.

    Returns:
        Milliseconds: "p50", "p99" and "mean" of a step, "parts" with the mean of each part, "gap" between two steps.
    """
    engine = _engine(executor, spent, options=options)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    for i in range(options.batch):
        prompt = [(i * 7919 + j) % _VOCAB_SIZE for j in range(options.prompt_len)]
        engine.add(GenerateRequest(f"r{i}", prompt, sampling))
    while engine.stats().output_tokens < options.batch * 2:
        engine.step()
    for _ in range(_WARM_STEPS):
        engine.step()
    spent.take()
    profile = cProfile.Profile()
    seconds, parts = [], []
    gc.collect()
    for _ in range(options.steps):
        start_s = time.perf_counter()
        if options.profile:
            profile.runcall(engine.step)
        else:
            engine.step()
        seconds.append(time.perf_counter() - start_s)
        parts.append(spent.take())
    engine.check()
    engine.close()
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(10)
    return _figures(seconds, parts)


def _engine(executor: Any, spent: Spent, *, options: argparse.Namespace) -> Engine:
    longest = options.prompt_len + options.steps + _WARM_STEPS + 100
    num_pages = options.batch * (longest // _PAGE_SIZE + 2)
    info = EngineInfo(
        model="none",
        model_dir="",
        vocab_size=_VOCAB_SIZE,
        eos_token_ids=(),
        max_model_len=longest,
        page_size=_PAGE_SIZE,
        num_pages=num_pages,
        max_queue=options.batch,
    )
    scheduler = TimedScheduler(
        spent,
        cache=SequenceCache(SpaceSizes(num_pages=num_pages, page_size=_PAGE_SIZE), is_kept=True),
        budget=StepBudget(8192),
        max_running=options.batch,
        micro_batches=options.pp,
        eos_token_ids=(),
        restore_interval=0,
        drafts=Drafts(),
    )
    identity = Identity("none", _PAGE_SIZE)
    return Engine(executor, info=info, scheduler=scheduler, identity=identity, timeout_s=60.0)


def _figures(seconds: list[float], parts: list[dict[str, float]]) -> dict[str, Any]:
    def mean_ms(part: str) -> float:
        return 1e3 * sum(each.get(part, 0.0) for each in parts) / len(parts)

    mean = {part: mean_ms(part) for part in ("schedule", "broadcast", "wait for ranks", "complete")}
    # What is sent and waited for lies within submit and collect.
    mean["pack"] = mean_ms("submit") - mean["broadcast"]
    mean["read answers"] = mean_ms("collect") - mean["wait for ranks"]
    mean["rest"] = 1e3 * sum(seconds) / len(seconds) - sum(mean.values())
    order = ("schedule", "pack", "broadcast", "wait for ranks", "read answers", "complete", "rest")
    return {
        "p50": 1e3 * percentile(seconds, 50),
        "p99": 1e3 * percentile(seconds, 99),
        "mean": 1e3 * sum(seconds) / len(seconds),
        "gap": mean_ms("gap"),
        "parts": {part: mean[part] for part in order},
    }


def report(title: str, figures: dict[str, Any]) -> None:
    print(f"\n{title}: p50 {figures['p50']:.3f} ms, p99 {figures['p99']:.3f} ms per step")
    total = sum(figures["parts"].values())
    for part, mean in figures["parts"].items():
        print(f"  {part:18} {mean:7.3f} ms  {100 * mean / total:5.1f} %")


if __name__ == "__main__":
    main()
