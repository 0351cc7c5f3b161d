"""How often drafts of each kind are accepted on a device, to be compared with another: the same models, prompts, seeds.

    python -m benchmarks.accept_rates --device cpu --json cpu.json
    python -m benchmarks.accept_rates --device cuda --against cpu.json
    python -m benchmarks.accept_rates --device cuda --set cp=2 --set decode_split=on --against cpu.json

Models are small and random, and made such that drafts are right now and then (tests/oracle/draft_models.py). Half of
the prompts are greedy, the others sampled with seeds. `z` is the difference to the other device in standard errors of
such shares; the exit code is 1 if one is beyond 4. Outputs that are equal on both say how often rounding decided.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import write_json
from benchmarks.settings import add_settings
from raycache.llm import LLM
from raycache.types import SamplingParams
from tests.oracle.draft_pairs import PAIRS

_PAGE_SIZE = 16
_VOCAB = 515
_MOST_Z = 4.0
_HEAD = f"{'draft':<18}{'dtype':<10}{'requests':<10}{'right / made':>14}  {'by place':<18}{'there':>6}{'z':>7}  equal"


def main() -> int:
    options = _options()
    there = json.loads(options.against.read_text())["figures"] if options.against else {}
    figures: dict[str, dict[str, Any]] = {}
    print(_HEAD)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            target, draft = PAIRS[kind](Path(folder))
            for dtype in options.dtypes:
                for requests, found in _measure(str(target), draft, dtype, options).items():
                    name = f"{kind}, {dtype}, {requests}"
                    figures[name] = found
                    against = _against(found, there[name]) if name in there else {}
                    found |= against
                    print(_row(kind, dtype, requests, found), flush=True)
    if options.json:
        write_json(options.json, {"options": {k: str(v) for k, v in vars(options).items()}, "figures": figures})
    return 1 if any(abs(found.get("z", 0.0)) > _MOST_Z for found in figures.values()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accept_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kinds", type=_listed, default=list(PAIRS), help=f"of {', '.join(PAIRS)} (default: all)")
    parser.add_argument("--dtypes", type=_listed, default=["float32", "bfloat16"], help="(default: float32,bfloat16)")
    parser.add_argument("--prompts", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="of an output (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=3, help="default: %(default)s")
    add_settings(parser, whose="the engine")
    parser.add_argument("--against", metavar="FILE", type=Path, help="figures of another device")
    parser.add_argument("--json", metavar="FILE", type=Path)
    return parser.parse_args()


def _listed(text: str) -> list[str]:
    return text.split(",")


def _measure(target: str, draft: str, dtype: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of greedy and of sampled requests."""
    lengths = [20 + 7 * i for i in range(options.prompts)]
    prompts = [np.random.default_rng(length).integers(3, _VOCAB, length).tolist() for length in lengths]
    settings = {
        "device": options.device,
        "dtype": dtype,
        "draft": draft,
        "draft_tokens": options.draft_tokens,
        "adaptive_drafts": False,
        "page_size": _PAGE_SIZE,
        "num_pages": 64 + sum(lengths) // _PAGE_SIZE + options.prompts * (2 + options.tokens // _PAGE_SIZE),
        "max_running": min(options.prompts, 16),
        "max_model_len": max(lengths) + options.tokens,
        "prefix_cache": False,
        **dict(options.set),
    }
    found = {}
    with LLM(target, **settings) as llm:
        for requests, wishes in (("greedy", {"temperature": 0.0}), ("sampled", {"temperature": 0.8, "top_p": 0.95})):
            before = llm.stats()
            sampling = [
                SamplingParams(**wishes, seed=seed, max_tokens=options.tokens, ignore_eos=True)
                for seed in range(options.prompts)
            ]
            outputs = [list(each.token_ids) for each in llm.generate(prompts, sampling)]
            after = llm.stats()
            found[requests] = {
                "made": _more(after.drafted, before.drafted),
                "right": _more(after.accepted, before.accepted),
                "outputs": outputs,
            }
    return found


def _more(after: Mapping[int, int], before: Mapping[int, int]) -> list[int]:
    """What was added, by place."""
    return [count - before.get(place, 0) for place, count in sorted(after.items())]


def _against(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, float]:
    """The other device's share, the difference in standard errors, and the share of outputs that are equal."""
    (right, made), (right_there, made_there) = (
        (sum(found["right"]), max(sum(found["made"]), 1)) for found in (here, there)
    )
    both = (right + right_there) / (made + made_there)
    error = math.sqrt(max(both * (1 - both), 1e-9) * (1 / made + 1 / made_there))
    equal = [one == other for one, other in zip(here["outputs"], there["outputs"], strict=False)]
    return {
        "there": right_there / made_there,
        "z": (right / made - right_there / made_there) / error,
        "equal": sum(equal) / max(len(equal), 1),
    }


def _row(kind: str, dtype: str, requests: str, found: Mapping[str, Any]) -> str:
    right: Sequence[int] = found["right"]
    made: Sequence[int] = found["made"]
    share = sum(right) / max(sum(made), 1)
    places = " ".join(f"{one / all_:.2f}" for one, all_ in zip([*right, *[0] * len(made)], made, strict=False) if all_)
    row = f"{kind:<18}{dtype:<10}{requests:<10}{f'{sum(right)}/{sum(made)} {share:.3f}':>14}  {places:<18}"
    return row + (f"{found['there']:>6.3f}{found['z']:>7.2f}  {found['equal']:.2f}" if "z" in found else "")


if __name__ == "__main__":
    sys.exit(main())
