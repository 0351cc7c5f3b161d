"""Checks the GPUs of a process: whether there are enough, why not, and that no two ranks share one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs do not export the stores

from raycache.errors import ConfigError, RankLostError


def require_gpus(count: int) -> None:
    """Check that this process can use `count` GPUs, without creating a context on any.

    Raises:
        ConfigError: it cannot; the message says what is missing: torch with CUDA, a driver, a newer driver, or GPUs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's warnings about the driver are part of the error
        found = torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0
    if found == 0:
        raise ConfigError(f"{_gpus(count)} requested, but none can be used: {_why_none()}; or use --device cpu")
    if found < count:
        raise ConfigError(f"{_gpus(count)} requested, but only {found} found; use a smaller split, or --device cpu")


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _why_none() -> str:
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA; install a torch that is built with it"
    try:
        torch.cuda.init()
    except RuntimeError as cause:
        return explain_no_cuda(str(cause), cuda=torch.version.cuda)
    return "torch sees none"


def explain_no_cuda(reason: str, *, cuda: str) -> str:
    """Explain why CUDA does not start, and what to do.

    Args:
        reason: torch's message.
        cuda: CUDA version that torch is built for, such as "13.0".
    """
    if found := re.search(r"driver on your system is too old \(found version (\d+)\)", reason):
        version = int(found[1])  # 1000 * major + 10 * minor
        return (
            f"the NVIDIA driver goes up to CUDA {version // 1000}.{version % 1000 // 10}, too old for this torch, "
            f"which is built for CUDA {cuda}; update the driver, or install a torch for an older CUDA"
        )
    if "no NVIDIA driver" in reason:
        return "there is no NVIDIA driver; install one, or start the container with its GPUs (docker run --gpus all)"
    if "No CUDA GPUs are available" in reason:
        return "the driver shows this process no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return f"CUDA does not start: {first.rstrip('.')}; see `nvidia-smi`"


@dataclass(frozen=True)
class GpuModel:
    """A kind of GPU, as a rank reports it.

    Attributes:
        name: such as "NVIDIA L40S".
        capability: compute capability, major and minor.
    """

    name: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> GpuModel:
        """The model of a GPU of this process. Makes it current, so that no other GPU gets a context."""
        torch.cuda.set_device(device)
        return cls(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))

    def __str__(self) -> str:
        """Name for messages."""
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a Triton kernel with IS_EARLY, which uses programmatic dependent launch, from Hopper on."""
    is_early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


def gpu_id(device: torch.device) -> str:
    """Globally unique id of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class Peer:
    """A member of a group.

    Attributes:
        rank: world rank.
        host: address of its node.
        gpu: its `gpu_id`.
    """

    rank: int
    host: str
    gpu: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def introduce(me: Peer, members: Sequence[int], *, store: Store, group: str) -> list[Peer]:
    """Exchange `Peer`s with all members of a group.

    Args:
        members: world ranks of the group.
        store: of the group; its timeout is the deadline.
        group: its name, for messages.
    Returns:
        The others.
    Raises:
        RankLostError: a member did not introduce itself in time.
        ConfigError: two members use the same GPU. NCCL would fail only at the first collective, without naming them.
    """
    store.set(f"peer.{me.rank}", f"{me.host} {me.gpu}")
    others = []
    for rank in members:
        if rank == me.rank:
            continue
        try:
            host, gpu = store.get(f"peer.{rank}").decode().split(" ", 1)
        except RuntimeError as cause:
            raise RankLostError(rank, group, -1, "it did not join its group in time") from cause
        others.append(Peer(rank, host, gpu))
    _refuse_shared([me, *others])
    return others


def _refuse_shared(peers: Sequence[Peer]) -> None:
    first: dict[str, Peer] = {}
    for peer in sorted(peers, key=lambda one: one.rank):
        other = first.setdefault(peer.gpu, peer)
        if other is not peer:
            raise ConfigError(
                f"{other} and {peer} compute on the same GPU {peer.gpu}, but NCCL needs one per rank; use a smaller "
                "split, or let Ray choose the GPUs of each rank (CUDA_VISIBLE_DEVICES, "
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)"
            )
