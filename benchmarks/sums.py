"""Collectives between GPUs of one host: through peer memory, at once and in two shots, by NCCL, and by torch.

    python -m benchmarks.sums --ranks 2
    python -m benchmarks.sums --ranks 2 --tokens 1,64 --only sum,norm

Times are those of one of 32 collectives that run as a CUDA graph, medians of 20 replays on rank 0, in microseconds.
Each way is compared with float64 arithmetic first. Tensors are [tokens, 4096] in bfloat16.

    sum        all_reduce
    norm       all_reduce, then a kernel that adds a residual and normalises
    gather     all_gather
    all_to_all
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.figures import write_json
from raycache.config import Config
from raycache.gang.processes import RankProcess, meet_here
from raycache.layers import fused
from raycache.parallel.collectives import TorchGroup
from raycache.parallel.context import ParallelContext
from raycache.parallel.peer_group import PeerGroup, graph_seconds
from raycache.rank.member import Invitation

if TYPE_CHECKING:
    from raycache.parallel.two_shot_kernels import TwoShotSums

_FEATURES = 4096
_REPEATS, _REPLAYS = 32, 20
_EPS = 1e-6

Way = tuple[str, str, Callable[[], Any], Callable[[], float]]
"""(kind, name, what is timed, largest error over the largest number)."""


def _ways(
    peers: PeerGroup, two_shot: TwoShotSums | None, nccl: TorchGroup, tokens: int, device: torch.device
) -> Iterator[Way]:
    size, rank = peers.size, peers.rank
    generator = torch.Generator(device).manual_seed(tokens)
    every = torch.randn(size, tokens, _FEATURES, device=device, generator=generator).bfloat16()
    hidden = torch.randn(tokens, _FEATURES, device=device, generator=generator).bfloat16()
    weight = torch.randn(_FEATURES, device=device, generator=generator).bfloat16()
    own, scratch = every[rank].clone(), every[rank].clone()
    wanted = every.double().sum(0)
    total = wanted + hidden.double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS) * weight.double()

    def error(found: Tensor, right: Tensor) -> float:
        return float((found.double() - right.double()).abs().max() / right.double().abs().max())

    parts = own.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
    theirs = every.unflatten(2, (size, -1))[:, :, rank]

    def of(name: str, group: TorchGroup) -> Iterator[Way]:
        def add_norm(x: Tensor) -> Tensor:
            return fused.add_rms_norm(hidden, group.all_reduce(x), weight, _EPS)[0]

        yield "sum", name, lambda: group.all_reduce(scratch), lambda: error(group.all_reduce(own.clone()), wanted)
        yield "gather", name, lambda: group.all_gather(own), lambda: error(group.all_gather(own), every)
        yield "all_to_all", name, lambda: group.all_to_all(parts), lambda: error(group.all_to_all(parts), theirs)
        yield "norm", name, lambda: add_norm(scratch), lambda: error(add_norm(own.clone()), normed)

    yield from of("peers", peers)
    yield from of("nccl", nccl)
    if two_shot is not None:
        add_up = two_shot.sum

        def check() -> float:
            found = own.clone()
            add_up(found)
            return error(found, wanted)

        yield "sum", "two shots", lambda: add_up(scratch), check


def _torch_ways(peers: PeerGroup, tokens: int, device: torch.device, name: str, buffers: list[Any]) -> Iterator[Way]:
    from torch._C._distributed_c10d import _SymmetricMemory

    if not buffers:
        buffers.append(
            _SymmetricMemory.empty_strided_p2p((512, _FEATURES), (_FEATURES, 1), torch.bfloat16, device, name)
        )
        _SymmetricMemory.rendezvous(buffers[0], name)
    if tokens > 512:
        return
    mine = buffers[0][:tokens]
    own = torch.randn(tokens, _FEATURES, device=device).bfloat16()

    def one_shot() -> Tensor:
        mine.copy_(own)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name)
        return summed

    def check() -> float:
        right = peers.all_reduce(own.clone()).double()
        return float((one_shot().double() - right).abs().max() / right.abs().max())

    yield "sum", "torch one shot", one_shot, check


def _serve(connection: Connection, invitation: Invitation) -> None:
    tokens, only = connection.recv()
    handles = {name: handle for name, handle in invitation.handles.items() if handle.kind != "control"}
    spec, config = invitation.spec, invitation.config
    device = torch.device(spec.device)
    torch.cuda.set_device(device)
    ctx = ParallelContext.join(
        config.split, rank=spec.rank, host=spec.host, device=device, handles=handles, epoch=1, has_peer_memory=True
    )
    peers = ctx.tp
    if not isinstance(peers, PeerGroup):
        connection.send(None)
        return
    connection.send((peers.most_bytes, peers.least_two_shot))
    peers.most_bytes = 1 << 30
    two_shot, peers.two_shot = peers.two_shot, None
    nccl = TorchGroup(peers._backend, rank=peers.rank, size=peers.size, transport="NCCL")
    found: list[tuple[int, str, str, float, float]] = []
    buffers: list[Any] = []
    for count in tokens:
        ways = list(_ways(peers, two_shot, nccl, count, device))
        if "torch" in only:
            ways += _torch_ways(peers, count, device, f"1.tp.0.{spec.rank}", buffers)
        for kind, name, run, check in ways:
            if kind in only:
                us = 1e6 * graph_seconds(run, device, calls=_REPEATS, replays=_REPLAYS)
                found.append((count, kind, name, us, check()))
    torch.cuda.synchronize()
    connection.send(found)
    connection.recv()


def main() -> int:
    """Print a table; the exit code says whether all results were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="1,2,8,16,64,128,256,1024", help="(default: %(default)s)")
    parser.add_argument("--only", default="sum,norm,gather,all_to_all,torch", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens, only = [int(count) for count in options.tokens.split(",")], options.only.split(",")
    config = Config(model="none", tp=options.ranks, dummy_weights=True)
    _meeting, invitations = meet_here(config, device_type="cuda")
    ranks = [RankProcess(_serve, invitation) for invitation in invitations]
    for rank in ranks:
        rank.send((tokens, only))
    most = [rank.receive() for rank in ranks]
    print(f"(largest tensor that is sent at once, smallest that is summed in two shots), in bytes: {most}", flush=True)
    if None in most:
        return 1
    found = [rank.receive() for rank in ranks]
    for rank in ranks:
        rank.send(None)
        rank.process.join(30)
    print(f"{'tokens':>8}  {'kind':12}{'way':24}{'us':>10}{'error':>12}")
    for count, kind, name, us, error in sorted(found[0]):
        print(f"{count:8}  {kind:12}{name:24}{us:10.1f}{error:12.1e}")
    if options.json:
        write_json(options.json, {"ways": found[0]})
    return int(any(not one[-1] < 1e-2 for each in found for one in each))


if __name__ == "__main__":
    sys.exit(main())
