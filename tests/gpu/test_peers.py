"""Collectives through peer memory, on two GPUs and more: against float64 arithmetic, in CUDA graphs, without a peer."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from raycache.attention.merge import merge
from raycache.errors import RankLostError
from raycache.layers.embedding import VocabHead
from raycache.parallel.context import ParallelContext
from raycache.parallel.lost_peers import reporting_lost_peers
from raycache.parallel.peer_group import PeerGroup
from raycache.parallel.sharding import Split
from tests.gpu import peer_ranks
from tests.gpu.peer_ranks import num_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs"),
]

VOCABULARIES = (151_936, 129_281, 301)

Work = Callable[[PeerGroup, torch.device], Any]


def each_rank(work: Work, *, timeout_s: float = 60.0, sees_one: bool = False) -> list[Any]:
    """What a function of this module returns on every rank, see `peer_ranks`."""
    return peer_ranks.each_rank(partial(in_group, work), timeout_s=timeout_s, sees_one=sees_one, tp=num_ranks())


def in_group(work: Work, ctx: ParallelContext) -> Any:
    assert isinstance(ctx.tp, PeerGroup), "see the warnings in the log"
    return work(ctx.tp, ctx.device)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, device=device, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, device=device, generator=generator).to(dtype)


def collectives_of_random_sizes(group: PeerGroup, device: torch.device) -> list[str]:
    """Names of those that were wrong. Sizes and dtypes are mixed, as all share the same memory."""
    group.most_bytes = 1 << 22
    chosen, wrong = random.Random(5), []
    for seed in range(400):
        kind = chosen.choice(["sum", "gather", "columns", "exchange", "merge"])
        if kind == "merge":
            wrong += wrong_merge(group, chosen, device, seed=1000 * seed)
            continue
        floats = [torch.bfloat16, torch.float16, torch.float32]
        dtype = chosen.choice(floats if kind == "sum" else [*floats, torch.int64, torch.uint8])
        shape: tuple[int, ...] = (chosen.choice([1, 3, 64, 200]), chosen.choice([1, 7, 96, 4096]))
        if kind == "exchange":
            shape = (group.size, *shape)
        every = [drawn(shape, dtype, device, seed=1000 * seed + rank) for rank in range(group.size)]
        own = every[group.rank]
        if kind == "sum":
            wanted = torch.stack([each.double() for each in every]).sum(0)
            bound = {torch.float32: 1e-6}.get(dtype, 1e-2) * float(wanted.abs().max())
            found = group.all_reduce(own.clone())
            is_right = float((found.double() - wanted).abs().max()) <= bound
        elif kind == "gather":
            is_right = torch.equal(group.all_gather(own), torch.stack(every))
        elif kind == "columns":
            is_right = torch.equal(group.gather_columns(own), torch.cat(every, 1))
        else:
            is_right = torch.equal(group.all_to_all(own), torch.stack([each[group.rank] for each in every]))
        if not is_right:
            wrong.append(f"{kind} {dtype} {shape}")
    return wrong


def wrong_merge(group: PeerGroup, chosen: random.Random, device: torch.device, *, seed: int) -> list[str]:
    """The name of a merge of attention results, if it was wrong."""
    from raycache.attention import part_kernels

    tokens, heads = chosen.choice([1, 3, 64, 150]), group.size * chosen.choice([1, 6, 16])
    dim = chosen.choice([64, 80, 192, 512])
    dtype, is_log2 = chosen.choice([torch.bfloat16, torch.float16]), chosen.choice([True, False])
    outs = torch.stack([drawn((tokens, heads, dim), dtype, device, seed=seed + rank) for rank in range(group.size)])
    lses = 5 * drawn((group.size, tokens, heads), torch.float32, device, seed=seed)
    lses[0, 0] = -torch.inf  # no keys on this rank
    lses[:, -1, 0] = -torch.inf  # nor on any
    sinks = chosen.choice([None, drawn((heads,), dtype, device, seed=seed)])
    own = slice(group.rank * heads // group.size, (group.rank + 1) * heads // group.size)
    wanted = merge(outs.double(), lses.double(), None if sinks is None else sinks.double())[:, own].nan_to_num(0)
    given = lses[group.rank] / math.log(2) if is_log2 else lses[group.rank]
    own_sinks = None if sinks is None else sinks[own].contiguous()
    assert group.peer_memory((outs[0].nbytes + given.nbytes) // group.size) is not None
    found = part_kernels.scatter((outs[group.rank], given), own_sinks, cp=group, is_log2=is_log2)
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * float(wanted.abs().max())
    is_right = float((found.double() - wanted).abs().max()) <= bound
    return [] if is_right else [f"merge {dtype} {tuple(outs.shape)} {is_log2=} {sinks is None=}"]


def wrong_likeliest(group: PeerGroup, device: torch.device) -> list[str]:
    """Where the best of each part is not the first of the largest logits; many of them are equal."""
    wrong = []
    for vocab_size, rows, dtype in itertools.product(VOCABULARIES, (1, 3, 64, 256), (torch.bfloat16, torch.float32)):
        head, parts = parts_of_logits(group, device, vocab_size=vocab_size, rows=rows, dtype=dtype)
        every = parts.flatten(1)[:, :vocab_size].cpu()
        first = (every == every.amax(-1, keepdim=True)).int().argmax(-1)
        own = parts[:, group.rank].contiguous()
        wrong += [
            f"{name} {vocab_size=} {rows=} {dtype}"
            for name, found in (("best", head.likeliest(own)), ("all", head.gathered(own).argmax(-1)))
            if not torch.equal(found.cpu(), first)
        ]
    return wrong


def parts_of_logits(
    group: PeerGroup, device: torch.device, *, vocab_size: int, rows: int, dtype: torch.dtype
) -> tuple[VocabHead, Tensor]:
    """A head, and whole numbers as logits: [rows, members, part], with larger ones behind the vocabulary."""
    share = -(-vocab_size // group.size)
    logits = drawn((rows, group.size * share), dtype, device, seed=rows).mul(2).round().clamp(max=4)
    logits[:, vocab_size:] = 100
    return VocabHead(torch.empty(share, 0, device=device), vocab_size, group), logits.unflatten(1, (group.size, share))


def large_collectives(group: PeerGroup, device: torch.device) -> list[str]:
    """Names of collectives that were wrong: NCCL's own, recorded ones, and those of torch's process group, in turns."""
    assert group.nccl is not None
    group.most_bytes, chosen, wrong = 1 << 10, random.Random(7), []
    recorded = torch.zeros(700, 4096, device=device)
    group.all_gather(group.all_reduce(recorded.clone()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = group.all_gather(group.all_reduce(recorded.clone()))
    for seed in range(200):
        kind = chosen.choice(["sum", "gather", "replay", "exchange", "started", "broadcast"])
        dtype = torch.float32 if kind == "replay" else chosen.choice([torch.bfloat16, torch.float32, torch.int64])
        shape = (700, 4096) if kind == "replay" else (chosen.choice([group.size, 210, 2100]), 4096)
        shape = (shape[0] // group.size * group.size, shape[1]) if kind == "exchange" else shape
        every = [drawn(shape, dtype, device, seed=1000 * seed + rank) for rank in range(group.size)]
        own, found, wanted = every[group.rank], every[0], torch.stack(every)
        if kind == "sum":
            found, wanted = group.all_reduce(own.clone()), wanted.double().sum(0)
        elif kind == "gather":
            found = group.all_gather(own)
        elif kind == "replay":
            recorded.copy_(own)
            graph.replay()
            found, wanted = replayed[group.size - 1], wanted.double().sum(0)
        elif kind == "exchange":
            found = group.all_to_all(own.view(group.size, -1))
            wanted = wanted.view(group.size, group.size, -1)[:, group.rank]
        elif kind == "started":
            found = torch.empty_like(wanted)
            started = group.iall_gather(own, out=found)
            started()
        else:
            found, wanted = group.broadcast(own.clone(), root=group.size - 1), every[-1]
        bound = 1e-2 * float(wanted.abs().max()) if kind in ("sum", "replay") else 0
        if float((found.double() - wanted).abs().max()) > bound:
            wrong.append(f"{kind} {dtype} {shape}")
    return wrong


def sums_in_two_shots(group: PeerGroup, device: torch.device) -> list[str]:
    """Names of sums without the bits of float32 sums in rank order; some are recorded, some at once, some by NCCL."""
    two_shot, chosen, wrong = group.two_shot, random.Random(3), []
    assert two_shot is not None
    group.least_two_shot, group.most_bytes = 1 << 12, 1 << 11
    two_shot._numbers.fill_(2**31 - 40)  # the last chunks before numbers become negative
    torch.cuda.synchronize(device)
    group.all_gather(torch.ones(1, device=device))  # no member sends chunks before all have set their numbers
    share = 16384 // group.size  # numbers of a chunk's share, in bfloat16
    counts = [2100, share - 8, share + 8, 132 * share, 133 * share + 8, 700 * share + 4096, 8192 * 4096]
    recorded = torch.zeros(700 * share, device=device, dtype=torch.bfloat16)
    group.all_reduce(recorded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = group.all_reduce(group.all_reduce(recorded.clone()).mul_(0.5))
    for seed in range(150):
        kind = chosen.choice(["plain", "plain", "plain", "replay", "shifted", "small", "nccl"])
        dtype = torch.bfloat16 if kind == "replay" else chosen.choice([torch.bfloat16, torch.float16, torch.float32])
        count = {"replay": len(recorded), "small": 512, "nccl": 1 << 20}.get(kind) or chosen.choice(counts)
        every = [drawn((count,), dtype, device, seed=1000 * seed + rank) for rank in range(group.size)]
        own, wanted = every[group.rank].clone(), torch.zeros(count, device=device)
        for each in every:
            wanted += each.float()
        wanted = wanted.to(dtype)
        if kind == "replay":
            recorded.copy_(own)
            replayed.fill_(math.nan)
            graph.replay()
            half = wanted * 0.5
            found, wanted = replayed, sum([half.float()] * group.size, torch.zeros_like(half).float()).to(dtype)
        elif kind == "shifted":  # one number behind an address that is a multiple of 16 bytes
            found = group.all_reduce(torch.cat([own[:1], own])[1:])
        elif kind == "nccl":
            group.two_shot = None
            found = group.all_reduce(own)
            group.two_shot = two_shot
            if group.size > 2:  # the order of its sums is NCCL's own
                continue
        else:
            before = two_shot._numbers.clone()
            found = group.all_reduce(own)
            if torch.equal(before, two_shot._numbers) != (kind == "small"):
                wrong.append(f"{kind} {dtype} {count} went another way")
        if not torch.equal(found, wanted):
            wrong.append(f"{kind} {dtype} {count}: {int((found != wanted).sum())}")
    if not bool((two_shot._numbers < 0).any()):
        wrong.append("numbers did not become negative")
    return wrong


def sums_in_a_graph(group: PeerGroup, device: torch.device) -> tuple[float, list[float]]:
    """Largest error over replays with new inputs; and one sum's bits as numbers, to compare members."""
    group.most_bytes = 1 << 22
    inputs = torch.zeros(64, 4096, device=device, dtype=torch.bfloat16)

    def both() -> Tensor:
        first = group.all_reduce(inputs.clone())
        return group.all_gather(group.all_reduce(first * 0.5))

    for _ in range(2):
        both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both()
    worst = 0.0
    for seed in range(300):
        every = [drawn((64, 4096), torch.bfloat16, device, seed=seed * 10 + rank) for rank in range(group.size)]
        inputs.copy_(every[group.rank])
        out.fill_(float("nan"))
        graph.replay()
        wanted = 0.5 * group.size * torch.stack([each.double() for each in every]).sum(0)
        error = (out.double() - wanted).abs().max() / wanted.abs().max()
        worst = max(worst, float(error) if bool(out.isfinite().all()) else float("inf"))
    return worst, out[0].flatten()[:5000].float().tolist()


