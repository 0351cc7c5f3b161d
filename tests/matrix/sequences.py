"""What is asked: prompts that share prefixes, their greedy answers, and float64 logits after every token.

    base    [ 107 tokens ........................... | answer ]
    short   [ 37 of base | others ....... | answer ]
    fork    [ 83 of base ........ | others ........... | answer ]
    twin    [ 83 of base ........ | others than fork's .. | answer ]
    turn    [ 113: base and its answer ..................... | others .. | answer ]
    other   [ 166 tokens of its own ................................... | answer ]

Tokens are drawn so that no correct implementation in float32 has to decide a tie: neither which token is best, nor
what a router or an indexer chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.oracle.families import make_family
from tests.oracle.golden import Array, golden, greedy

ANSWER = 6
"""Tokens of an answer."""

_LENGTHS = {"base": 107, "short": 101, "fork": 131, "twin": 118, "turn": 133, "other": 166}
_SHARED = {"short": 37, "fork": 83, "twin": 83, "turn": 107 + ANSWER}
_MAX_DRAWS = 30


@dataclass(frozen=True)
class Dialogue:
    """A prompt and its answer.

    Attributes:
        ids: of both, [T].
        prompt_len: in tokens.
        logits: [T, V] float64: what follows after every token.
        noise: of float32, see oracle.golden.Golden.
    """

    ids: list[int]
    prompt_len: int
    logits: Array
    noise: float

    @property
    def prompt(self) -> list[int]:
        """Without the answer."""
        return self.ids[: self.prompt_len]


@dataclass(frozen=True)
class Corpus:
    """A tiny model and what it says.

    Attributes:
        family: its name.
        model_dir: of the checkpoint.
        dialogues: by name.
    """

    family: str
    model_dir: Path
    dialogues: dict[str, Dialogue]

    @property
    def atol(self) -> float:
        """How far the logits of a correct float32 implementation may be: 20 times what float32 itself costs."""
        return max(20 * max(dialogue.noise for dialogue in self.dialogues.values()), 1e-5)


def make_corpus(model_dir: Path, family: str) -> Corpus:
    """Write a family's checkpoint to `model_dir` and draw its dialogues."""
    make_family(model_dir, family)
    dialogues: dict[str, Dialogue] = {}
    for i, (name, length) in enumerate(_LENGTHS.items()):
        shared = dialogues["base"].ids[: _SHARED[name]] if name in _SHARED else []
        dialogues[name] = _draw(model_dir, shared, length, seed=100 * i)
    return Corpus(family, model_dir, dialogues)


def _draw(model_dir: Path, shared: list[int], length: int, *, seed: int) -> Dialogue:
    """A dialogue without near ties."""
    for draw in range(_MAX_DRAWS):
        rest = np.random.default_rng(seed + draw).integers(3, 515, length - len(shared)).tolist()
        prompt = shared + rest
        ids = prompt + greedy(model_dir, prompt, ANSWER)
        exact = golden(model_dir, [ids])
        top = np.sort(exact.logits[0][length - 1 : -1], axis=1)
        is_clear = (top[:, -1] - top[:, -2]).min() > 4 * exact.atol and exact.gap > 4 * exact.noise
        if is_clear and 1 not in ids[length:]:  # id 1 ends the sequence
            return Dialogue(ids, length, exact.logits[0], exact.noise)
    raise AssertionError(f"no clear tokens for {model_dir.name} in {_MAX_DRAWS} draws")
