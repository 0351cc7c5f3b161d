"""Streams of requests drawn at random: prompts of any length that share prefixes, cancelled, urgent, evicted."""

from __future__ import annotations

import numpy as np

from tests.matrix.sequences import ANSWER
from tests.matrix.trial import Trial


def draw_settings(random: np.random.Generator) -> dict[str, int | str]:
    """Settings of a scheduler, often with too little room."""
    choices = {
        "max_step_tokens": (8, 13, 24, 40, 72, 200),
        "num_pages": (28, 34, 48, 100),
        "restore_points": (1, 3, 24),
        "max_running": (1, 2, 4, 6),
        "restore_interval": (0, 0, 16, 32, 40),
    }
    drawn: dict[str, int | str] = {name: int(random.choice(values)) for name, values in choices.items()}
    return drawn | {"restore_interval": drawn["restore_interval"] or "none"}


def run_stream(trial: Trial, random: np.random.Generator, *, point_space: str) -> None:
    """Ask for something, do some steps, sometimes cancel or evict something; again until all is answered.

    Args:
        trial: new.
        random: where everything is drawn from.
        point_space: of restore points, "" for none.
    """
    names = list(trial.corpus.dialogues)
    for _ in range(random.integers(6, 16)):
        name = str(random.choice(names))
        length = int(random.integers(1, trial.corpus.dialogues[name].prompt_len)) if random.random() < 0.5 else 0
        num_tokens = int(random.integers(1, ANSWER + 1))
        trial.add(name, length=length, num_tokens=num_tokens, priority=int(random.integers(0, 2)))
        for _ in range(random.integers(0, 6)):
            trial.step()
        _disturb(trial, random, point_space=point_space)
        trial.engine.check()
    trial.finish()


def _disturb(trial: Trial, random: np.random.Generator, *, point_space: str) -> None:
    match random.integers(0, 6):
        case 0:
            if unfinished := [asked for asked in trial.asked if not (asked.is_done or asked.is_cancelled)]:
                trial.cancel(unfinished[random.integers(len(unfinished))])
        case 1 if point_space:
            trial.cache.device.tree.evict_point(point_space)
        case 2:
            trial.evict_pages(int(random.integers(1, 9)))
        case _:
            pass
