"""Prompts whose answers depend on what lies far back: records, and the request to copy one of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from raycache.cachecheck.answers import Question

_COLOURS = ("amber", "blue", "coral", "dark", "early", "faint", "green", "hazel", "ivory", "jade", "late", "mauve")
_BEASTS = ("adder", "bear", "crane", "deer", "eagle", "falcon", "goose", "heron", "ibex", "jay", "lynx", "otter")
_TOWNS = ("Accra", "Bergen", "Cusco", "Delhi", "Evora", "Fez", "Ghent", "Hanoi", "Izmir", "Jaffa", "Kyoto", "Lima")


class Writer:
    """Writes questions from a seed.

    Attributes:
        num_records: of a usual prompt; the length varies around it.
        output_tokens: of all questions.
    """

    def __init__(self, seed: int, *, num_records: int = 20, output_tokens: int = 16) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._count = 0
        self.num_records = num_records
        self.output_tokens = output_tokens

    def unique(self) -> str:
        """Text that no other prompt begins with, also of other runs with another seed."""
        self._count += 1
        return f"{self._random.randrange(10**6):06d}-{self._seed}-{self._count}"

    def length(self) -> int:
        """Number of records of the next prompt; pages of the cache end at many places of it."""
        return max(3, round(self.num_records * self._random.uniform(0.5, 1.5)))

    def choose(self, low: int, high: int) -> int:
        """A number, both ends included."""
        return self._random.randint(low, high)

    def records(self, count: int, *, start: int = 1) -> str:
        """Lines of facts, one per number."""
        draw = self._random.choice
        return "".join(
            f"Record {number}: the {draw(_COLOURS)} {draw(_BEASTS)} keeps {self._random.randrange(1000, 10000)} "
            f"in {draw(_TOWNS)}.\n"
            for number in range(start, start + count)
        )

    def ending(self, last: int) -> str:
        """A request to copy a record up to the one with this number."""
        return f"Copy of record {self._random.randint(1, max(1, last))}: the"

    def question(self, count: int | None = None) -> Question:
        """A prompt of its own topic."""
        count = count or self.length()
        return self.ask(self.unique(), self.records(count) + self.ending(count))

    def ask(self, topic: str, text: str) -> Question:
        """A prompt of this text."""
        return Question(topic, text, output_tokens=self.output_tokens)

    def pattern(self) -> Question:
        """A prompt that goes on as before, which draft tokens get right."""
        words = " ".join(f"{self._random.choice(_COLOURS)} {self._random.choice(_BEASTS)}" for _ in range(3))
        return self.ask(self.unique(), self.records(self.length()) + f"{words}, " * 6)

    def needle(self, count: int) -> tuple[Question, str]:
        """A long prompt, and the number that a model with good recall answers."""
        at, code = self._random.randint(1, count), str(self._random.randrange(1000, 10000))
        beast = f"{self._random.choice(_COLOURS)} unicorn"
        line = f"Record {at}: the {beast} keeps {code} in {self._random.choice(_TOWNS)}.\n"
        text = self.records(at - 1) + line + self.records(count - at, start=at + 1)
        return self.ask(self.unique(), f"{text}Question: what does the {beast} keep? Answer: the {beast} keeps"), code

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """A tool, described differently each time."""
        facts = self.records(3).replace("\n", " ")
        parameters = {"type": "object", "properties": {"number": {"type": "integer", "description": "of the record"}}}
        function = {"name": "find_record", "description": f"Finds a record. {facts}", "parameters": parameters}
        return ({"type": "function", "function": function},)
