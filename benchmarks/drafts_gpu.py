"""Tokens per second in decode with the drafts of a prediction layer and without, in turns.

    python -m benchmarks.drafts_gpu
    python -m benchmarks.drafts_gpu --batches 1,32 --draft-tokens 2 --noise 0.004
    python -m benchmarks.drafts_gpu --set cp=2 --set decode_split=on       on two GPUs
    python -m benchmarks.drafts_gpu --device cpu --tiny        whether it runs, in seconds

Weights are drawn, so nothing is predicted by them; they are drawn such that layers add little (`--noise` of what they
would) to the embedded token, and the prediction layer passes it on: then both say nearly the same, and the less they
add, the more often drafts are accepted. What is measured holds for the acceptance rate that is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import write_json
from benchmarks.model_shape import ModelShape
from benchmarks.settings import add_settings
from benchmarks.steps import Clock
from raycache.checkpoint.dummy_weights import DummyWeights
from raycache.llm import LLM
from raycache.rank import loading

_SHAPE = "moonlight-16b-mtp"
_PAGE_SIZE = 64


class AgreeingWeights(DummyWeights):
    """Drawn so that a model and its prediction layer agree most of the time.

    Attributes:
        noise: of what layers add.
    """

    noise = 0.0

    def _draw(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = super()._draw(name, shape)
        if name.endswith("eh_proj.weight"):
            tensor.zero_()[:, : shape[0]].fill_diagonal_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(self.noise)
        return tensor


def main() -> int:
    options = _options()
    _draw_agreeing(options.noise)
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        shape = ModelShape.make(_SHAPE, Path(folder), layers=0, is_tiny=options.tiny, dtype=getattr(torch, dtype))
        drafts = {"draft": "mtp", "draft_tokens": options.draft_tokens, "adaptive_drafts": options.adaptive}
        llms = {name: _open(shape, options, dtype, more) for name, more in (("off", {}), ("on", drafts))}
        figures = [_compare(llms, batch, options) for batch in options.batches]
        for llm in llms.values():
            llm.close()
    if options.json:
        write_json(options.json, {"options": {**vars(options), "json": str(options.json)}, "batches": figures})
    return 0


def _draw_agreeing(noise: float) -> None:
    """Let ranks of this process draw their weights so."""
    AgreeingWeights.noise = noise
    loading.DummyWeights = AgreeingWeights  # type: ignore[attr-defined]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="shrink the model to what runs anywhere")
    parser.add_argument("--batches", default="1,32", help="streams at a time (default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--draft-tokens", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--noise", type=float, default=0.004, help="default: %(default)s")
    parser.add_argument("--adaptive", action="store_true", help="draft only as many as pay")
    add_settings(parser, whose="both engines")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    return options


def _open(shape: ModelShape, options: argparse.Namespace, dtype: str, more: dict[str, Any]) -> LLM:
    batch = max(options.batches)
    tokens = batch * (options.context + 3 * options.steps * (1 + options.draft_tokens) + 512)
    start_s = time.perf_counter()
    llm = LLM(
        str(shape.model_dir),
        device=options.device,
        dtype=dtype,
        dummy_weights=True,
        page_size=_PAGE_SIZE,
        num_pages=tokens // _PAGE_SIZE + batch,
        max_running=batch,
        **dict(options.set),
        **more,
    )
    print(f"ready after {time.perf_counter() - start_s:.1f} s", flush=True)
    return llm


def _compare(llms: dict[str, LLM], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    before = llms["on"].stats()
    for number in range(options.rounds):
        for name, llm in list(llms.items())[:: 1 if number % 2 else -1]:
            found[name].append(_pace(Clock(llm.engine, seed=number), batch, options))
    after = llms["on"].stats()
    right = {
        place: (after.accepted.get(place, 0) - before.accepted.get(place, 0)) / (made - before.drafted.get(place, 0))
        for place, made in sorted(after.drafted.items())
        if made > before.drafted.get(place, 0)
    }
    paces = {name: statistics.median(pace for pace, _ in rounds) for name, rounds in found.items()}
    step_ms = {name: 1e3 * statistics.median(step for _, step in rounds) for name, rounds in found.items()}
    ratios = [on[0] / off[0] for on, off in zip(found["on"], found["off"], strict=True)]
    print(
        f"batch {batch}: off {paces['off']:.0f} tokens/s ({step_ms['off']:.2f} ms a step), on {paces['on']:.0f} "
        f"({step_ms['on']:.2f} ms), on/off {statistics.median(ratios):.2f} "
        f"[{' '.join(f'{ratio:.2f}' for ratio in ratios)}], right by place "
        f"{' '.join(f'{share:.2f}' for share in right.values())}",
        flush=True,
    )
    return {"batch": batch, "tokens_per_s": paces, "step_ms": step_ms, "ratios": ratios, "right_by_place": right}


def _pace(clock: Clock, batch: int, options: argparse.Namespace) -> tuple[float, float]:
    """(tokens per second, seconds per step) of sequences that all decode."""
    prompts = [clock.draw(options.context) for _ in range(batch)]
    with clock.decoding(prompts, steps=(2 * options.steps + 16) * (1 + options.draft_tokens)):
        begin, tokens = time.perf_counter(), 0
        for _ in range(options.steps):
            tokens += clock.step()
        took = time.perf_counter() - begin
    return tokens / took, took / options.steps


if __name__ == "__mp_main__":  # ranks in processes of their own import this file again, with the same arguments
    _draw_agreeing(_options().noise)

if __name__ == "__main__":
    sys.exit(main())
