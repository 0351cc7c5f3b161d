"""Damage to one part of one layer's cache, between two requests: the check must notice it.

A second request for a prompt reuses 104 of its tokens. Just before it is computed, the ranks overwrite one page or one
state that it goes on from, with zeros or with another one. Then its logits must be off by more than the tolerance, or,
where no query looks at what was damaged, what the cache holds must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raycache.cache.holding import Holding
from raycache.memory.component import Component, Reuse
from raycache.wire.plan import Admit, Row
from tests.matrix.contents import LENGTH, Contents
from tests.matrix.ranks import Damage, Repair
from tests.matrix.scenarios import Setting
from tests.matrix.trial import PAGE_SIZE, Trial

_NUM_PAGES = LENGTH // PAGE_SIZE
_PAGE = 5
"""Which page of the prefix is damaged."""


@dataclass(frozen=True)
class Part:
    """What is damaged together: the rows of a token in one layer, or one field of a state.

    Attributes:
        component: it belongs to.
        layer: of the model.
        fields: of the component.
        page: of the sequence, counted from its end if negative; plays no part in states.
        token: of the page, the only one that is damaged; -1 for all of it.
    """

    component: Component
    layer: int
    fields: tuple[str, ...]
    page: int = _PAGE
    token: int = -1

    def __str__(self) -> str:
        page = "" if self.component.reuse is Reuse.STATE_HERE else f" page {self.page % _NUM_PAGES}"
        token = "" if self.token < 0 else f" token {self.token}"
        return f"{'+'.join(self.fields)} of layer {self.layer}{page}{token}"


@dataclass(frozen=True)
class Control:
    """One damage and what was noticed.

    Attributes:
        name: what was damaged and how.
        logits: largest error of the request, as a multiple of the tolerance.
        cache: that of what the cache holds; None where logits are enough.
    """

    name: str
    logits: float
    cache: float | None = None

    @property
    def is_noticed(self) -> bool:
        """Whether a check fails."""
        return self.logits > 1 or (self.cache is not None and self.cache > 1)

    def __str__(self) -> str:
        cache = "" if self.cache is None else f"{self.cache:.0f}"
        return f"{self.name} | {self.logits:.0f} | {cache if self.is_noticed else '**NOT NOTICED**'}"


def damage_all(at: Setting, *, layers: Sequence[int] = ()) -> Iterator[Control]:
    """Damage every part, one after the other.

    Args:
        at: the family and the gang.
        layers: of the parts; all layers if none is named.
    Raises:
        AssertionError: a request fails that meets no damage.
    """
    trial = at.trial(restore_interval=LENGTH - PAGE_SIZE)  # an older state at hand, of 96 tokens
    trial.ask("base")
    trial.hit("base", cached=LENGTH)
    assert trial.error <= at.corpus.atol and not trial.problems, f"wrong without damage: {trial.error}"
    for part in parts_of(at.contents):
        for is_stale in (False, True) if part.token < 0 else (False,):
            if not layers or part.layer in layers:
                yield _damage(at, trial, part, is_stale=is_stale)
    after = trial.hit("base", cached=LENGTH)
    assert after.error <= at.corpus.atol, "damage outlives its repair"


def _damage(at: Setting, trial: Trial, part: Part, *, is_stale: bool) -> Control:
    """One damage: a request that meets it, a look at the cache if logits do not show it, repair."""
    older = _state_slot(trial, length=LENGTH - PAGE_SIZE) if part.component.reuse is Reuse.STATE_HERE else -1

    def on_admit(request_id: str, admit: Admit, row: Row) -> None:
        unit, other = units_of(part, admit, row, older=older)
        trial.gang.tell(Damage(part.layer, part.fields, unit, source=other if is_stale else -1, token=part.token))

    trial.executor.on_admit = on_admit
    asked = trial.hit("base", cached=LENGTH)
    trial.executor.on_admit = lambda request_id, admit, row: None
    logits, cache = asked.error / at.corpus.atol, None
    if not logits > 1:
        cache = at.contents.error(trial) / at.corpus.atol
    trial.gang.tell(Repair())
    return Control(f"{part} {'stale' if is_stale else 'zero'}", logits, cache)


def units_of(part: Part, admit: Admit, row: Row, *, older: int) -> tuple[int, int]:
    """(page or slot to damage, another one) among those that a request goes on from."""
    if part.component.reuse is Reuse.STATE_HERE:
        assert row.read_state not in (-1, older), "the request goes on from another state than the older one"
        return row.read_state, older
    space, page = part.component.space, part.page % _NUM_PAGES
    pages = [*admit.pages[space], *row.new_pages.get(space, ())]  # those that are loaded are among the new ones
    return pages[page], pages[page - 1]


def _state_slot(trial: Trial, *, length: int) -> int:
    """The slot of the state after so many tokens of the prompt."""
    found = []

    def read(holding: Holding) -> None:
        assert holding.handle.length == length, f"there is no restore point at {length}"
        found.append(holding.units.state)

    trial.held(trial.corpus.dialogues["base"].ids[: length + 1], read)
    return found[0]


def parts_of(contents: Contents) -> list[Part]:
    """Everything that can be damaged, by layer."""
    found = []
    for component in contents.parts:
        fields = tuple(field.name for field in component.fields)
        for layer in component.layers:
            match component.reuse:
                case Reuse.STATE_HERE:
                    found += [Part(component, layer, (field,)) for field in fields]
                case Reuse.LAST_WINDOW:  # all queries see the newest page
                    found.append(Part(component, layer, fields, page=-1))
                case Reuse.EVERY_PAGE:
                    found.append(Part(component, layer, fields))
    has_index = any(component.name == "index" for component in contents.parts)
    last = max(found, key=lambda part: part.layer)
    if has_index:  # some of these tokens are selected by no query of the last layer
        latent = next(part for part in found if part.layer == last.layer and "latent" in part.fields)
        found += [replace(latent, page=page, token=token) for page in range(_NUM_PAGES) for token in (1, 6)]
    return sorted(found, key=lambda part: part.layer)
