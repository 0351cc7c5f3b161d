"""Speed of serving real shapes on one GPU, against what the device can do at most, without checkpoints.

    python -m benchmarks.serve_gpu
    python -m benchmarks.serve_gpu --shapes qwen3-8b --only decode,idle --batches 64 --json out.json
    python -m benchmarks.serve_gpu --layers 4 --set attention=torch
    python -m benchmarks.serve_gpu --shapes gpt-oss-20b --weights stored,bfloat16
    python -m benchmarks.serve_gpu --device cpu --tiny            whether it runs, in seconds

    decode    median step of a batch, over the time to read its weights and its cache once at the speed of a copy
    uneven    the same at batch 64, where one sequence has four long prompts' tokens, as far as the model takes them
    prefill   FLOPs of a prompt's products and attention per second, over those of a large matrix product
    idle      share of a decode step at batch 64 in which the GPU waits for the host
    hit       first token of a prompt whose prefix is in host memory, over that of one whose prefix is on the device
    tiers     mean step at batch 64 with a host tier that is written through, over that without one

The engine runs in this process, without HTTP and Ray. Weights are drawn on the device, prompts are random tokens.
Ceilings and figures are of the same run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ceilings import Ceilings
from benchmarks.figures import write_json
from benchmarks.model_shape import SHAPES, ModelShape
from benchmarks.settings import add_settings
from benchmarks.steps import Clock
from raycache.errors import RayCacheError
from raycache.llm import LLM
from raycache.types import CacheAction, CacheCommand

_PAGE_SIZE = 64
_KINDS = ("decode", "uneven", "prefill", "idle", "hit", "tiers")
_TIER_SHAPES = ("qwen3-8b",)
"""Those of which two engines fit on one GPU."""
_IDLE_BATCH = 64
_SHORT_QUESTION = 48
_ROUNDS = 3
_CLEAR_DEVICE = CacheCommand(CacheAction.CLEAR, tiers=("device",))
_SETTLE = CacheCommand(CacheAction.STATUS)


@dataclass(frozen=True)
class Line:
    """One figure.

    Attributes:
        shape: of the model.
        what: was measured.
        value: in `unit`.
        unit: of the value.
        against: what it is compared with, in the same unit.
        ratio: of the two.
        aim: of the ratio, with its direction, or "".
    """

    shape: str
    what: str
    value: float
    unit: str
    against: float
    ratio: float
    aim: str = ""


class Bench:
    """Measures one shape.

    Args:
        shape: of the model.
        ceilings: of the device.
        options: of the command line.
        weights: form of those that the shape has quantised.
    """

    def __init__(self, shape: ModelShape, ceilings: Ceilings, options: argparse.Namespace, *, weights: str) -> None:
        self._shape, self._ceilings, self._options = shape, ceilings, options
        self._weights = weights
        self._name = shape.model_dir.name.removesuffix("-auto")
        self._batch = min(_IDLE_BATCH, max(options.batches))

    def run(self) -> Iterator[Line]:
        """Measure what was asked for."""
        only = self._options.only
        has_tiers = self._name in _TIER_SHAPES and only & {"hit", "tiers"}
        with self._open(batch=max(self._options.batches)) as llm:
            clock = Clock(llm.engine)
            if "prefill" in only:
                yield self._prefill(clock)
            if only & {"decode", "idle"}:
                yield from self._decode(clock)
            if "uneven" in only:
                yield self._uneven(clock, most=llm.engine.info.max_model_len)
            if has_tiers:
                tiers = {"host_memory": f"{self._options.host_gib}GiB"}
                with self._open(batch=self._batch, **tiers) as tiered:
                    if "hit" in only:
                        yield from self._hits(tiered)
                    if "tiers" in only:
                        yield self._tiers(clock, Clock(tiered.engine))

    @contextmanager
    def _open(self, *, batch: int, **settings: Any) -> Iterator[LLM]:
        """An engine for a batch, and for a long prompt."""
        options = self._options
        tokens = batch * (options.context + 4 * options.steps + 256) + 4 * options.prompt
        start_s = time.perf_counter()
        llm = LLM(
            str(self._shape.model_dir),
            device=options.device,
            dtype=options.dtype,
            dummy_weights=True,
            weights=self._weights,
            page_size=_PAGE_SIZE,
            num_pages=tokens // _PAGE_SIZE + batch,
            max_running=batch,
            **{**options.set, **settings},
        )
        print(f"{self._name}: ready after {time.perf_counter() - start_s:.1f} s", flush=True)
        try:
            yield llm
        finally:
            llm.close()

    def _prefill(self, clock: Clock) -> Line:
        tokens = self._options.prompt
        seconds = [clock.first(clock.draw(tokens)).seconds for _ in range(1 + _ROUNDS)][1:]
        speed, peak = self._shape.prefill_flops(tokens) / statistics.median(seconds), self._ceilings.matmul_flops
        what = f"prefill of {tokens}, {1e3 * statistics.median(seconds):.1f} ms"
        return Line(self._name, what, speed / 1e12, "TFLOP/s", peak / 1e12, speed / peak, ">= 0.60")

    def _decode(self, clock: Clock) -> Iterator[Line]:
        options = self._options
        prompts = [clock.draw(options.context) for _ in range(max(options.batches))]
        for batch in sorted(options.batches, reverse=True):  # smaller batches find their prompts in the cache
            with clock.decoding(prompts[:batch], steps=3 * options.steps) as context:
                seconds = statistics.median(clock.step_seconds(options.steps, batch=batch))
                if "decode" in options.only:
                    yield self._decode_line(f"context {context:.0f}", [context + options.steps / 2] * batch, seconds)
                if "idle" in options.only and batch == self._batch and options.device == "cuda":
                    yield self._idle_line(clock, batch, seconds)
                if options.kernels:
                    print(f"batch {batch}\n{clock.trace(options.steps).describe(options.kernels)}", flush=True)

    def _uneven(self, clock: Clock, *, most: int) -> Line:
        options, batch = self._options, self._batch
        longest = min(4 * options.prompt, most - options.steps - 2 * batch - 128)  # with what `decoding` adds
        prompts = [clock.draw(count) for count in (longest, *[options.context] * (batch - 1))]
        with clock.decoding(prompts, steps=options.steps) as context:
            seconds = statistics.median(clock.step_seconds(options.steps, batch=batch))
        grown = context - sum(map(len, prompts)) // batch + options.steps / 2
        what = f"contexts {len(prompts[0])} and {options.context}"
        return self._decode_line(what, [len(prompt) + grown for prompt in prompts], seconds)

    def _decode_line(self, what: str, contexts: Sequence[float], seconds: float) -> Line:
        num_bytes = self._shape.step_weight_bytes(len(contexts)) + sum(map(self._shape.step_cache_bytes, contexts))
        floor = num_bytes / self._ceilings.copy_bytes_s
        what = f"decode, batch {len(contexts)}, {what}"
        return Line(self._name, what, 1e3 * seconds, "ms", 1e3 * floor, seconds / floor, "<= 1.25")

    def _idle_line(self, clock: Clock, batch: int, seconds: float) -> Line:
        waits = seconds - clock.trace(self._options.steps).busy_s
        what = f"decode, batch {batch}: GPU waits for the host"
        return Line(self._name, what, 1e3 * waits, "ms", 1e3 * seconds, waits / seconds, "< 0.03")

    def _hits(self, llm: LLM) -> Iterator[Line]:
        clock, tokens = Clock(llm.engine, seed=1), self._options.prompt
        prefix = clock.draw(tokens)
        clock.first(prefix + clock.draw(_SHORT_QUESTION))
        link_ms = 1e3 * self._shape.move_bytes(tokens) / self._ceilings.link_bytes_s
        for question in (_SHORT_QUESTION, tokens // 2):
            found: dict[str, list[float]] = {"device": [], "host": []}
            for number in range(1 + _ROUNDS):
                for tier, seconds in found.items():
                    llm.cache(_CLEAR_DEVICE if tier == "host" else _SETTLE)
                    first = clock.first(prefix + clock.draw(question))
                    if dict(first.cached) != {tier: tokens}:
                        print(f"hit: {dict(first.cached)} was cached, wanted was {tier}: {tokens}", flush=True)
                    if number:
                        seconds.append(1e3 * first.seconds)
                    llm.cache(_SETTLE)
            device, host = (statistics.median(found[tier]) for tier in ("device", "host"))
            what = f"host hit of {tokens}, then {question} new; bare link {link_ms:.1f} ms"
            yield Line(self._name, what, host, "ms", device, host / device, "<= 1.05")

    def _tiers(self, off: Clock, on: Clock) -> Line:
        found: dict[str, list[float]] = {"off": [], "on": []}
        steps = 4 * self._options.steps
        for _ in range(2):
            for name, clock in (("off", off), ("on", on)):
                prompts = [clock.draw(self._options.context) for _ in range(self._batch)]
                with clock.decoding(prompts, steps=steps):
                    found[name].append(statistics.mean(clock.step_seconds(steps, batch=self._batch)))
        # The mean: pages are saved in some steps and not in others.
        plain, tiered = (1e3 * statistics.mean(found[name]) for name in ("off", "on"))
        what = f"decode, batch {self._batch}, written through to the host"
        return Line(self._name, what, tiered, "ms", plain, tiered / plain, "<= 1.02")


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; the exit code says whether all shapes ran."""
    options = _options(argv)
    device, dtype = torch.device(options.device), {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    print(f"torch {torch.__version__}, {_device_name(device)}", flush=True)
    ceilings = Ceilings.measure(device, dtype)
    print(ceilings.describe(), flush=True)
    lines, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, weights in itertools.product(options.shapes, options.weights):
            gc.collect()  # the engine of the shape before
            torch.cuda.empty_cache()
            try:
                shape = ModelShape.make(
                    name,
                    Path(folder),
                    layers=options.layers,
                    is_tiny=options.tiny,
                    dtype=dtype,
                    weights=weights,
                    device_type=options.device,
                )
                size = f"{shape.model.num_layers} layers, {shape.weight_bytes / 2**30:.1f} GiB of weights"
                print(f"{shape.model_dir.name}: {size}, the embedding aside")
                for line in Bench(shape, ceilings, options, weights=weights).run():
                    print(_row(line), flush=True)
                    lines.append(line)
            except (RayCacheError, RuntimeError):  # the other shapes can still be measured
                traceback.print_exc()
                failed.append(f"{name}-{weights}")
    print(f"\n{_HEAD}\n" + "\n".join(map(_row, lines)))
    if failed:
        print(f"failed: {', '.join(failed)}")
    if options.json:
        write_json(options.json, {"ceilings": asdict(ceilings), "lines": [asdict(line) for line in lines]})
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_gpu", description="Serving on one GPU.")
    names = sorted(path.stem for path in SHAPES.glob("*.json"))
    parser.add_argument("--shapes", type=_listed(names), default=names, help="(default: all of benchmarks/shapes)")
    parser.add_argument("--only", type=_listed(_KINDS), default=list(_KINDS), help="kinds of lines (default: all)")
    parser.add_argument("--layers", type=int, default=0, help="first ones that are kept; 0: all")
    parser.add_argument("--batches", type=_counts, default=[1, 64, 256], help="of decode (default: 1,64,256)")
    parser.add_argument(
        "--context", type=int, default=1024, help="tokens of a prompt in a batch (default: %(default)s)"
    )
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a long prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="of a batch that count (default: %(default)s)")
    parser.add_argument("--host-gib", type=int, default=4, help="of the host tier (default: %(default)s)")
    parser.add_argument(
        "--kernels", type=int, default=0, help="so many are named of decode steps, on a GPU (default: none)"
    )
    parser.add_argument(
        "--weights",
        type=_listed(("auto", "stored", "bfloat16")),
        default=["auto"],
        help="forms of the weights that a shape has quantised, one after the other (default: auto)",
    )
    add_settings(parser, whose="raycache")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink the shapes and the work, to see whether it runs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    options = parser.parse_args(argv)
    if options.tiny:
        tiny = {"layers": options.layers or 8, "batches": [1, 4], "context": 64, "prompt": 256, "steps": 4}
        vars(options).update(tiny, host_gib=1)
    options.only, options.set = set(options.only), dict(options.set)
    options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    return options


def _listed(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return found

    return parse


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


_HEAD = f"{'shape':30}{'what':62}{'measured':>12}{'against':>12}  {'unit':8}{'ratio':>8}  aim"


def _row(line: Line) -> str:
    figures = f"{line.value:12,.3f}{line.against:12,.3f}  {line.unit:8}{line.ratio:8.3f}"
    return f"{line.shape:30}{line.what:62}{figures}  {line.aim}"


if __name__ == "__main__":
    sys.exit(main())
