"""Seconds to load a checkpoint, against reading the same bytes plainly and against other loaders.

    python -m benchmarks.loading                                            # 4 GB of Qwen3-8B's shape, CPU
    python -m benchmarks.loading --gb 20 --device cuda --json loading.json  # 20 GB
    python -m benchmarks.loading --gb 20 --device cuda --shapes qwen3-8b,moonlight-16b-mtp

A checkpoint of random bfloat16 numbers is written first: the first layers of a published shape, or more than it has,
in files of 4 GB. Then each of these reads it, in turns, in a process of its own, once with the page cache dropped
(cold) and once out of it (warm):

    plain 1 thread       readinto of whole files, into one buffer again and again
    plain all threads    pread by as many threads as `tp 1` has
    tp 1                 load_weights of the whole model
    tp 2 rank 0          load_weights of one of two ranks
    safetensors          the model read tensor by tensor with safe_open, each slice copied to its place
    fastsafetensors      all tensors of all files, without GPUDirect; if it is installed
    runai streamer       the same, by Run:ai Model Streamer; if it is installed

The median of the rounds counts. On a machine that others use, compare the seconds of the processor. "Over" is memory
that was taken beside the weights at most: of the GPU, or of the process on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.figures import write_json
from benchmarks.model_shape import SHAPES
from raycache.config import Config
from raycache.deployment.deployment import Deployment
from raycache.models.base import load_model, read_config
from raycache.models.layer_sizes import AskedShapes, layer_sizes
from raycache.parallel.collectives import Group
from raycache.parallel.context import ParallelContext
from raycache.parallel.sharding import Split
from raycache.rank.loading import load_weights, read_threads

FILE_BYTES, BLOCK_BYTES = 4_000_000_000, 8 << 20
ITEMSIZE = 2


@dataclass(frozen=True)
class Case:
    """What one process does.

    Attributes:
        model_dir: of the checkpoint.
        device: "cpu" or "cuda:0".
        way: a key of `WAYS`.
    """

    model_dir: Path
    device: str
    way: str


@dataclass(frozen=True)
class Measured:
    """What came of it.

    Attributes:
        seconds: of the clock.
        cpu_s: of the processor, by all threads.
        num_bytes: of the checkpoint that it had to read.
        over_bytes: most memory beside the weights.
    """

    seconds: float
    cpu_s: float
    num_bytes: int
    over_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of a checkpoint, 10^9 bytes")
    parser.add_argument("--shapes", default="qwen3-8b", help="files of benchmarks/shapes, with commas between them")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="of those above, by their short names")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda:0" if options.device == "cuda" else "cpu"
    found: dict[str, Any] = {}
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            model_dir = write_checkpoint(shape, Path(folder), num_bytes=int(options.gb * 1e9))
            found[shape] = measure_all(model_dir, device, ways=options.ways.split(","), rounds=options.rounds)
    if options.json:
        write_json(options.json, {"gb": options.gb, "device": device, "shapes": found})


def measure_all(model_dir: Path, device: str, *, ways: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure ways of reading in turns, and print a table."""
    files = sorted(model_dir.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    model = read_config(model_dir)
    print(f"\n{model_dir.name}: {model.num_layers} layers, {total / 1e9:.1f} GB in {len(files)} files, to {device}\n")
    ways = [way for way in ways if is_installed(way)]
    rows: dict[tuple[str, str], list[Measured]] = {}
    for _ in range(rounds):
        for way in ways:
            for state in ("cold", "warm"):
                if state == "cold":
                    drop(files)
                rows.setdefault((way, state), []).append(in_process(Case(model_dir, device, way)))
    print("| | cold s | GB/s | CPU s | warm s | GB/s | CPU s | over, GiB |\n|---|---|---|---|---|---|---|---|")
    for way in ways:
        cells = []
        for state in ("cold", "warm"):
            seconds = statistics.median(one.seconds for one in rows[way, state])
            cpu_s = statistics.median(one.cpu_s for one in rows[way, state])
            cells.append(f"{seconds:.2f} | {rows[way, state][0].num_bytes / seconds / 1e9:.2f} | {cpu_s:.2f}")
        over = max(one.over_bytes for state in ("cold", "warm") for one in rows[way, state])
        print(f"| {way} | {' | '.join(cells)} | {over / 2**30:.2f} |", flush=True)
    return {f"{way}, {state}": [asdict(one) for one in each] for (way, state), each in rows.items()}


def is_installed(way: str) -> bool:
    """Whether the packages of a way are there; says so if not."""
    needed = PACKAGES.get(way)
    is_there = needed is None or importlib.util.find_spec(needed) is not None
    if not is_there:
        print(f"{way}: {needed} is not installed")
    return is_there


def drop(files: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    os.sync()
    for file in files:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_process(case: Case) -> Measured:
    """Measure in a process of its own, which has its imports and its GPU context when the clock starts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, case))
    process.start()
    theirs.close()
    measured: Measured = ours.recv()
    process.join()
    return measured


def _run(connection: Connection, case: Case) -> None:
    device = torch.device(case.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    work = WAYS[case.way](case)
    before, begin_cpu_s, begin_s = memory(device), time.process_time(), time.perf_counter()
    kept, num_bytes = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    over = memory(device) - before - (0 if kept is None else num_bytes)
    connection.send(Measured(seconds, cpu_s, num_bytes, max(over, 0)))


def memory(device: torch.device) -> int:
    """Most that was taken up to now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


Work = Callable[[], tuple[object, int]]
"""Gives what is to be kept and the bytes that were read."""


def _plain(case: Case) -> Work:
    def work() -> tuple[object, int]:
        buffer, done = bytearray(BLOCK_BYTES), 0
        for path in sorted(case.model_dir.glob("*.safetensors")):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    done += count
        return None, done

    return work


def _plain_threads(case: Case) -> Work:
    paths = sorted(case.model_dir.glob("*.safetensors"))
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, BLOCK_BYTES)]
    handles = {path: os.open(path, os.O_RDONLY) for path in paths}
    num_threads = read_threads(ranks_on_node=1)

    def read(blocks: Sequence[tuple[Path, int]]) -> int:
        buffer = bytearray(BLOCK_BYTES)
        return sum(os.preadv(handles[path], [buffer], at) for path, at in blocks)

    def work() -> tuple[object, int]:
        with ThreadPoolExecutor(num_threads) as pool:
            return None, sum(pool.map(read, [blocks[i::num_threads] for i in range(num_threads)]))

    return work


