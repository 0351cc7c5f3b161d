"""What ranks keep in their caches, against transformers' in float64.

Logits cannot show a damaged key that no later token selects, or whose window has passed. This does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycache.cache.holding import Holding
from raycache.memory.component import CacheFormat, Component, Reuse
from raycache.models.base import components, read_config
from raycache.parallel.sharding import Split, even_range, shared_head_range, state_part
from tests.matrix.sequences import Corpus
from tests.matrix.trial import PAGE_SIZE, Trial
from tests.oracle.golden import Array, cache_contents

LENGTH = 104
"""Tokens of the prompt "base" that are looked at: those that a second request reuses."""

_NAMES = {"k": "keys", "v": "values", "key": "index"}
"""Our names of fields, where the oracle has others."""


@dataclass(frozen=True)
class Contents:
    """Of the first tokens of the prompt "base".

    Attributes:
        exact: by layer and name of the oracle.
        parts: the model's components.
    """

    exact: Mapping[tuple[int, str], Array]
    parts: tuple[Component, ...]

    @classmethod
    def of(cls, corpus: Corpus) -> Contents:
        """Computed by transformers."""
        parts = components(read_config(corpus.model_dir), CacheFormat("float32"))
        return cls(cache_contents(corpus.model_dir, corpus.dialogues["base"].ids[:LENGTH]), parts)

    def compare(self, trial: Trial) -> None:
        """A problem of the trial if what is kept of the prompt "base" is wrong."""
        errors = self._errors(trial)
        worst = max(errors, key=lambda name: errors[name])
        trial.expect(errors[worst] <= trial.corpus.atol, f"{worst} is off by {errors[worst]:.1e}")

    def error(self, trial: Trial) -> float:
        """The largest error of what is kept of the prompt "base"."""
        return max(self._errors(trial).values())

    def _errors(self, trial: Trial) -> dict[str, float]:
        """By field and layer, relative to the largest number there if that is above one."""
        errors: dict[str, float] = {}

        def read(holding: Holding) -> None:
            assert holding.handle.length == LENGTH, f"{holding.handle.length} of {LENGTH} tokens are kept"
            for rank, rows in enumerate(trial.rows(holding)):
                for (layer, field), found in rows.items():
                    error = _relative(found, self._wanted(layer, field, trial.gang.split, rank))
                    name = f"{field} of layer {layer}"
                    errors[name] = max(error, errors.get(name, 0.0))

        trial.held(trial.corpus.dialogues["base"].prompt, read)
        kept = sum(len(part.layers) * len(part.fields) for part in self.parts)
        assert len(errors) == kept, f"{len(errors)} of {kept} fields are kept"
        return errors

    def _wanted(self, layer: int, field: str, split: Split, rank: int) -> Array:
        """What a rank must keep of a field: [pages, S / cp, ...], or [1, ...] of states."""
        at = split.coords(rank)
        (part,) = [p for p in self.parts if layer in p.layers and field in {f.name for f in p.fields}]
        if part.reuse is Reuse.STATE_HERE:
            whole = self._state(layer, field, part)
            return whole[None, _range(shared_head_range(len(whole), *state_part(split, at)))]
        rows = self.exact[layer, _NAMES.get(field, field)]
        missing = LENGTH - len(rows)  # tokens that a window leaves behind
        rows = np.concatenate([np.full((missing, *rows.shape[1:]), np.nan), rows])
        if part.window:
            rows = rows[(LENGTH - part.window + 1) // PAGE_SIZE * PAGE_SIZE :]
        pages = rows.reshape(-1, PAGE_SIZE, *rows.shape[1:])[:, _range(even_range(PAGE_SIZE, at.cp, split.cp))]
        (head_axis,) = [f.head_axis for f in part.fields if f.name == field]
        if head_axis is None:
            return pages
        return pages[:, :, _range(shared_head_range(pages.shape[2], at.tp, split.tp))]

    def _state(self, layer: int, field: str, part: Component) -> Array:
        """A recurrent state [H, Dk, Dv], or inputs of a convolution [H, D, K - 1], of all heads."""
        shapes = {f.name: f.shape for f in part.fields}
        if field == "state":
            state = self.exact[layer, "state"]
            return state if state.shape == shapes[field] else state.swapaxes(1, 2)  # Mamba2's is [H, Dv, Dk]
        first = 0
        for name, (heads, dim, _) in shapes.items():
            if name == field:
                return self.exact[layer, "conv"][first : first + heads * dim].reshape(shapes[field])
            first += heads * dim
        raise AssertionError(f"{field} is no field of {part.name}")


def _range(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def _relative(found: NDArray[np.float32], wanted: Array) -> float:
    """Error of those numbers that are wanted."""
    assert found.shape == wanted.shape, f"{found.shape} are kept, {wanted.shape} expected"
    is_wanted = np.isfinite(wanted)
    if not is_wanted.any():
        return 0.0  # all of this rank's tokens are outside of the window
    error = float(np.abs(found - wanted)[is_wanted].max()) / max(1.0, float(np.abs(wanted[is_wanted]).max()))
    return error if np.isfinite(error) else float("inf")
