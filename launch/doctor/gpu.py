"""Checks of GPUs and of attention kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launch.doctor.check import CheckResult, Outcome
from launch.table import human_bytes
from raycache.attention.flashinfer import LATENT_DIMS
from raycache.attention.flashinfer_full import HEAD_DIMS
from raycache.attention.flashinfer_kernels import WIDEST_OF_FA3
from raycache.config import Config
from raycache.errors import ConfigError
from raycache.memory.component import Component
from raycache.parallel.devices import require_gpus
from raycache.rank.backend import device_obstacle, package_obstacle

_TIMEOUT_S = 10.0
_BUSY_BYTES = 1 << 30
_HOPPER = 9  # major compute capability


def examine_gpus(config: Config) -> Iterator[CheckResult]:
    """Check this machine's GPUs and the links between them.

    Args:
        config: with ranks on GPUs.
    """
    wanted = config.world_size if config.address == "local" else 1
    try:
        require_gpus(wanted)
    except ConfigError as error:
        yield CheckResult("device", Outcome.FAILED, str(error))
        return
    count = torch.cuda.device_count()
    yield CheckResult("device", Outcome.OK, f"cuda, {count} GPUs for {config.world_size} ranks, {_driver()}")
    for index in range(count):
        yield _gpu(index)
    if config.world_size > 1 and count > 1:
        yield _links(min(count, config.world_size))


def _driver() -> str:
    said = ask_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    driver = f"driver {said[0].strip()}" if said else "driver unknown (nvidia-smi not found)"
    return f"{driver}, torch for CUDA {torch.version.cuda}"


def ask_smi(*arguments: str) -> str:
    """Output of `nvidia-smi`; empty if it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _gpu(index: int) -> CheckResult:
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    memory = f"{human_bytes(free)} of {human_bytes(total)} free"
    text = f"{about.name}, compute capability {about.major}.{about.minor}, {memory}"
    if total - free > _BUSY_BYTES:
        return CheckResult(f"cuda:{index}", Outcome.WARNING, f"{text}; other processes use it, see `nvidia-smi`")
    return CheckResult(f"cuda:{index}", Outcome.OK, text)


def _links(count: int) -> CheckResult:
    links = read_topology(ask_smi("topo", "-m"))
    ways = {links.get((a, b), "") for a in range(count) for b in range(a)}
    if "" in ways:
        return CheckResult(
            "links", Outcome.WARNING, "unknown: `nvidia-smi topo -m` does not show how the GPUs are connected"
        )
    if all(way.startswith("NV") for way in ways):
        return CheckResult("links", Outcome.OK, f"NVLink between all pairs ({', '.join(sorted(ways))})")
    found = f"{', '.join(sorted(ways))}, see `nvidia-smi topo -m`"
    return CheckResult("links", Outcome.WARNING, f"not all pairs have NVLink ({found}); tp and cp are slow over PCIe")


