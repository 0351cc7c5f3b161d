"""Every family with every kind of draft, by cp ranks. `drafting.py` is the command.

A cell passes if greedy outputs are what transformers finds likeliest, without drafts, with them, and with them from
the prefix cache; if some drafts are right and some wrong; and if the drafts of every row are those of a slow twin at
cp = 1, and those at cp = 1 at any other cp. Rows are the same if the same tokens were known before their drafts.

There are no exceptions for near-ties that float32 decides by chance: models and prompts are always the same, and among
what they come to is none. If a change of either brings one, a problem shows the rows, and other seeds are the way out.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from raycache.errors import RayCacheError
from tests.oracle.draft_models import (
    Eagle,
    Eagle3,
    SmallerModel,
    make_eagle,
    make_eagle3,
    make_predicting,
    make_smaller,
    make_target,
    prediction_twin,
)
from tests.oracle.golden import golden
from tests.oracle.tiny_tokenizers import byte_level
from tests.unit.test_draft_models import PROMPTS, Pair, Rows, complete, counts, open_llm, watch
from tests.unit.test_drafts import slow_lookup

PREDICTING = (
    "bailing_hybrid",
    "bailing_moe_v2_5",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm_moe_dsa",
    "qwen3_next",
    "qwen3_5",
)
"""Families whose checkpoints can have a prediction layer."""

_REPEATED, _ALTERED = 6, 10
"""Tokens of a prompt that come again behind its answer, so that n-grams know what follows; and every so many tokens of
the answer have become another."""

_TIMEOUT_S = 60.0


class Lookup:
    """Twin of n-grams."""

    def drafted(self, tokens: Sequence[int], count: int) -> list[int]:
        """See Twin."""
        return slow_lookup(list(tokens), count)


def _ngram(folder: Path, family: str) -> Pair:
    return Pair(byte_level(make_target(folder / "target", family, share=0.4)), "ngram", Lookup())


def _small(folder: Path, family: str) -> Pair:
    target = byte_level(make_target(folder / "target", family, share=0.4))
    draft = byte_level(make_smaller(folder / "draft", target, noise=0.4))
    return Pair(target, str(draft), SmallerModel(draft))


def _predicting(folder: Path, family: str) -> Pair:
    target = byte_level(make_predicting(folder, family))
    return Pair(target, "mtp", prediction_twin(target))


def _eagle(folder: Path, family: str) -> Pair:
    target = byte_level(make_target(folder / "target", family, share=0.5))
    head = make_eagle(folder / "head", target, has_bias=False)
    return Pair(target, str(head), Eagle(head, target))


def _eagle3(folder: Path, family: str) -> Pair:
    target = byte_level(make_target(folder / "target", family, share=0.35))
    head = make_eagle3(folder / "head", target, draft_vocab=400, has_embedding=False, outputs=(0, 1, 2))
    return Pair(target, str(head), Eagle3(head, target))


KINDS: Mapping[str, Callable[[Path, str], Pair]] = MappingProxyType(
    {"ngram": _ngram, "small": _small, "mtp": _predicting, "eagle": _eagle, "eagle3": _eagle3}
)
"""Makers of pairs."""


@dataclass(frozen=True)
class Cell:
    """A family, a kind of draft, and a number of cp ranks.

    Attributes:
        family, kind, cp: as they say.
        num_made, num_right: draft tokens without a cached prefix.
        took_s: to start, and to answer twice.
        problems: what is wrong; none if it passes.
    """

    family: str
    kind: str
    cp: int
    num_made: int
    num_right: int
    took_s: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        share = f"{self.num_right}/{self.num_made} {self.num_right / max(self.num_made, 1):.2f}"
        return f"**FAIL** {share}" if self.problems else share


def run_cells(family: str, kind: str, cps: Iterable[int]) -> Iterator[Cell]:
    """The cells of a pair. The one with cp = 1 comes first, wanted or not: others are compared with it.

    Args:
        family: a key of `FAMILIES`.
        kind: a key of `KINDS`.
        cps: numbers of cp ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        pair = KINDS[kind](Path(folder), family)
        case = Case.of(pair)
        first = Run.of(case, cp=1)
        twins = {known: pair.drafted(known, len(drafts)) for known, drafts in first.cold.items()}
        yield first.cell(family, kind, case.problems() + first.problems(case, twins, "the twin"))
        for cp in sorted({*cps} - {1}):
            run = Run.of(case, cp=cp)
            yield run.cell(family, kind, run.problems(case, first.cold, "cp=1"))


