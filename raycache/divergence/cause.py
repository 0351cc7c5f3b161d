"""Why a prompt left a known one: rules over the texts on both sides, from the surest to the least sure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from raycache.divergence.place import Place
from raycache.types import Miss


class Cause(StrEnum):
    """Why a prompt was computed although something like it was known."""

    VOLATILE = "volatile"  # a time, date, id or counter, or a header-like line that holds one
    ORDER = "order"  # the same tools or keys in another order
    HISTORY = "history"  # the client rewrote earlier turns: reasoning dropped, summary, beginning cut off
    TEMPLATE = "template"  # the chat template wrote something else for the same messages
    CHANGED = "changed"  # other text before a part that both share
    NEW = "new"  # the prompts simply go on differently; nothing behind was shared
    SALT = "salt"  # known under another cache_salt of the same tenant
    FORMAT = "format"  # stored for another model, adapter, draft or dtype
    GRANULARITY = "granularity"  # only whole pages, and only from restore points
    CAPACITY = "capacity"  # evicted, or no room to load it
    EXPIRED = "expired"  # evicted after its cache_ttl_s
    CONCURRENT = "concurrent"  # the other request was still being computed
    UNAVAILABLE = "unavailable"  # a tier has it, but did not deliver it or was slower than computing
    GONE = "gone"  # the engine does not know it: cleared, restarted, or on another replica


_SHORTFALLS = {
    Miss.EVICTED_DEVICE: Cause.CAPACITY,
    Miss.EVICTED_HOST: Cause.CAPACITY,
    Miss.EVICTED_STORAGE: Cause.CAPACITY,
    Miss.NO_CAPACITY: Cause.CAPACITY,
    Miss.STATE_MISSING: Cause.GRANULARITY,
    Miss.SHORTER_THAN_PAGE: Cause.GRANULARITY,
    Miss.IDENTITY: Cause.FORMAT,
    Miss.CHECKSUM: Cause.UNAVAILABLE,
    Miss.TIMEOUT: Cause.UNAVAILABLE,
    Miss.SLOWER: Cause.UNAVAILABLE,
}
_EVICTED = (Miss.EVICTED_DEVICE, Miss.EVICTED_HOST, Miss.EVICTED_STORAGE)


def shortfall(miss: Miss, *, is_in_flight: bool, is_expired: bool) -> Cause:
    """Why known tokens were not reused.

    Args:
        is_in_flight: they were still being computed when the request arrived.
        is_expired: their cache_ttl_s was over.
    """
    cause = _SHORTFALLS.get(miss)
    if cause is None:
        return Cause.CONCURRENT if is_in_flight else Cause.GONE
    return Cause.EXPIRED if miss in _EVICTED and is_expired else cause


@dataclass(frozen=True, slots=True)
class Sides:
    """What stands at the place where two prompts part.

    Attributes:
        line, other_line: the lines of both, from their beginning.
        this, other: what each has there until they agree again, or their beginnings if they never do.
        shared: tokens that agree behind it; 0: none.
        is_removed, is_added: only the other, or only this one, has something there.
        other_marks: special tokens in `other`, as they separate messages.
        is_resent: the client sent this message before, as it is.
        sends_reasoning: the client sent earlier reasoning.
    """

    line: str
    other_line: str
    this: str
    other: str
    shared: int
    other_marks: int = 0
    is_resent: bool = False
    sends_reasoning: bool = False

    @property
    def is_removed(self) -> bool:
        return not self.this and bool(self.other)

    @property
    def is_removed_message(self) -> bool:
        """Whether whole messages are gone."""
        return self.is_removed and self.other_marks > 1

    @property
    def is_added(self) -> bool:
        return bool(self.this) and not self.other


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause, and which kind of it.

    Attributes:
        kind: such as "time" or "tools", or "".
    """

    cause: Cause
    kind: str = ""


_WORD = re.compile(r"[^\s\"'(){}<>,;=]+")
_NAMES = re.compile(r"\w+")
_REASONING = re.compile(r"<(think|thinking|\|channel\|>analysis)|\[THINK\]|</think>")
_EMPTY_REASONING = ("<think></think>", "[THINK][/THINK]", "<think>", "</think>")
_SUMMARY = re.compile(r"summar|compacted|condensed|continued from a previous", re.IGNORECASE)
_SUMMARY_CHARS = 600
_ANSWERS = ("assistant", "tool")
"""Roles of messages that only repeat what was said."""
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_KINDS = (
    ("uuid", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)),
    ("time", re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d|\b\d{1,2}:\d\d(:\d\d)?\b|\b(am|pm)\b", re.IGNORECASE)),
    ("date", re.compile(r"\b\d{4}-\d\d?-\d\d?\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b\d{4}/\d\d/\d\d\b")),
    ("date", re.compile(rf"^(({_DAYS})[a-z]*|({_MONTHS})[a-z]*)\W*$", re.IGNORECASE)),
    ("time", re.compile(r"^1[5-9]\d{8}(\d{3}|\d{6}|\d{9}|\.\d+)?$")),
    ("number", re.compile(r"^\W*\d+([.,]\d+)?(st|nd|rd|th|ms|s|%)?\W*$")),
    ("id", re.compile(r"(?=[^\s]*\d)[0-9a-f]{5,}", re.IGNORECASE)),
    ("id", re.compile(r"^(?=\S*\d)(?=\S*[A-Za-z])[\w.+/:=-]{6,}$")),
)
_CONTEXT = re.compile(rf"\b(({_DAYS})[a-z]*|({_MONTHS})[a-z]*)\b|\bdate\b|\btoday\b", re.IGNORECASE)


