"""What is said of one request: where it left a known prompt, why, and what that cost."""

from __future__ import annotations

from typing import Any, NamedTuple

from raycache.divergence.cause import Cause
from raycache.divergence.examine import Examined
from raycache.divergence.place import Place


class Finding(NamedTuple):
    """One request. A tuple, as there is one for nearly every request.

    Attributes:
        cause, kind: as in `Verdict`.
        token: where it left the longest known prompt, or where reuse ended although more is known.
        lost_tokens: computed, and reused had the cause not been there.
        age_s: since the known prompt arrived.
        lost_s: time that the lost tokens took, by their share of the computed ones.
        examined: what stands at the token, if the prompts part there.
    """

    cause: Cause
    kind: str
    token: int
    lost_tokens: int
    age_s: float
    lost_s: float
    examined: Examined | None = None

    @property
    def place(self) -> Place | None:
        """Of the token, if it was looked for."""
        return None if self.examined is None else self.examined.place

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        where = {} if self.place is None else {"place": {**self.place.facts(), "text": str(self.place)}}
        found = self.examined
        sides = {} if found is None else {"before": found.before, "this": found.this, "other": found.other}
        return {
            "cause": self.cause.value,
            "kind": self.kind,
            "token": self.token,
            **where,
            **{name: text for name, text in sides.items() if text},
            "age_s": round(self.age_s, 3),
            "lost_tokens": self.lost_tokens,
            "lost_s": round(self.lost_s, 4),
        }
