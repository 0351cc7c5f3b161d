"""Order of the rows of a step, where one may read the state that another one writes.

A prompt that leaves restore points has a row up to each of them. Such rows are a chain: what follows a row of the chain
does not read its state from memory, so one launch can process all of them.

    stage 0   rows A0 -> A1 -> A2 | row B0 | ...     one launch
    stage 1   row A3 | ...                           reads what stage 0 has written
"""

from __future__ import annotations

from collections.abc import Callable

from raycache.step.inputs import RowInputs, StepInputs

Chain = list[int]
"""Indices of rows; each reads the state that the one before it writes."""


def stages(inputs: StepInputs, *, can_follow: Callable[[RowInputs, RowInputs], bool]) -> list[list[Chain]]:
    """Chains of the rows of a step by stage. All rows of a stage but those within chains read older states.

    No row of a chain but the last writes where another row of its stage reads or writes.

    Args:
        can_follow: whether the second row may follow the first one in a chain.
    """
    rows = inputs.rows
    if inputs.is_decode:
        return [[[i] for i in range(len(rows))]]
    found: list[list[Chain]] = []
    used: list[set[int]] = []
    places: dict[int, tuple[int, Chain]] = {}  # slot -> stage and chain of the row that wrote it last
    for i, row in enumerate(rows):
        after = {row.write_state, *row.draft_states}
        stage, chain = places.get(row.read_state, (-1, [])) if row.read_state >= 0 else (-1, [])
        goes_on = bool(chain) and rows[chain[-1]].write_state == row.read_state
        if goes_on and can_follow(rows[chain[-1]], row) and used[stage].isdisjoint(after):
            chain.append(i)
        else:
            stage, chain = stage + 1, [i]
            if stage == len(found):
                found.append([])
                used.append(set())
            found[stage].append(chain)
        used[stage] |= {row.read_state, *after}
        places.update(dict.fromkeys(after, (stage, chain)))
    return found
