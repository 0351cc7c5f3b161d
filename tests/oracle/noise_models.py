"""Whole runs of cachecheck's decision over modelled changes: no server, no prompts, no answers.

Each prompt has a size of noise of its own, and each answer a part of it. Hits may have more of it than cold prompts, as
some servers compute a few tokens with other kernels than many.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raycache.cachecheck.answers import Answer
from raycache.cachecheck.compare import Difference
from raycache.cachecheck.judge import Fault, Judge
from raycache.cachecheck.lab import Comparison
from raycache.cachecheck.noise import noise_of

_HIT = Answer(1, "", (), 100, 90, 0, 0.0)
_SCENARIOS = {
    "repeated": (2,),
    "branched": (4,),
    "grown": (4,),
    "tools": (5,),
    "cut": (2,),
    "load": (2, 2, 2, 2),
    "needle": (1,),
    "evicted": (1, 2),
}
"""Hits of each prompt of a round."""

Draw = Callable[[random.Random], float]


def _student(draw: random.Random) -> float:
    """Absolute value of Student's t with 5 degrees of freedom."""
    return abs(draw.gauss(0, 1)) / math.sqrt(draw.gammavariate(2.5, 2) / 5)


SIZES: Mapping[str, Draw] = {
    "normal": lambda draw: max(abs(draw.gauss(0, 1)) for _ in range(8)) / 2,
    "log-normal": lambda draw: math.exp(draw.gauss(0, 0.5)),
    "heavy-tailed": lambda draw: max(_student(draw) for _ in range(8)) / 2.5,
    "often none": lambda draw: math.exp(draw.gauss(0, 0.4)) if draw.random() < 0.6 else 0.0,
}
"""Change of an answer, before it is multiplied by the size of the noise."""


@dataclass(frozen=True)
class Model:
    """A server.

    Attributes:
        sizes: key of `SIZES`.
        nats: size of the noise.
        hits: noise of hits as a multiple.
        shift: nats that each hit moves in any case.
        fault: most nats that a fault moves hits by; 0: the server is right.
        differ: chance that a text differs, per nat; infinite: all differ.
    """

    sizes: str = "log-normal"
    nats: float = 0.2
    hits: float = 1.0
    shift: float = 0.0
    fault: float = 0.0
    differ: float = math.inf

    def run(self, draw: random.Random, *, questions: int = 8, rounds: int = 12) -> list[Fault]:
        """Measure the noise of some questions, and judge rounds of all scenarios in turn."""
        pairs = [[self._change(draw, size) for _ in range(3)] for size in self._prompts(draw, questions)]
        samples = {
            "alone": [0.0] * questions,
            "in other pieces": [pieces for pieces, *_ in pairs],
            "in batches": [max(batches) for _, *batches in pairs],
        }
        noise = noise_of(samples, looks=150, questions=[max(pair) for pair in pairs])
        assert noise is not None, "there are enough samples"
        if not noise.is_usable:
            return []
        judge, faults = Judge(noise), list[Fault]()
        for at in range(rounds):
            name = list(_SCENARIOS)[at % len(_SCENARIOS)]
            found = [
                self._hit(draw, name, topic, size)
                for topic, count, size in self._asked(draw, name)
                for _ in range(count)
            ]
            faults += [fault for one in found for fault in judge.one(one)]
            faults += judge.round(found)
        return faults or judge.end(number=rounds)

    def _asked(self, draw: random.Random, name: str) -> list[tuple[str, int, float]]:
        counts = _SCENARIOS[name]
        return [(str(at), counts[at], size) for at, size in enumerate(self._prompts(draw, len(counts)))]

    def _prompts(self, draw: random.Random, count: int) -> list[float]:
        return [self.nats * math.exp(draw.gauss(0, 0.3)) for _ in range(count)]

    def _change(self, draw: random.Random, size: float) -> float:
        return size * SIZES[self.sizes](draw)

    def _hit(self, draw: random.Random, name: str, topic: str, size: float) -> Comparison:
        nats = self.shift + self.hits * self._change(draw, size) + self.fault * draw.random()
        differs = draw.random() < -math.expm1(-self.differ * nats)
        return Comparison(name, "", _HIT, _HIT, Difference(nats, 0, 0 if differs else None, 16, nats), 1, topic)


RIGHT: Mapping[str, Model] = {
    **{f"{sizes}, hits {hits} times": Model(sizes, hits=hits) for sizes in SIZES for hits in (1, 2)},
    "log-normal, hits shifted": Model(shift=0.1),
    "log-normal, hits half and shifted": Model(hits=0.5, shift=0.2),
}
"""Hits as noisy as cold prompts, twice as noisy, and moved by a constant each time; the texts of all differ."""

FAULTY: Mapping[str, Model] = {
    f"{sizes}, fault of up to {fault} nats": Model(sizes, fault=fault, differ=1)
    for sizes in ("normal", "log-normal")
    for fault in (2, 4, 8)
}
"""A fault moves hits by anything from 0 to so many nats, with noise of 0.2 nats."""
