"""Pages in use while one long prompt runs through a model with windows, on the CPU.

    python -m benchmarks.window                                       a tiny random gemma3 with windows of 512
    python -m benchmarks.window models/gemma3-270m --tokens 8192
    python -m benchmarks.window --restore-interval 2048 none          one run for each

Layers that see everything keep the pages of all tokens. Those with a window keep what the next token sees, and at each
restore point what the token after it would see. Pages are counted in every step when it has its own.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import write_json
from raycache.config import Config
from raycache.decider.engine import Engine
from raycache.deployment.deployment import deploy
from raycache.gang.build import build_engine
from raycache.gang.executors import LocalExecutor
from raycache.memory.component import FULL, Reuse
from raycache.parallel.board import Acks
from raycache.parallel.sharding import Coords, Split
from raycache.rank.build import load
from raycache.rank.member import alone
from raycache.types import GenerateRequest, SamplingParams
from raycache.wire.plan import Masks, StepPlan
from raycache.wire.results import RowResult

_NEW_TOKENS = 16
_WINDOW = 512


@dataclass(frozen=True)
class Held:
    """What is taken of the pool at one moment.

    Attributes:
        tokens: computed, those of the step in flight included.
        points: restore points.
        pages: space -> pages or slots, of the sequence and of what is kept for others.
    """

    tokens: int
    points: int
    pages: Mapping[str, int]


class Watched:
    """An executor that looks at the engine whenever a step has its pages.

    Args:
        executor: of the rank.
        look: called before each step is executed.
    """

    def __init__(self, executor: LocalExecutor, look: Callable[[], None]) -> None:
        self.depth = executor.depth
        self._executor, self._look = executor, look

    def submit(self, plan: StepPlan) -> None:
        self._look()
        self._executor.submit(plan)

    def send_masks(self, plan: StepPlan, masks: Masks) -> None:
        self._executor.send_masks(plan, masks)

    def collect(self, plan: StepPlan) -> Sequence[RowResult]:
        return self._executor.collect(plan)

    def acks(self) -> Acks:
        return self._executor.acks()

    def close(self) -> None:
        self._executor.close()


class LongPrompt:
    """An engine and one rank in this process, as `LLM` puts them together, and a prompt for them.

    Args:
        model: directory.
        tokens: of prompt and output together.
        settings: fields of Config.
    Attributes:
        config, model: of the run.
        sizes: space -> bytes of a page or slot.
        history: what was held in each step.
    """

    def __init__(self, model: Path, *, tokens: int, **settings: int) -> None:
        self.config = Config(model=str(model), device="cpu", max_running=1, **settings)
        self._deployment = deploy(self.config, device_type="cpu")
        self.model, self.parts = self._deployment.model, self._deployment.components
        self.sizes: dict[str, int] = {}
        for part in self.parts:
            size = self._deployment.unit_bytes(part, Split(), Coords(pp=0, cp=0, tp=0))
            self.sizes[part.space] = self.sizes.get(part.space, 0) + size
        self.history: list[Held] = []
        draw = random.Random(0)
        self._prompt = [draw.randrange(3, self.model.vocab_size) for _ in range(tokens - _NEW_TOKENS)]
        self._engine = self._build()
        self._count = 0

    def _build(self) -> Engine:
        loaded = load(self._deployment, alone())
        num_pages = loaded.measure()
        executor = Watched(LocalExecutor(loaded.build(num_pages)), lambda: self.history.append(self.held()))
        return build_engine(executor, self._deployment, num_pages=num_pages)

    def held(self) -> Held:
        """What is held now."""
        stats = self._engine.stats()
        pages = {space: total - free for space, (total, free) in stats.spaces.items()}
        pages[FULL] = stats.pages_total - stats.pages_free
        return Held(stats.computed_tokens, stats.restore_points, pages)

    def run(self) -> tuple[int, float]:
        """Generate after the prompt. Returns: tokens that came from the cache, seconds to the first token."""
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
        start_s = time.perf_counter()
        self._engine.add(GenerateRequest(str(self._count), self._prompt, sampling))
        cached, first_s = 0, 0.0
        while self._engine.has_requests:
            for output in self._engine.step():
                cached, first_s = output.cached_tokens, first_s or time.perf_counter() - start_s
            self._engine.check()
        return cached, first_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print one table per interval."""
    options = _options(argv)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _make_tiny(Path(folder) / "tiny-gemma3", tokens=options.tokens)
        for interval in options.restore_interval:
            num_pages = -(-options.tokens // options.page_size)
            settings = {"page_size": options.page_size, "num_pages": num_pages, "restore_interval": interval}
            long = LongPrompt(model, tokens=options.tokens, restore_points=options.restore_points, **settings)
            figures.append({"restore_interval": interval, **_measure(long, rows=options.rows)})
    if options.json:
        write_json(options.json, {"model": str(model), "tokens": options.tokens, "runs": figures})
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window", description="Pages of a model with windows.")
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, help="directory; default: a tiny random gemma3")
    parser.add_argument("--tokens", type=int, default=32768, help="of prompt and output (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page (default: %(default)s)")
    parser.add_argument(
        "--restore-interval",
        type=_number,
        nargs="+",
        default=[2048, "none"],
        help="one run each (default: %(default)s)",
    )
    parser.add_argument("--restore-points", type=_number, default="auto", help="as of launch (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="of the table (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")
    return parser.parse_args(argv)


def _number(text: str) -> int | str:
    return text if text in ("auto", "none") else int(text)


def _make_tiny(model_dir: Path, *, tokens: int) -> Path:
    from tests.oracle.families import make_family

    return make_family(model_dir, "gemma3", sliding_window=_WINDOW, max_position_embeddings=tokens)


def _measure(long: LongPrompt, *, rows: int) -> dict[str, object]:
    """Run, print and return what was held."""
    _print_head(long)
    _, cold_s = long.run()
    end, history = long.held(), list(long.history)
    every = max(1, len(history) // rows)
    for held in [*history[every - 1 : -_NEW_TOKENS : every], end]:
        _print_row(long, held)
    peak = {space: max(held.pages[space] for held in history) for space in long.sizes}
    cached, warm_s = long.run()
    for space in long.sizes:
        _print_space(long, space, peak=peak[space], end=end)
    print(f"the same prompt again: {cached:,} tokens from the cache, {warm_s:.1f} s instead of {cold_s:.1f} s\n")
    return {
        "peak_pages": peak,
        "end_pages": end.pages,
        "end_restore_points": end.points,
        "page_bytes": long.sizes,
        "cached_tokens": cached,
        "first_token_s": [cold_s, warm_s],
    }


def _print_head(long: LongPrompt) -> None:
    kinds = ", ".join(
        f"{len(part.layers)} of {long.model.num_layers} layers with {_reach(part.window, part.reuse)}"
        for part in long.parts
    )
    print(f"{long.model.name}: {kinds}; restore_interval={long.config.restore_interval}")
    spaces = "".join(f"{f'{space} pages':>14}{'MB':>9}" for space in long.sizes)
    print(f"{'tokens':>9}{'restore points':>16}{spaces}", flush=True)


def _reach(window: int, reuse: Reuse) -> str:
    return "a state" if reuse is Reuse.STATE_HERE else f"a window of {window}" if window else "all tokens"


def _print_row(long: LongPrompt, held: Held) -> None:
    spaces = "".join(
        f"{held.pages[space]:14,}{held.pages[space] * size / 1e6:9.2f}" for space, size in long.sizes.items()
    )
    print(f"{held.tokens:9,}{held.points:16}{spaces}")


def _print_space(long: LongPrompt, space: str, *, peak: int, end: Held) -> None:
    """Peak and end of a window's space, against pages for all tokens."""
    if space == FULL or not any(part.space == space and part.window for part in long.parts):
        return
    size, all_pages = long.sizes[space], end.pages[FULL]
    print(
        f"{space}: at most {peak} pages, {peak * size / 1e6:.2f} MB, at the end {end.pages[space]} pages, "
        f"{end.pages[space] * size / 1e6:.2f} MB; for all tokens it would be {all_pages} pages, "
        f"{all_pages * size / 1e6:.2f} MB ({all_pages / max(peak, 1):.1f} times the peak)"
    )


if __name__ == "__main__":
    sys.exit(main())