def seconds_until_a_missing_peer_is_noticed(group: PeerGroup, device: torch.device) -> tuple[float, str]:
    """Seconds, and the first line of the error, which is reported as a lost peer, as are those that follow from it."""
    if group.rank:
        return 0.0, ""
    return _lonely_sum(group, torch.ones(8, 512, device=device))


def seconds_until_a_missing_peer_of_a_large_sum_is_noticed(group: PeerGroup, device: torch.device) -> tuple[float, str]:
    """The same for a sum in two shots."""
    if group.rank:
        return 0.0, ""
    assert group.two_shot is not None
    return _lonely_sum(group, torch.ones(4096, 4096, device=device))


def _lonely_sum(group: PeerGroup, tensor: Tensor) -> tuple[float, str]:
    ctx = ParallelContext(Split(tp=group.size), group.rank, tensor.device, tp=group)
    begin_s = time.monotonic()
    with pytest.raises(RankLostError) as lost, reporting_lost_peers(ctx):
        group.all_reduce(tensor)
        torch.cuda.synchronize(tensor.device)
    seconds = time.monotonic() - begin_s
    with pytest.raises(RankLostError), reporting_lost_peers(ctx):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
    return seconds, str(lost.value.__cause__).splitlines()[0]


@pytest.mark.parametrize("sees_one", [False, True], ids=["all GPUs", "one GPU"])
def test_collectives_of_all_kinds_and_sizes_in_one_memory(sees_one: bool) -> None:
    found = each_rank(collectives_of_random_sizes, sees_one=sees_one)
    assert found == [[]] * num_ranks()


def test_large_collectives() -> None:
    assert each_rank(large_collectives) == [[]] * num_ranks()


def test_sums_in_two_shots_have_the_bits_of_sums_in_rank_order() -> None:
    assert each_rank(sums_in_two_shots) == [[]] * num_ranks()


def test_the_best_of_each_part_is_the_first_of_the_largest_logits() -> None:
    assert each_rank(wrong_likeliest) == [[]] * num_ranks()


def test_recorded_sums_are_right_at_every_replay_and_equal_on_all_members() -> None:
    found = each_rank(sums_in_a_graph)
    assert all(worst < 1e-2 for worst, _ in found)
    assert all(bits == found[0][1] for _, bits in found)


@pytest.mark.parametrize(
    "work",
    [seconds_until_a_missing_peer_is_noticed, seconds_until_a_missing_peer_of_a_large_sum_is_noticed],
    ids=["small", "large"],
)
def test_a_kernel_that_waits_for_a_missing_peer_ends_at_the_timeout(work: Work) -> None:
    seconds, message = each_rank(work, timeout_s=8)[0]
    assert 7 < seconds < 20, message
    assert "launch failure" in message or "unspecified" in message
