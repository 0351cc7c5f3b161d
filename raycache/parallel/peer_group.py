"""Groups of GPUs that exchange tensors through each other's memory, where that is faster than NCCL.

NCCL takes 15 to 20 us for a sum of any small size over NVLink; a decode step has two per layer. The kernels in
peer_kernels.py take a few. Large tensors are summed in two shots (two_shot_kernels.py), and gathered by NCCL. The sizes
at which one takes over from the other are measured at the start.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from queue import Empty, Queue
from subprocess import SubprocessError
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs do not export the stores

from raycache.errors import RankLostError
from raycache.parallel.collectives import Started, TorchGroup
from raycache.parallel.copy_exchange import CopyExchange, CudaCopyStream, memory_bytes
from raycache.parallel.nccl import Nccl
from raycache.parallel.peer_memory import PeerMemory

if TYPE_CHECKING:
    from raycache.parallel.two_shot_kernels import TwoShotSums

_log = logging.getLogger(__name__)

PEER_MEMORY = "peer memory"
"""Transport of these groups."""
_SIZES = tuple(1 << bits for bits in range(13, 24))
"""Bytes of the sums that are compared at the start: those of one token and more."""
_LARGE_SIZES = (1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 26)
"""Bytes of the sums in two shots that are compared: those of some hundred tokens, up to a long chunk of a prompt."""
_SUMS, _REPLAYS = 8, 5
_ALIGNED = 16


class PeerGroup(TorchGroup):
    """A group over NCCL whose members also write to each other's memory.

    Args:
        backend: a ProcessGroupNCCL.
        most_bytes: largest tensor that a member sends to another at once.
        nccl: see TorchGroup.
    Attributes:
        two_shot: sums of large tensors; None: by NCCL.
        least_two_shot: bytes from which on tensors are summed in two shots, at least 1.
    """

    def __init__(self, backend: Any, memory: PeerMemory, *, most_bytes: int, nccl: Nccl | None) -> None:
        super().__init__(backend, rank=memory.rank, size=memory.size, transport=PEER_MEMORY, nccl=nccl)
        self.memory = memory
        self.most_bytes = most_bytes
        self.two_shot: TwoShotSums | None = None
        self.least_two_shot = 1
        self._copies: CopyExchange | None = None
        self._outgrown: list[CopyExchange] = []  # which plans of a step may still use
        self._copied_bytes = 0  # asked for, whether there are copies or not

    def all_reduce(self, tensor: Tensor) -> Tensor:
        two_shot = self.two_shot if tensor.nbytes >= self.least_two_shot else None
        has_way = two_shot is not None or 0 < tensor.nbytes <= self.most_bytes
        if not has_way or tensor.dtype not in _kernels().DTYPES:
            return super().all_reduce(tensor)
        own = _aligned(tensor)
        if two_shot is not None:
            two_shot.sum(own)
        else:
            _kernels().sum_parts(own, self.memory)
        if own is not tensor:
            tensor.copy_(own.view(-1)[: tensor.numel()].view(tensor.shape))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        if not 0 < tensor.nbytes <= self.most_bytes:
            return super().all_gather(tensor)
        own = _aligned(tensor)
        every: Tensor = _kernels().exchange(own, self.memory, is_gather=True)
        return every if own.shape == tensor.shape else _unpadded(every, tensor)

    def gather_columns(self, tensor: Tensor) -> Tensor:
        if not 0 < tensor.nbytes <= self.most_bytes or tensor[0].nbytes % _ALIGNED:
            return super().gather_columns(tensor)
        own = _aligned(tensor)
        out = own.new_empty(len(own), self.size * own.shape[1])
        _kernels().exchange(own, self.memory, is_gather=True, out=out, num_rows=len(own))
        return out

    def peer_memory(self, num_bytes: int) -> PeerMemory | None:
        return self.memory if num_bytes <= self.most_bytes else None

    def copies(self, area_bytes: int) -> CopyExchange | None:
        if area_bytes > self._copied_bytes:
            self._copied_bytes = area_bytes
            if self._copies is not None:
                self._outgrown.append(self._copies)
            self._copies = _new_copies(self, area_bytes)
        return self._copies

    def close(self) -> None:
        for copies in [*self._outgrown, self._copies]:
            if copies is not None:
                copies.close()
        super().close()

    def iall_gather(self, tensor: Tensor, *, out: Tensor) -> Started:
        if not 0 < tensor.nbytes <= self.most_bytes or tensor.nbytes % _ALIGNED:
            return super().iall_gather(tensor, out=out)
        assert out.data_ptr() % _ALIGNED == 0, "all members go the same way"
        _kernels().exchange(_aligned(tensor), self.memory, is_gather=True, out=out)
        return Started(lambda: None, lambda: True)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        if not 0 < tensor.nbytes <= self.most_bytes * self.size:
            return super().all_to_all(tensor)
        if (tensor.nbytes // self.size) % _ALIGNED:
            parts = torch.stack([_aligned(part) for part in tensor])
            return _unpadded(_kernels().exchange(parts, self.memory, is_gather=False), tensor[0])
        every: Tensor = _kernels().exchange(_aligned(tensor), self.memory, is_gather=False)
        return every


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned; flat and longer, if it is not a multiple of 16 bytes."""
    if tensor.nbytes % _ALIGNED == 0:
        tensor = tensor.contiguous()
        return tensor if tensor.data_ptr() % _ALIGNED == 0 else tensor.clone()
    step = _ALIGNED // tensor.element_size()
    own = tensor.new_zeros(-(-tensor.numel() // step) * step)
    own[: tensor.numel()].copy_(tensor.reshape(-1))
    return own


def _unpadded(parts: Tensor, part: Tensor) -> Tensor:
    """Parts [size, N] that `_aligned` made longer, in the shape of `part`."""
    return parts[:, : part.numel()].reshape(-1, *part.shape)


def with_peers(
    group: TorchGroup, backend: Any, *, name: str, store: Store, device: torch.device, limit_s: float
) -> TorchGroup:
    """The group with peer memory, or itself if a member cannot map it, which is logged. Collective.

    Args:
        backend: of the group.
        name: unique in this process.
        store: of the group.
        limit_s: how long members wait for each other.
    Raises:
        RankLostError: a member did not exchange tensors in time.
    """
    memory, problem = None, ""
    try:
        _kernels()
        memory = PeerMemory(name, rank=group.rank, size=group.size, store=store, device=device, limit_s=limit_s)
    except (ImportError, OSError, RuntimeError, SubprocessError) as cause:
        problem = _first_line(cause)
    # Nobody waits to map the memory of a member that has none.
    if _all(group, memory is not None, device) and memory is not None:
        problem = _within(limit_s / 2, memory.map)
        if _all(group, not problem, device):
            try:
                return _checked(group, PeerGroup(backend, memory, most_bytes=_SIZES[-1], nccl=group.nccl), name=name)
            except RuntimeError as cause:  # a kernel has waited for another member in vain
                raise RankLostError(-1, name, -1, _first_line(cause)) from cause
    return _without(group, name, problem or "another member cannot map the memory of its peers")


def _within(timeout_s: float, work: Callable[[], None]) -> str:
    """Map memory; returns the problem, or "". On a thread that can be abandoned: torch waits without a deadline."""
    outcome: Queue[str] = Queue()

    def run() -> None:
        try:
            work()
            outcome.put("")
        except (AttributeError, OSError, RuntimeError) as cause:
            outcome.put(_first_line(cause))

    Thread(target=run, name="peer memory", daemon=True).start()
    try:
        return outcome.get(timeout=timeout_s)
    except Empty:
        return f"not mapped within {timeout_s:.0f} s"


def _new_copies(peers: PeerGroup, area_bytes: int) -> CopyExchange | None:
    """Exchange by copy engines if all members have one that works; None otherwise, which is logged. Collective."""
    memory, made = peers.memory, list[CopyExchange]()
    device, limit_s = memory.device, memory.limit_ns / 1e9

    def make() -> None:
        memories = memory.share(memory_bytes(area_bytes, size=memory.size))
        made.append(CopyExchange(memory.rank, memories, CudaCopyStream(device)))

    problem = _within(limit_s / 2, make)
    if _all(peers, not problem, device):
        problem = _problem_of(made[0], memory.rank, device, limit_s=limit_s / 2)
        if _all(peers, not problem, device):
            _log.info("copy engines exchange up to %d MiB between members", area_bytes >> 20)
            return made[0]
    _log.warning("large tensors are exchanged through NCCL: %s", problem or "copies of another member fail")
    return None


def _problem_of(copies: CopyExchange, rank: int, device: torch.device, *, limit_s: float) -> str:
    """What is wrong after some exchanges of numbers; "" for nothing. Collective."""
    numbers, are_right = torch.arange(copies.area_bytes // 8, device=device), []
    try:
        for i in range(4):
            for member in copies.others:
                copies.send(member, numbers + (i - rank))
            copies.receive()
            for member in copies.others:
                (found,) = copies.received(member, (tuple(numbers.shape), numbers.dtype))
                are_right.append((found == numbers + (i - member)).all())
        done = torch.cuda.current_stream(device).record_event()
        deadline = time.monotonic() + limit_s
        while not done.query():
            if time.monotonic() > deadline:
                copies.close()
                return f"copies have not arrived within {limit_s:.0f} s"
            time.sleep(0.001)
        return "" if all(are_right) else "copies are wrong"
    except RuntimeError as cause:
        copies.close()
        return _first_line(cause)


def _checked(group: TorchGroup, peers: PeerGroup, *, name: str) -> TorchGroup:
    """The group with peer memory if it adds up right, and faster than NCCL. Collective."""
    device = peers.memory.device
    if not _all(group, _sums_right(peers, device), device):
        return _without(group, name, "sums over peer memory are wrong")
    peers.most_bytes = _measure(group, peers, device)
    if not peers.most_bytes:
        return _without(group, name, "peer memory is slower")
    _add_two_shot_sums(group, peers, device)
    large = "by NCCL" if peers.two_shot is None else f"in two shots from {peers.least_two_shot >> 10} KiB on"
    _log.info("group %s exchanges up to %d KiB at once, and sums %s", name, peers.most_bytes >> 10, large)
    return peers


def _add_two_shot_sums(group: TorchGroup, peers: PeerGroup, device: torch.device) -> None:
    """Sum large tensors in two shots if that is right, and faster. Collective."""
    made: list[TwoShotSums] = []
    problem = _within(peers.memory.limit_ns / 2e9, lambda: made.append(_two_shot().TwoShotSums(peers.memory)))
    if _all(group, not problem, device):
        (sums,) = made
        if _all(group, _is_right(sums, peers, device), device):
            least = _measure_two_shots(group, peers, sums, device)
            if least:
                peers.two_shot, peers.least_two_shot = sums, least
            return
        problem = "sums in two shots are wrong"
    _log.warning("large tensors are summed through NCCL: %s", problem or "another member cannot map the memory")


def _without(group: TorchGroup, name: str, reason: str) -> TorchGroup:
    _log.warning("group %s exchanges all tensors through NCCL: %s", name, reason)
    return group


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _all(group: TorchGroup, is_true: bool, device: torch.device) -> bool:
    """Whether it is true for all members."""
    return int(group.all_reduce(torch.tensor(int(is_true), device=device))) == group.size


def _sums_right(peers: PeerGroup, device: torch.device) -> bool:
    """Compile the kernels for all sizes, and compare with arithmetic."""
    is_right = True
    ranks = torch.arange(peers.size, device=device)
    for size in (_SIZES[0], 1 << 18, 1 << 19, _SIZES[-1]):
        for dtype in (torch.bfloat16, torch.float32):
            numbers = torch.arange(size // dtype.itemsize, device=device).remainder(16).to(dtype)
            found = peers.all_reduce(numbers + peers.rank)
            is_right &= torch.equal(found, numbers * peers.size + int(ranks.sum()))
        words = torch.arange(size // 8, device=device)
        is_right &= torch.equal(peers.all_gather(words + peers.rank), words + ranks[:, None])
        parts = words + ranks[:, None]  # to each member its rank
        is_right &= torch.equal(peers.all_to_all(parts), (words + peers.rank).expand(peers.size, -1))
    return is_right


def _is_right(sums: TwoShotSums, peers: PeerGroup, device: torch.device) -> bool:
    """Compile the kernel, and compare with arithmetic."""
    is_right = True
    for size in (16, (1 << 16) + 16, _LARGE_SIZES[-1]):
        for dtype in (torch.bfloat16, torch.float32):
            numbers = torch.arange(size // dtype.itemsize, device=device).remainder(16).to(dtype)
            found = numbers + peers.rank
            sums.sum(found)
            is_right &= torch.equal(found, numbers * peers.size + peers.size * (peers.size - 1) // 2)
    return is_right


def _measure_two_shots(group: TorchGroup, peers: PeerGroup, sums: TwoShotSums, device: torch.device) -> int:
    """The size from which on sums in two shots are faster than others, of those tried; 0 if they never are."""
    least, losses = 0, 0
    for size in reversed(_LARGE_SIZES):
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        seconds = graph_seconds(partial(sums.sum, x), device, calls=_SUMS, replays=_REPLAYS)
        times = torch.tensor([seconds, _sum_seconds(peers, x)], device=device)
        ours, theirs = group.all_reduce(times).tolist()
        least, losses = (least, losses + 1) if ours >= theirs else (size, 0)
        if losses == 2:  # one may be noise
            break
    return least


def _measure(group: TorchGroup, peers: PeerGroup, device: torch.device) -> int:
    """The largest size up to which sums through peer memory are faster than those of NCCL, for all members."""
    most, losses = 0, 0
    for size in _SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times = torch.tensor([_sum_seconds(each, x) for each in (peers, group)], device=device)
        ours, theirs = group.all_reduce(times).tolist()
        most, losses = (most, losses + 1) if ours >= theirs else (size, 0)
        if losses == 2:  # one may be noise
            break
    return most


def _sum_seconds(group: TorchGroup, x: Tensor) -> float:
    return graph_seconds(lambda: group.all_reduce(x), x.device, calls=_SUMS, replays=_REPLAYS)


def graph_seconds(run: Callable[[], Any], device: torch.device, *, calls: int, replays: int) -> float:
    """Time of a call, when several run as one CUDA graph, as in decode steps: the median over replays, in seconds.

    Args:
        run: launches work on the device.
        calls: in the graph.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    found = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end) / calls)
    return float(statistics.median(found))


@cache
def _kernels() -> Any:
    from raycache.parallel import peer_kernels

    return peer_kernels


@cache
def _two_shot() -> Any:
    from raycache.parallel import two_shot_kernels

    return two_shot_kernels