def _ours(tp: int) -> Callable[[Case], Work]:
    def prepare(case: Case) -> Work:
        device = torch.device(case.device)
        config = Config(model=str(case.model_dir), tp=tp, dtype="bfloat16", device=device.type)
        ctx = ParallelContext(Split(tp=tp), 0, device, tp=Group(rank=0, size=tp))
        told = [(0, 0)]

        def work() -> tuple[object, int]:
            loaded = load_weights(
                Deployment(config, read_config(case.model_dir), device.type),
                ctx,
                num_threads=read_threads(ranks_on_node=1),
                on_progress=lambda done, total: told.append((done, total)),
            )
            return loaded, told[-1][0]

        return work

    return prepare


class _SafeOpen:
    """A weight source that reads with safetensors; what it gives is copied to the device."""

    def __init__(self, model_dir: Path, device: torch.device) -> None:
        self._device = device
        self._files: dict[str, Any] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            file = safe_open(path, framework="pt", device="cpu")
            self._files |= dict.fromkeys(file.keys(), file)

    def has(self, name: str) -> bool:
        return name in self._files

    def read(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        data = self._files[name].get_slice(name)
        cut: Tensor = data[:] if axis is None else data[(slice(None),) * axis + (slice(start, stop),)]
        return cut.to(self._device, copy=True)

    def stored(
        self, name: str, *, shape: Sequence[int], axis: int | None = None, start: int = 0, stop: int | None = None
    ) -> None:
        return None


def _safetensors(case: Case) -> Work:
    model, ctx = read_config(case.model_dir), ParallelContext.single(torch.device(case.device))

    def work() -> tuple[object, int]:
        source = _SafeOpen(case.model_dir, ctx.device)
        loaded = load_model(model, source, ctx, torch.bfloat16, on_progress=lambda done, total: None)
        return loaded, sum(layer_bytes(case.model_dir))

    return work


def _fastsafetensors(case: Case) -> Work:
    from fastsafetensors import SafeTensorsFileLoader

    def work() -> tuple[object, int]:
        loader = SafeTensorsFileLoader(None, case.device, nogds=True, disable_cache=False)
        loader.add_filenames({0: [str(path) for path in sorted(case.model_dir.glob("*.safetensors"))]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        return (loader, buffers, tensors), sum(tensor.nbytes for tensor in tensors.values())

    return work


def _runai(case: Case) -> Work:
    from runai_model_streamer import SafetensorsStreamer

    def work() -> tuple[object, int]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(
                [str(path) for path in sorted(case.model_dir.glob("*.safetensors"))], device=case.device
            )
            tensors = dict(streamer.get_tensors())
        return tensors, sum(tensor.nbytes for tensor in tensors.values())

    return work


WAYS: Mapping[str, Callable[[Case], Work]] = {
    "plain 1 thread": _plain,
    "plain all threads": _plain_threads,
    "tp 1": _ours(1),
    "tp 2 rank 0": _ours(2),
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "runai streamer": _runai,
}
PACKAGES = {"fastsafetensors": "fastsafetensors", "runai streamer": "runai_model_streamer"}


def write_checkpoint(shape: str, folder: Path, *, num_bytes: int) -> Path:
    """A model directory with as many layers of a shape as `num_bytes` hold."""
    model_dir = folder / shape
    model_dir.mkdir()
    config = json.loads((SHAPES / f"{shape}.json").read_text(encoding="utf-8"))
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    held = layer_sizes(read_config(model_dir)).held
    left = num_bytes - ITEMSIZE * (held.first + held.last + held.layers[0])
    config["num_hidden_layers"] = max(2, 1 + left // (ITEMSIZE * held.layers[-1]))
    (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = AskedShapes()
    ctx = ParallelContext.single(torch.device("meta"))
    load_model(read_config(model_dir), asked, ctx, torch.bfloat16, on_progress=lambda done, total: None)
    names: dict[str, str] = {}
    groups = list(_files(asked.shapes))
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        _write_file(model_dir / name, group)
        names |= dict.fromkeys(group, name)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    return model_dir


def layer_bytes(model_dir: Path) -> tuple[int, ...]:
    """Of what comes first, of each layer, and of what comes last."""
    held = layer_sizes(read_config(model_dir)).held
    return tuple(ITEMSIZE * size for size in (held.first, *held.layers, held.last))


def _files(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    group: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        if size >= FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = shape
        size += ITEMSIZE * int(np.prod(shape))
    yield group


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + ITEMSIZE * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = torch.randn(BLOCK_BYTES // ITEMSIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    block = memoryview(numbers.view(torch.uint8).numpy()).cast("B")
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done in range(0, end, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, end - done)])


if __name__ == "__main__":
    main()
