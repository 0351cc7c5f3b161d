"""Search for stop strings in text that comes in pieces.

Every stop string is matched with the automaton of Knuth, Morris and Pratt, one step per character, so the result does
not depend on how the text is cut into pieces and a stop string may span any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete.

    The text ends before the stop string that is complete first (the longest of those that end together). What may
    still become a stop string is held back.

    Args:
        stops: the stop strings, none of them empty.
    Attributes:
        found: the one that is complete, or "".
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.found = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add a piece of text.

        Returns:
            The text that can be passed on, and whether a stop string is complete. After that, feed no more.
        """
        if not self._stops or not text:
            return text, False
        known = self._held + text
        for position, char in enumerate(text, start=len(self._held)):
            stop_len = self._advance(char)
            if stop_len:
                self._held = ""
                self.found = known[position + 1 - stop_len : position + 1]
                return known[: position + 1 - stop_len], True
        held_len = max(self._matched)
        self._held = known[len(known) - held_len :]
        return known[: len(known) - held_len], False

    def flush(self) -> str:
        """End the text; returns what was held back."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Step all automata; returns the length of the longest stop string that is now complete, or 0."""
        longest = 0
        for which, stop in enumerate(self._stops):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = self._failures[which][matched - 1]
            matched += stop[matched] == char
            self._matched[which] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    for position in range(1, len(stop)):
        length = table[position - 1]
        while length and stop[length] != stop[position]:
            length = table[length - 1]
        table[position] = length + (stop[length] == stop[position])
    return table