def read_topology(matrix: str) -> Mapping[tuple[int, int], str]:
    """Parse `nvidia-smi topo -m`: (GPU, GPU) -> type of link, such as "NV18" or "SYS"."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    columns: list[str] = next((words for words in lines if words and words[0] == "GPU0" and "GPU0" in words), [])
    links = {}
    for words in lines:
        if words is columns or not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        for column, way in zip(columns, words[1:], strict=False):
            if re.fullmatch(r"GPU\d+", column):
                links[int(words[0][3:]), int(column[3:])] = way
    return links


def examine_attention(config: Config, parts: Sequence[Component], *, dtype: torch.dtype) -> Iterator[CheckResult]:
    """Check the attention backend for this machine's GPUs, and whether its kernels are compiled.

    Args:
        config: with ranks on usable GPUs.
        parts: cache components of the model.
        dtype: of activations.
    """
    if config.attention == "torch":
        yield CheckResult("attention", Outcome.WARNING, "torch, as configured; flashinfer is faster")
        return
    if obstacle := device_obstacle(torch.device("cuda:0"), dtype) or package_obstacle():
        is_refused = config.attention == "flashinfer"
        text = obstacle if is_refused else f"torch instead of the faster flashinfer: {obstacle}"
        yield CheckResult("attention", Outcome.FAILED if is_refused else Outcome.WARNING, text)
        return
    from flashinfer import __version__
    from flashinfer.jit import env

    yield CheckResult("attention", Outcome.OK, f"flashinfer {__version__}: {str(dtype).removeprefix('torch.')} on cuda")
    kernels, unsupported = wanted_kernels(parts, dtype=dtype, capability=torch.cuda.get_device_capability(0))
    if unsupported:
        text = f"flashinfer has none for {', '.join(unsupported)}; torch computes these, which is slower"
        yield CheckResult("kernels", Outcome.WARNING, text)
    folders = [Path(folder) for folder in (*env.FLASHINFER_AOT_DIRS, env.FLASHINFER_JIT_DIR)]
    yield _kernels(missing_kernels(kernels, folders), Path(env.FLASHINFER_JIT_DIR))


def _kernels(missing: Sequence[str], folder: Path) -> CheckResult:
    if not missing:
        return CheckResult("kernels", Outcome.OK, "compiled for this model")
    tools = [tool for tool in ("nvcc", "ninja") if not _has_tool(tool)]
    text = (
        f"{', '.join(missing)} will be compiled into {folder} by the first start, or `raycache prepare`, a minute each"
    )
    if tools:
        text += f"; {' and '.join(tools)} not found: install the CUDA toolkit and ninja, or use attention=torch"
    return CheckResult("kernels", Outcome.WARNING, text)


def _has_tool(name: str) -> bool:
    """Whether a build tool is where FlashInfer looks for it."""
    return shutil.which(name) is not None or (name == "nvcc" and Path("/usr/local/cuda/bin/nvcc").exists())


@dataclass(frozen=True)
class Kernel:
    """An attention kernel of FlashInfer.

    Attributes:
        name: for display.
        words: substrings of its library's name.
        end: suffix of its library's name.
    """

    name: str
    words: tuple[str, ...]
    end: str

    def is_in(self, library: str) -> bool:
        """Whether a library contains this kernel, by the library's name."""
        return library.endswith(self.end) and all(word in library for word in self.words)


def wanted_kernels(
    parts: Sequence[Component], *, dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[list[Kernel], list[str]]:
    """List the FlashInfer kernels of a model, and descriptions of the attention that FlashInfer does not support.

    Args:
        parts: cache components of the model.
        dtype: of activations: bfloat16 or float16.
        capability: compute capability of the GPU.
    """
    kernels: list[Kernel] = []
    unsupported: list[str] = []
    number = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]

    def want(name: str, library: str, *words: str, end: str, has_fa3: bool = True) -> None:
        words = (f"{library}_", f"dtype_q_{number}_", f"dtype_kv_{number}_", *words)
        kernels.append(Kernel(f"{name} (fa2)", words, end))
        if has_fa3 and capability[0] == _HOPPER:
            kernels.append(Kernel(f"{name} (fa3)", words, "_sm90"))

    for part in parts:
        shapes = {field.name: field.shape for field in part.fields}
        if "k" in shapes:
            size = shapes["k"][-1]
            name = f"heads of {size}{' with a window' if part.window else ''}"
            if size not in HEAD_DIMS:
                unsupported.append(name)
            else:
                head = f"head_dim_qk_{size}_head_dim_vo_{size}_"
                swa = f"use_swa_{bool(part.window)}_"
                library, has_fa3 = "batch_prefill_with_kv_cache", size <= WIDEST_OF_FA3
                want(name, library, head, swa, end="_kv_stride_equal", has_fa3=has_fa3)
        if "latent" in shapes:
            dims = (shapes["latent"][0], shapes["rope"][0])
            if dims != LATENT_DIMS:
                unsupported.append(f"latents of {dims[0]} + {dims[1]}")
            elif "scale" in shapes:  # their kernels are in Triton
                if capability < (9, 0):
                    unsupported.append("latents in fp8 before Hopper")
            else:
                head = f"head_dim_ckv_{dims[0]}_head_dim_kpe_{dims[1]}_"
                want("latents", "batch_mla_attention", head, end="_planabi2")
    return kernels, unsupported


def missing_kernels(kernels: Sequence[Kernel], folders: Sequence[Path]) -> list[str]:
    """Names of the kernels that have no compiled library in any of the folders."""
    built = [library.stem for folder in folders for library in folder.glob("*/*.so")]
    return [kernel.name for kernel in kernels if not any(map(kernel.is_in, built))]
