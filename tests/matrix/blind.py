"""Negative controls of the tiers: what a load brings is damaged behind its check, or the check is put out of work.

In both the tokens come from the host and are wrong, so the comparison has to fail; with the check in its place the same
damage is a miss (faults.host_flip).
"""

from __future__ import annotations

from collections.abc import Iterator

from raycache.memory.component import FULL
from raycache.wire.plan import Admit, Row
from tests.matrix.controls import Control, Part, parts_of, units_of
from tests.matrix.home import host_units, last_rank, open_home
from tests.matrix.ranks import Damage
from tests.matrix.scenarios import Setting
from tests.matrix.tiers import ALL
from tests.matrix.trial import Trial

_PAGE = 5
_FIRST_EXPONENT = 3
"""Byte of an envelope: the last one of its first number, with the sign and the high bits of the exponent."""


def damage_loads(at: Setting) -> Iterator[Control]:
    """One damage of each kind per component.

    Args:
        at: the family and the gang.
    Raises:
        AssertionError: a request fails that meets no damage.
    """
    with open_home(at) as home:
        trial = home.trial()
        trial.ask("base")
        _expect_good(at, trial)
        for part in {part.component.name: part for part in reversed(parts_of(at.contents))}.values():
            yield _after_load(at, trial, part)
            _expect_good(at, trial)
        trial.settle()
        home.blind()
        for space in home.arena.layout.spaces:
            unit = host_units(trial, "base")[space][_PAGE if space == FULL else -1]
            rank = last_rank(home.arena, space)
            home.flip(space, unit, rank=rank, at=_FIRST_EXPONENT, bit=6)
            yield _load(at, trial, f"a bit of {space} on the host, unchecked")
            home.flip(space, unit, rank=rank, at=_FIRST_EXPONENT, bit=6)
            _expect_good(at, trial)


def _after_load(at: Setting, trial: Trial, part: Part) -> Control:
    def on_admit(request_id: str, admit: Admit, row: Row) -> None:
        unit, _ = units_of(part, admit, row, older=-2)
        trial.gang.tell(Damage(part.layer, part.fields, unit, token=part.token, is_after_load=True))

    trial.executor.on_admit = on_admit
    control = _load(at, trial, f"{part} after it was loaded")
    trial.executor.on_admit = lambda request_id, admit, row: None
    return control


def _load(at: Setting, trial: Trial, name: str) -> Control:
    """Have the prompt loaded; what its logits show, or else what the device holds of it."""
    trial.forget_device()
    error = trial.hit("base", tiers={"host": ALL}).error / at.corpus.atol
    return Control(name, error, None if error > 1 else at.contents.error(trial) / at.corpus.atol)


def _expect_good(at: Setting, trial: Trial) -> None:
    control = _load(at, trial, "nothing")
    assert control.logits <= 1 and not trial.problems, f"wrong without damage: {control.logits}, {trial.problems}"
