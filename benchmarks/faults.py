"""What a killed or frozen rank costs: from its end to the next token, phase by phase.

    python -m benchmarks.faults --shape qwen3-8b --tp 2
    python -m benchmarks.faults --layers 4 --kills 3 -- --spare-ranks off
    python -m benchmarks.faults --device cpu --tiny          whether it runs, in two minutes

Streams of a shape with drawn weights run over HTTP, a rank is killed (or, with --freeze, stopped), and the next token
of any stream ends the pause. Flags behind `--` go to `raycache launch`. Phases, as GET /status has them in `rebuild_s`:

    noticed          from the signal until the engine knows
    old ranks gone   until the processes before have released GPU and host tier, beyond what others of these took
    ranks started    processes, imports, CUDA's context
    host tier free   its lock
    groups           gloo and NCCL
    attention        import of FlashInfer, as far as it was not done before
    weights          reading or drawing them: not counted against the aim
    kernels          largest steps, which measure memory and load kernels
    pages, staging   device pool, pinned host memory
    graphs           CUDA graphs of decode steps and of pieces
    warm-up          none after a loss
    first token      from there on: prompts and outputs are loaded or computed again
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.client import Reply, complete
from benchmarks.figures import write_json
from benchmarks.model_shape import SHAPES, ModelShape
from benchmarks.server import launched, status
from benchmarks.trace import Prompt

_AIM_S = 6.0
_RUNNING = "ray::RankActor.run"
_PAGE_SIZE = 64
_TIMEOUT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.make(
            options.shape,
            Path(folder),
            layers=options.layers,
            is_tiny=options.tiny,
            dtype=dtype,
            device_type=options.device,
        )
        flags = [f"--tp={options.tp}", f"--cp={options.cp}", f"--page-size={_PAGE_SIZE}", f"--device={options.device}"]
        flags += ["--dummy-weights", f"--host-memory={options.host_memory}", f"--rank-timeout-s={options.timeout_s}"]
        flags += [f"--num-pages={options.num_pages}", f"--max-model-len={options.longest}", *options.flags]
        with launched(str(shape.model_dir), *flags) as endpoint:
            losses = asyncio.run(_run(options, endpoint, vocab_size=shape.model.vocab_size))
    _report(losses)
    if options.json:
        write_json(options.json, {"losses": losses, "aim_s": _AIM_S})
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(path.stem for path in SHAPES.glob("*.json")), default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="first ones that are kept; 0: all")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--freeze", action="store_true", help="stop a rank instead; it is noticed after --timeout-s")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="rank_timeout_s (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=1200, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--before-s", type=float, default=1.0, help="from requests to the loss (default: %(default)s)")
    parser.add_argument("--rest-s", type=float, default=20.0, help="between losses (default: %(default)s)")
    parser.add_argument("--num-pages", type=int, default=1024)
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink shape and work, to see whether it runs")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="of raycache launch")
    options = parser.parse_args(argv)
    if options.tiny:
        tiny = {"layers": options.layers or 2, "context": 128, "streams": 2, "num_pages": 64, "kills": 1}
        vars(options).update(tiny, host_memory="64MiB", rest_s=20.0)
    options.longest = _PAGE_SIZE * options.num_pages // (2 * options.streams)
    return options


async def _run(options: argparse.Namespace, endpoint: str, *, vocab_size: int) -> list[dict[str, float]]:
    draw, model = random.Random(0), status(endpoint)["model"]
    losses = []
    await _stream(options, endpoint, model, draw, vocab_size)  # whatever is done at the first request
    for number in range(options.kills):
        await asyncio.sleep(options.rest_s)  # ranks that stand by have started
        streams = [
            asyncio.create_task(_stream(options, endpoint, model, draw, vocab_size)) for _ in range(options.streams)
        ]
        await asyncio.sleep(options.before_s)
        began_at, began_s = time.time(), time.perf_counter()
        victims = _ranks()
        victims[number % len(victims)].send_signal(signal.SIGSTOP if options.freeze else signal.SIGKILL)
        replies = await asyncio.gather(*streams)
        after = await asyncio.to_thread(status, endpoint)
        losses.append(_phases(replies, after, began_at=began_at, began_s=began_s))
        print("  ".join(f"{name} {seconds:.2f}" for name, seconds in losses[-1].items()), file=sys.stderr, flush=True)
    return losses


async def _stream(
    options: argparse.Namespace, endpoint: str, model: str, draw: random.Random, vocab_size: int
) -> Reply:
    tokens = tuple(draw.randrange(3, vocab_size) for _ in range(options.context))
    output = min(options.output, options.longest - options.context - 1)
    prompt = Prompt(0.0, tokens, output)
    return await complete(endpoint, prompt, model=model, timeout_s=_TIMEOUT_S)


def _ranks() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).strip() == _RUNNING:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def _phases(replies: Sequence[Reply], after: dict[str, Any], *, began_at: float, began_s: float) -> dict[str, float]:
    """Phases of one loss, and the whole pause.

    Raises:
        RuntimeError: no stream was under way, or nothing was lost.
    """
    if after["lost_at"] < began_at:
        raise RuntimeError("no loss was noticed")
    noticed_s, rebuild = after["lost_at"] - began_at, dict[str, float](after["rebuild_s"])
    ready_s = began_s + noticed_s + sum(rebuild.values())
    times = [at for reply in replies for at in reply.token_times_s if at > ready_s]
    if not times:
        raise RuntimeError("all streams had ended before the rank was lost; use more --output")
    pause_s = min(times) - began_s
    first_s = min(times) - ready_s
    aside = pause_s - rebuild.get("weights", 0.0)
    return {"noticed": noticed_s, **rebuild, "first token": first_s, "pause": pause_s, "beside weights": aside}


def _report(losses: Sequence[dict[str, float]]) -> None:
    print(f"{'phase':16}{'median s':>10}{'most s':>10}")
    for name in losses[0]:
        values = [loss[name] for loss in losses]
        aim = f"   aim: {_AIM_S:.0f}" if name == "beside weights" else ""
        print(f"{name:16}{statistics.median(values):10.2f}{max(values):10.2f}{aim}")


if __name__ == "__main__":
    sys.exit(main())
