"""Prefill of a long prompt under cp against one GPU, and what rank 0 does meanwhile.

    python -m benchmarks.cp_prefill                                    65,536 tokens of Qwen3-8B's shape, cp=2
    python -m benchmarks.cp_prefill --layers 8 --tokens 131072 --cp 4
    python -m benchmarks.cp_prefill --device cpu --tiny --tokens 512 --chunk 128

Random weights, a process per rank, no decider: ranks get the plans of all chunks at once. One GPU and cp ranks run in
turns; GPU 0 holds a rank of both. Time is that of the slowest rank, from the launch of the first chunk to the token of
the last one. Of the ratios of neighbouring turns the median counts. On CUDA, one more prompt runs under torch.profiler:
the time of rank 0 by kinds of kernels, that of NCCL also while nothing else ran.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import write_json
from benchmarks.model_shape import ModelShape
from raycache.config import Config
from raycache.deployment.deployment import Deployment, deploy
from raycache.gang.processes import RankProcess, meet_here
from raycache.memory.component import FULL
from raycache.memory.device import DevicePool
from raycache.parallel.context import ParallelContext
from raycache.rank.backend import choose_backend
from raycache.rank.loading import load_weights
from raycache.rank.member import Invitation
from raycache.rank.rank import Rank
from raycache.types import SamplingParams
from raycache.wire.plan import Admit, Row, StepPlan

PAGE_SIZE = 64
KINDS = {
    "NCCL": ("nccl",),
    "attention": ("prefillwith", "decodewith", "mla", "fmha", "flash_fwd"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk"),
}
"""Kind of kernel -> parts of its names; the first kind that fits counts."""

Span = tuple[float, float]


class Gang:
    """Rank processes that prefill the same prompt again and again."""

    def __init__(self, config: Config, *, device: str, tokens: int, chunk: int) -> None:
        self._meeting, invitations = meet_here(config, device_type=device)
        self._ranks = [RankProcess(_serve, invitation) for invitation in invitations]
        self._tell(device)
        vocab: int = self._answers()[0]
        self._meeting.board.unlink()
        self._plans = [plan.pack() for plan in _plans(tokens, chunk, vocab=vocab)]

    def run(self) -> float:
        """Seconds to the first token."""
        self._tell((self._plans, False))
        answers: list[float] = self._answers()
        return max(answers)

    def trace(self) -> dict[str, float]:
        """Milliseconds of rank 0 by kind, of one prompt."""
        self._tell((self._plans, True))
        found: dict[str, float] = self._answers()[0]
        return found

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()

    def _tell(self, value: Any) -> None:
        for rank in self._ranks:
            rank.send(value)

    def _answers(self) -> list[Any]:
        return [rank.receive() for rank in self._ranks]


def _plans(tokens: int, chunk: int, *, vocab: int) -> list[StepPlan]:
    """A prompt in chunks; the last one samples."""
    ids = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    pages = {FULL: list(range(-(-tokens // PAGE_SIZE)))}
    plans: list[StepPlan] = []
    for first in range(0, tokens, chunk):
        end = min(first + chunk, tokens)
        row = Row(0, first, ids[first:end].tobytes(), output_position=0 if end == tokens else -1)
        admits = () if first else (Admit(0, pages, SamplingParams(temperature=0), seed=0),)
        plans.append(StepPlan(1 + len(plans), [row], admits))
    return plans


def _serve(connection: Connection, invitation: Invitation) -> None:
    """Load the model, then prefill what comes until the connection closes."""
    device_type = connection.recv()
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    spec, config = invitation.spec, invitation.config
    device = torch.device(spec.device)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if config.world_size == 1:
        ctx = ParallelContext.single(device)
    else:
        ctx = ParallelContext.join(
            config.split,
            rank=spec.rank,
            host=spec.host,
            device=device,
            handles=handles,
            epoch=invitation.epoch,
            has_peer_memory=config.peer_memory,
        )
    deployment = deploy(config, device_type=device_type)
    rank = _rank(deployment, ctx)
    connection.send(deployment.model.vocab_size)
    while True:
        try:
            packed, is_traced = connection.recv()
        except (EOFError, ConnectionError):
            return
        plans = [StepPlan.unpack(one) for one in packed]
        connection.send(_traced(rank, plans) if is_traced else _timed(rank, plans))


def _rank(deployment: Deployment, ctx: ParallelContext) -> Rank:
    model, _ = load_weights(deployment, ctx, num_threads=1, on_progress=lambda done, total: None)
    assert isinstance(deployment.config.num_pages, int)
    pool = DevicePool(
        deployment.components,
        num_layers=deployment.model.num_layers,
        sizes=deployment.pool_sizes(deployment.config.num_pages),
        page_size=PAGE_SIZE,
        ctx=ctx,
    )
    return Rank(ctx, deployment.model, model, pool, choose_backend(deployment, ctx.device), deployment.dtype)


def _timed(rank: Rank, plans: Sequence[StepPlan]) -> float:
    begin_s = time.perf_counter()
    pending = [rank.finish(plan, rank.launch(plan)) for plan in plans]
    for one in pending:
        one.wait()
    return time.perf_counter() - begin_s


def _traced(rank: Rank, plans: Sequence[StepPlan]) -> dict[str, float]:
    """Milliseconds by kind; empty where there is no GPU."""
    if rank.ctx.device.type != "cuda":
        _timed(rank, plans)
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        wall_s = _timed(rank, plans)
        torch.cuda.synchronize()
    spans: dict[str, list[Span]] = {}
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            spans.setdefault(kind_of(event.name), []).append((event.time_range.start, event.time_range.end))
    return shares(spans, wall_ms=1e3 * wall_s)


def kind_of(kernel: str) -> str:
    """Kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other kernels")