@dataclass(frozen=True)
class Case:
    """What is asked of a pair, and what must come of it.

    Attributes:
        pair: target, draft and twin.
        prompts: of the requests.
        texts: prompts and outputs, as the target finds them alone.
    """

    pair: Pair
    prompts: list[list[int]]
    texts: list[list[int]]

    @classmethod
    def of(cls, pair: Pair) -> Case:
        """Ask the target alone. The last prompt holds another and its answer, and begins that again."""
        with open_llm(pair.target) as plain:
            (text,) = complete(plain, PROMPTS[1:2])
            for place in range(len(PROMPTS[1]) + _ALTERED, len(text), _ALTERED):
                text[place] = abs(text[place] - 1)
            prompts = [PROMPTS[0], PROMPTS[2], [*text, *PROMPTS[1][-_REPEATED:]]]
            return cls(pair, prompts, complete(plain, prompts))

    def problems(self) -> list[str]:
        """What is wrong without drafts."""
        exact = golden(self.pair.target, self.texts)
        found = [
            prompt + logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            for prompt, logits in zip(self.prompts, exact.logits, strict=True)
        ]
        return [] if found == self.texts else ["transformers finds other tokens likeliest"]


@dataclass
class Run:
    """What came of a case.

    Attributes:
        cp: ranks.
        cold, warm: rows with drafts, the first time and with prefixes in the cache.
        texts: prompts and outputs of both times.
        num_cached: tokens of prompts.
        took_s: in all.
        failure: what ended it before its time, or "".
    """

    cp: int
    cold: Rows = field(default_factory=dict)
    warm: Rows = field(default_factory=dict)
    texts: list[list[list[int]]] = field(default_factory=list)
    num_cached: int = 0
    took_s: float = 0.0
    failure: str = ""

    @classmethod
    def of(cls, case: Case, *, cp: int) -> Run:
        """Ask twice."""
        run, start_s = cls(cp), time.monotonic()
        try:
            with case.pair.open(cp=cp, rank_timeout_s=_TIMEOUT_S) as llm:
                rows = watch(llm)
                run.texts.append(complete(llm, case.prompts))
                run.cold.update(rows)
                rows.clear()
                run.texts.append(complete(llm, case.prompts))
                run.warm.update(rows)
                run.num_cached = llm.stats().cached_tokens
        except (RayCacheError, AssertionError):
            run.failure = traceback.format_exc()
        run.took_s = time.monotonic() - start_s
        return run

    def problems(self, case: Case, expected: Rows, whose: str) -> list[str]:
        """What is wrong.

        Args:
            case: that was asked.
            expected: the rows that should be.
            whose: those are.
        """
        if self.failure:
            return [self.failure]
        cold, warm = self.texts
        made, right = self._counts()
        found = {
            "cold outputs differ": cold != case.texts,
            "outputs with cached prefixes differ": warm != case.texts,
            "no prefix was cached": not self.num_cached,
            "no draft token is right, or all are": cold == case.texts and not 0 < right < made,
        }
        return [problem for problem, is_true in found.items() if is_true] + [
            f"{which} rows are not those of {of}: {_difference(rows, wanted)}"
            for which, rows, of, wanted in (
                ("cold", self.cold, whose, expected),
                ("warm", self.warm, "cold", self.cold),
            )
            if rows != wanted
        ]

    def cell(self, family: str, kind: str, problems: list[str]) -> Cell:
        """Of a family and a kind of draft, with these problems."""
        made, right = self._counts()
        return Cell(family, kind, self.cp, made, right, self.took_s, tuple(problems))

    def _counts(self) -> tuple[int, int]:
        """Draft tokens of the first time, and those that were right."""
        if not self.texts:
            return 0, 0
        made, right = counts(self.cold, self.texts[0])
        return made.total(), right.total()


def _difference(rows: Rows, wanted: Rows) -> str:
    """How many rows differ, and one of them."""
    different = [known for known in {**rows, **wanted} if rows.get(known) != wanted.get(known)]
    known = different[0]
    return (
        f"{len(different)} of {len(wanted)} differ, the first behind {len(known)} tokens: "
        f"{rows.get(known)} instead of {wanted.get(known)}"
    )
