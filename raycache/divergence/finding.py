"""What is said of one request: where it left a known prompt, why, and what that cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raycache.divergence.cause import Cause
from raycache.divergence.place import Place


@dataclass(frozen=True, slots=True)
class Finding:
    """One request.

    Attributes:
        cause, kind: as in `Verdict`.
        token: where it left the longest known prompt, or where reuse ended although more is known.
        place: of that token; None: not looked for.
        before, this, other: text before it, and what follows here and in the known prompt.
        age_s: since the known prompt arrived.
        lost_tokens: computed, and reused had the cause not been there.
        lost_s: time that they took, by their share of the computed tokens.
    """

    cause: Cause
    kind: str
    token: int
    lost_tokens: int
    place: Place | None = None
    before: str = ""
    this: str = ""
    other: str = ""
    age_s: float = 0.0
    lost_s: float = 0.0

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        where = {} if self.place is None else {"place": {**self.place.facts(), "text": str(self.place)}}
        sides = {"before": self.before, "this": self.this, "other": self.other}
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