def classify(sides: Sides, place: Place) -> Verdict:
    """Find the cause of a divergence between two prompts."""
    if sides.shared:
        if kind := volatile_kind(sides.line, sides.other_line):
            if place.is_of_template:
                return Verdict(Cause.TEMPLATE, kind)
            return Verdict(Cause.VOLATILE, "header" if _is_header(place) else kind)
        if found := _reasoning(sides):
            return found
        if sides.is_resent and not sides.is_removed_message:
            return Verdict(Cause.TEMPLATE, "marker")
        if found := _history(sides, place):
            return found
        if place.is_of_template:
            return Verdict(Cause.TEMPLATE, "marker")
        if place.tool:
            return Verdict(Cause.CHANGED, "tools")
        return Verdict(Cause.CHANGED, "removed" if sides.is_removed else "added" if sides.is_added else "replaced")
    if _says_summary(sides):
        return Verdict(Cause.HISTORY, "summary")
    return Verdict(Cause.NEW)


def order_kind(this: str, other: str, *, tools: Sequence[str]) -> str:
    """Whether two texts have the same words in another order: "tools" if those are the tools' names, "keys", or "".

    Args:
        tools: names, in the order of `this`.
    """
    if this == other or len(this) != len(other) or Counter(_NAMES.findall(this)) != Counter(_NAMES.findall(other)):
        return ""
    if '":' not in this:
        return ""
    placed = sorted((other.find(f'"{name}"'), name) for name in tools if f'"{name}"' in other)
    return "tools" if [name for _, name in placed] != [name for name in tools if f'"{name}"' in other] else "keys"


def volatile_kind(line: str, other: str) -> str:
    """The kind of the words in which two lines differ, if all of them are times, ids or counters, or ""."""
    words, others = _WORD.findall(line), _WORD.findall(other)
    if len(words) != len(others):
        return ""
    pairs = [(one, two) for one, two in zip(words, others, strict=True) if one != two]
    if not pairs or len(pairs) > 8:
        return ""
    kinds = [_kind(one, two) for one, two in pairs]
    if not all(kinds):
        return ""
    chosen = min(set(kinds), key=lambda kind: ("uuid", "time", "date", "id", "number").index(kind))
    return "date" if chosen == "number" and _CONTEXT.search(line) else chosen


def _kind(one: str, two: str) -> str:
    for kind, pattern in _KINDS:
        if pattern.search(one) and pattern.search(two):
            return kind
    return ""


def _is_header(place: Place) -> bool:
    """Whether a line is one of those that clients put first, in the form of an HTTP header."""
    return place.key.lower().startswith("x-") or place.key.lower().endswith("-header")


def _reasoning(sides: Sides) -> Verdict | None:
    """Earlier reasoning that is gone, or has come."""
    changed = sides.other if sides.is_removed else sides.this if sides.is_added else ""
    if not changed or not _REASONING.search(changed):
        return None
    if "".join(changed.split()) in _EMPTY_REASONING:
        return Verdict(Cause.TEMPLATE, "last_turn")
    if sides.is_removed and not sides.sends_reasoning:
        return Verdict(Cause.HISTORY, "reasoning_dropped")
    return Verdict(Cause.TEMPLATE, "reasoning")


def _history(sides: Sides, place: Place) -> Verdict | None:
    """Messages that are gone, replaced by a summary, or edited afterwards."""
    if place.tool or place.message is None:
        return None
    if _says_summary(sides):
        return Verdict(Cause.HISTORY, "summary")
    if sides.is_removed_message:
        return Verdict(Cause.HISTORY, "truncated")
    return Verdict(Cause.HISTORY, "edited") if place.line and place.role in _ANSWERS else None


def _says_summary(sides: Sides) -> bool:
    this, other = sides.this[:_SUMMARY_CHARS], sides.other[:_SUMMARY_CHARS]
    return bool(_SUMMARY.search(sides.line + this)) and not _SUMMARY.search(sides.other_line + other)