def shares(spans: Mapping[str, Sequence[Span]], *, wall_ms: float) -> dict[str, float]:
    """Milliseconds of each kind, of NCCL while nothing else ran, and of the GPU while nothing ran.

    Args:
        spans: begin and end of each kernel, in microseconds.
    """
    found = {kind: sum(end - begin for begin, end in some) / 1e3 for kind, some in spans.items()}
    computing = covered([span for kind, some in spans.items() if kind != "NCCL" for span in some]) / 1e3
    busy = covered([span for some in spans.values() for span in some]) / 1e3
    return {**dict(sorted(found.items())), "NCCL alone": busy - computing, "idle": wall_ms - busy, "wall": wall_ms}


def covered(spans: Sequence[Span]) -> float:
    """Length of the union of spans."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def measure(model_dir: Path, *, device: str, cp: int, tokens: int, chunk: int, rounds: int) -> dict[str, Any]:
    """Median seconds of one rank and of cp ranks, their ratio, and the trace of rank 0."""
    num_pages = -(-tokens // PAGE_SIZE)
    settings: dict[str, Any] = {"model": str(model_dir), "dummy_weights": True, "page_size": PAGE_SIZE}
    settings |= {"num_pages": num_pages, "max_step_tokens": chunk}
    alone = Gang(Config(**settings), device=device, tokens=tokens, chunk=chunk)
    together = Gang(Config(cp=cp, **settings), device=device, tokens=tokens, chunk=chunk)
    turns: list[tuple[float, float]] = []
    try:
        for number in range(-1, rounds):
            turn = alone.run(), together.run()
            if number >= 0:  # the first one compiles kernels and connects ranks
                turns.append(turn)
        traces = {"one rank": alone.trace(), f"cp={cp}": together.trace()}
    finally:
        alone.close()
        together.close()
    return {
        "one rank ms": 1e3 * statistics.median(one for one, _ in turns),
        f"cp={cp} ms": 1e3 * statistics.median(split for _, split in turns),
        "times as fast": statistics.median(one / split for one, split in turns),
        "rank 0, ms": traces,
    }


def main() -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", help="of benchmarks/shapes, without windows or states")
    parser.add_argument("--layers", type=int, default=0, help="first ones that are kept; 0 for all")
    parser.add_argument("--tiny", action="store_true", help="shrink the shape to what runs anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.make(
            chosen.shape,
            Path(folder),
            layers=chosen.layers,
            is_tiny=chosen.tiny,
            dtype=dtype,
            device_type=chosen.device,
        )
        sizes = {"tokens": chosen.tokens, "chunk": chosen.chunk, "rounds": chosen.rounds}
        found = measure(shape.model_dir, device=chosen.device, cp=chosen.cp, **sizes)
    print(f"{chosen.shape}, {shape.model.num_layers} layers, {chosen.tokens} tokens in chunks of {chosen.chunk}")
    for name, value in found.items():
        if isinstance(value, float):
            print(f"    {name:24}{value:10.2f}")
    for name, trace in found["rank 0, ms"].items():
        if trace:
            print(f"rank 0 of {name}, ms")
            print("\n".join(f"    {kind:24}{value:10.2f}" for kind, value in trace.items()))
    if chosen.json:
        write_json(chosen.json, found)


if __name__ == "__main__":
    main()
