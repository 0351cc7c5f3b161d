"""Decode steps under cp: weights split over cp, against every rank reading all of them, and against one rank.

    python -m benchmarks.cp_decode
    python -m benchmarks.cp_decode --cp 4 --batch 1,4,16 --context 2048 --json out.json

A dense model of 310 M random weights in float32, on the CPU with a thread per rank: reading weights takes most of a
step. The ways run in turns, so that others who use the machine slow all of them. Of each turn the fastest step counts,
and of the ratios of neighbouring turns the median. Wall time is that of the slowest rank. CPU time is that of the rank
that computes most: it has neither the waiting of ranks for each other nor that for a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import write_json
from raycache.attention.torch_ref import TorchBackend
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.gang.processes import RankProcess, meet_here
from raycache.layers.cp_split import CpSplit
from raycache.memory.component import FULL
from raycache.memory.device import DevicePool
from raycache.parallel.context import ParallelContext
from raycache.rank.loading import load_weights
from raycache.rank.member import Invitation
from raycache.rank.rank import Rank
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan

SHAPE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
PAGE_SIZE = 64


@dataclass(frozen=True)
class Spent:
    """Seconds of the fastest of some steps.

    Attributes:
        wall_s: of the slowest rank.
        cpu_s: of the rank that computes most.
    """

    wall_s: float
    cpu_s: float

    def over(self, other: Spent) -> tuple[float, float]:
        """Ratios of wall and CPU time."""
        return self.wall_s / other.wall_s, self.cpu_s / other.cpu_s


class Gang:
    """Rank processes that run decode steps.

    Args:
        config: of the model; its cp is the number of ranks.
        batch: rows of a step.
        context: tokens of each row.
    """

    def __init__(self, config: Config, *, batch: int, context: int) -> None:
        self._meeting, invitations = meet_here(config, device_type="cpu")
        self._ranks = [RankProcess(_serve, invitation) for invitation in invitations]
        pages = -(-context // PAGE_SIZE)
        rows, admits = [], []
        for slot in range(batch):
            ids = {FULL: list(range(slot * pages, (slot + 1) * pages))}
            admits.append(Admit(slot, ids, SamplingParams(temperature=0), seed=0))
            rows.append(Row(slot, context - 1, np.int32(slot).tobytes(), output_position=0))
        self._plan = StepPlan(1, rows)
        for rank in self._ranks:
            rank.send(StepPlan(1, (), admits).pack())
        for rank in self._ranks:
            rank.receive()
        self._meeting.board.unlink()

    def run(self, steps: int, *, is_split: bool = False) -> Spent:
        """Run some steps."""
        for rank in self._ranks:
            rank.send((is_split, steps, self._plan.pack()))
        by_rank: list[list[tuple[float, float]]] = [rank.receive() for rank in self._ranks]
        wall, cpu = ([max(spent[kind] for spent in step) for step in zip(*by_rank, strict=True)] for kind in (0, 1))
        return Spent(min(wall), min(cpu))

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()


def _serve(connection: Connection, invitation: Invitation) -> None:
    """Load the model, then run what is asked for until the connection closes."""
    torch.set_num_threads(1)
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    spec, config = invitation.spec, invitation.config
    ctx = ParallelContext.join(
        config.split, rank=spec.rank, host=spec.host, device=torch.device("cpu"), handles=handles, epoch=1
    )
    ways = _ranks(deploy(config, device_type="cpu"), ctx)
    admits = StepPlan.unpack(connection.recv())
    for rank in ways.values():
        rank.execute(admits)
    connection.send(None)
    while True:
        try:
            is_split, steps, packed = connection.recv()
        except (EOFError, ConnectionError):
            return
        plan, rank = StepPlan.unpack(packed), ways[is_split]
        spent = []
        for _ in range(steps):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            rank.execute(plan)
            spent.append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
        connection.send(spent)


def _ranks(deployment: Deployment, ctx: ParallelContext) -> Mapping[bool, Rank]:
    """Whether weights are split over cp -> a rank; both have the same weights and pages."""
    model, _ = load_weights(deployment, ctx, num_threads=1, on_progress=lambda done, total: None)
    assert isinstance(deployment.config.num_pages, int)
    pool = DevicePool(
        deployment.components,
        num_layers=deployment.model.num_layers,
        sizes=deployment.pool_sizes(deployment.config.num_pages),
        page_size=PAGE_SIZE,
        ctx=ctx,
    )
    for part in deployment.components:
        for rows in pool.rows(part.name).values():
            rows.zero_()

    def rank(*, is_split: bool) -> Rank:
        decode_model = model.over_cp(CpSplit.of(ctx)) if is_split else None
        return Rank(ctx, deployment.model, model, pool, TorchBackend(), deployment.dtype, decode_model=decode_model)

    return {is_split: rank(is_split=is_split) for is_split in ((False, True) if ctx.cp.size > 1 else (False,))}


def measure(folder: Path, *, cp: int, batch: int, context: int, rounds: int, steps: int) -> Mapping[str, float]:
    """Medians over the rounds: milliseconds of a step on one rank, and ratios of wall and CPU time."""
    num_pages = batch * -(-context // PAGE_SIZE)
    settings = {"model": str(folder), "dummy_weights": True, "page_size": PAGE_SIZE, "num_pages": num_pages}
    alone = Gang(Config(**settings), batch=batch, context=context)
    together = Gang(Config(cp=cp, **settings), batch=batch, context=context)
    found: dict[str, list[float]] = {}

    def note(name: str, ratios: Sequence[float]) -> None:
        for kind, ratio in zip(("wall", "cpu"), ratios, strict=True):
            found.setdefault(f"{name} {kind}", []).append(ratio)

    try:
        for number in range(-1, rounds):
            one = alone.run(steps)
            whole = together.run(steps)
            split = together.run(steps, is_split=True)
            if number < 0:  # the first round warms up
                continue
            found.setdefault("one rank ms", []).append(1e3 * one.wall_s)
            note("split / whole", split.over(whole))
            note("split / one rank", split.over(one))
            note("whole / one rank", whole.over(one))
    finally:
        alone.close()
        together.close()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--batch", default="1,8", help="rows of a step, such as 1,8")
    parser.add_argument("--context", type=int, default=512, help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of each way in a round")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    figures: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for batch in map(int, chosen.batch.split(",")):
            sizes = {"batch": batch, "context": chosen.context, "rounds": chosen.rounds, "steps": chosen.steps}
            figures[f"batch {batch}"] = found = measure(Path(folder), cp=chosen.cp, **sizes)
            print(f"cp={chosen.cp} batch={batch} context={chosen.context}")
            for name, value in found.items():
                print(f"    {name:24}{value:8.2f}", flush=True)
    if chosen.json:
        write_json(chosen.json, figures)


if __name__ == "__main__":
    main()
