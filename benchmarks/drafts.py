"""Tokens per second with drafted tokens and without, in turns: python -m benchmarks.drafts models/smollm2

Three kinds of tasks, greedy, one stream or `--streams` of them: a record is copied with one field changed (nearly all
of the answer stands in the prompt), a list is sorted out of a text (parts do), a story is told (nothing does). Outputs
with drafts are compared with those without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import write_json
from benchmarks.settings import add_settings
from raycache.llm import LLM
from raycache.types import SamplingParams

_NAMES = ("Ada", "Bruno", "Chiara", "Deniz", "Emeka", "Freya", "Goran", "Hana")
_TOWNS = ("Porto", "Graz", "Lund", "Turin", "Ghent", "Brno", "Split", "Vigo")
_NEW_TOKENS = 160


@dataclass
class Run:
    """One configuration on one task.

    Attributes:
        outputs: token ids of each stream.
        tokens_per_s: of all streams.
        drafted, accepted: draft tokens by place, and the right ones.
    """

    outputs: list[list[int]]
    tokens_per_s: float
    drafted: dict[int, int]
    accepted: dict[int, int]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory")
    parser.add_argument("--streams", type=int, default=1, help="at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--draft", default="ngram", help="who drafts, as in raycache launch (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--fixed", action="store_true", help="always draft so many, whether it pays or not")
    add_settings(parser, whose="both engines")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()

    drafts = {"draft": options.draft, "draft_tokens": options.draft_tokens, "adaptive_drafts": not options.fixed}
    settings = {"prefix_cache": False, **dict(options.set)}
    llms = {"off": LLM(options.model, **settings), "on": LLM(options.model, **settings, **drafts)}
    figures = []
    print(f"{'task':<8} {'off tok/s':>10} {'on tok/s':>10} {'on/off':>7} {'each round':>24}  {'right, by place'}")
    for task, prompts in _tasks(options.streams).items():
        rounds: list[dict[str, Run]] = []
        for number in range(options.rounds + 1):
            order = list(llms.items())[:: 1 if number % 2 else -1]
            rounds.append({name: _run(llm, prompts) for name, llm in order})
        rounds = rounds[1:]  # the first warms up
        ratios = [each["on"].tokens_per_s / each["off"].tokens_per_s for each in rounds]
        is_same = all(each["on"].outputs == each["off"].outputs for each in rounds)
        last = rounds[-1]["on"]
        places = {place: last.accepted.get(place, 0) / made for place, made in sorted(last.drafted.items()) if made}
        row = {
            "task": task,
            "off_tokens_per_s": statistics.median(each["off"].tokens_per_s for each in rounds),
            "on_tokens_per_s": statistics.median(each["on"].tokens_per_s for each in rounds),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "accepted_by_place": places,
            "is_same": is_same,
        }
        figures.append(row)
        print(
            f"{task:<8} {row['off_tokens_per_s']:>10.1f} {row['on_tokens_per_s']:>10.1f} {row['ratio']:>7.2f} "
            f"{' '.join(f'{ratio:.2f}' for ratio in ratios):>24}  "
            f"{' '.join(f'{share:.2f}' for share in places.values())}{'' if is_same else '  OTHER OUTPUTS'}",
            flush=True,
        )
    for llm in llms.values():
        llm.close()
    if options.json:
        write_json(options.json, {"options": {**vars(options), "json": str(options.json)}, "tasks": figures})
    return 0 if all(row["is_same"] for row in figures) else 1


def _run(llm: LLM, prompts: Sequence[str]) -> Run:
    before = llm.stats()
    sampling = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    completions = llm.generate(list(prompts), sampling)
    took = time.perf_counter() - begin
    after = llm.stats()
    outputs = [list(completion.token_ids) for completion in completions]
    return Run(
        outputs,
        sum(map(len, outputs)) / took,
        _more(after.drafted, before.drafted),
        _more(after.accepted, before.accepted),
    )


def _more(after: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    return {place: count - before.get(place, 0) for place, count in after.items()}


def _tasks(streams: int) -> dict[str, list[str]]:
    drawn = random.Random(7)
    tasks: dict[str, list[str]] = {"copy": [], "extract": [], "story": []}
    for _ in range(streams):
        people = [
            {
                "name": name,
                "town": drawn.choice(_TOWNS),
                "age": drawn.randint(20, 80),
                "id": drawn.randint(10**6, 10**7),
            }
            for name in drawn.sample(_NAMES, 6)
        ]
        record = json.dumps(people, indent=1)
        tasks["copy"].append(f"Here is a file:\n{record}\n\nHere is the same file again, unchanged:\n")
        text = " ".join(
            f"{p['name']}, who is {p['age']}, lives in {p['town']} and has number {p['id']}." for p in people
        )
        tasks["extract"].append(f"{text}\n\nThe same as a list, a line per person with name, town and number:\n- ")
        tasks["story"].append(
            f"Once upon a time in {drawn.choice(_TOWNS)} there lived a baker called {people[0]['name']}"
        )
    return tasks


if __name__ == "__main__":
    sys.exit(main())
