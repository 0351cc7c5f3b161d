"""Sessions of agents: trees of turns and subagents, read from traces or drawn.

    turn       prompt = what is kept of the text so far (the last prompt and its answer) + what is new
    session    turn - turn - turn - turn            the turn after subagents starts once they have ended
                        ` subagent: turn - turn     may begin with a part of its parent's text

Two formats are read:

    one JSON object per session, as aiperf's Weka traces ("requests", nested for subagents, "hash_ids" of blocks)
    one line per turn, as aiperf's agentic code traces in Mooncake's format ("session_id", "input_length" of new tokens)

A trace names blocks instead of holding text. Equal names are equal tokens.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

_MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that are not of the text so far.

    Attributes:
        block: name; the same in two sessions if both begin with it.
        length: tokens.
    """

    block: str
    length: int


_TOOLS, _SUBAGENT_TOOLS = Piece("tools", 16_000), Piece("tools of subagents", 8_000)
_LONGEST = 225_000
"""Prompts of drawn sessions; then the history is replaced by a summary."""


@dataclass(frozen=True)
class Turn:
    """A request.

    Attributes:
        kept: leading tokens of the text so far that the prompt begins with; None for all.
        new: what follows them.
        output_len: tokens to generate.
        think_s: from the end of the turn before, and of its subagents, to this one.
        subagents: sessions that begin when this turn ends.
    """

    kept: int | None
    new: tuple[Piece, ...]
    output_len: int
    think_s: float = 0.0
    subagents: tuple[Session, ...] = ()


@dataclass(frozen=True)
class Session:
    """What one agent does, or a subagent."""

    name: str
    turns: tuple[Turn, ...]

    def blocks(self) -> Iterator[str]:
        """Names of all blocks, those of subagents included."""
        for turn in self.turns:
            yield from (piece.block for piece in turn.new)
            for subagent in turn.subagents:
                yield from subagent.blocks()


@dataclass(frozen=True)
class Statistics:
    """What sessions look like.

    Attributes:
        sessions, requests: counts; requests are those of subagents too.
        turns: median per session, subagents not counted.
        prompt_tokens, output_tokens: medians over all requests.
        reusable: share of all prompt tokens that stood at the beginning of an earlier prompt or in its answer.
    """

    sessions: int
    requests: int
    turns: float
    prompt_tokens: float
    output_tokens: float
    reusable: float


def describe(sessions: Sequence[Session]) -> Statistics:
    """Count, without making any text."""
    seen: set[str] = set()
    prompts: list[int] = []
    outputs: list[int] = []
    reused = 0

    def walk(session: Session, text_len: int) -> None:
        nonlocal reused
        for turn in session.turns:
            kept = text_len if turn.kept is None else min(turn.kept, text_len)
            prompts.append(kept + sum(piece.length for piece in turn.new))
            outputs.append(turn.output_len)
            reused += kept
            if not kept:  # a block is found again only where all before it is
                known = [piece.block in seen for piece in turn.new]
                reused += sum(piece.length for piece in turn.new[: [*known, False].index(False)])
            seen.update(piece.block for piece in turn.new)
            text_len = prompts[-1] + turn.output_len
            for subagent in turn.subagents:
                walk(subagent, text_len)

    for session in sessions:
        walk(session, 0)
    return Statistics(
        sessions=len(sessions),
        requests=len(prompts),
        turns=statistics.median(len(session.turns) for session in sessions),
        prompt_tokens=statistics.median(prompts),
        output_tokens=statistics.median(outputs),
        reusable=reused / sum(prompts),
    )


def shared_blocks(sessions: Iterable[Session]) -> frozenset[str]:
    """Blocks that more than one session has, such as tools and system prompts."""
    counts = Counter(block for session in sessions for block in set(session.blocks()))
    return frozenset(block for block, count in counts.items() if count > 1)


def within(session: Session, longest: int, *, scale: float = 1.0) -> Session:
    """A session up to its first turn that, with its answer and lengths times `scale`, exceeds `longest` tokens."""
    return _within(session, longest, 0, scale=scale)


def _within(session: Session, longest: int, text_len: int, *, scale: float) -> Session:
    turns: list[Turn] = []
    for turn in session.turns:
        kept = text_len if turn.kept is None else min(turn.kept, text_len)
        text_len = kept + sum(piece.length for piece in turn.new) + turn.output_len
        # Each turn is rounded by itself: three tokens for each cover that.
        if text_len * scale + 3 * (len(turns) + 1) > longest:
            break
        subagents = tuple(_within(each, longest, text_len, scale=scale) for each in turn.subagents)
        turns.append(replace(turn, subagents=tuple(each for each in subagents if each.turns)))
    return replace(session, turns=tuple(turns))


def draw(
    pieces: Sequence[Piece], *, scale: float, play: str, shared: frozenset[str], token_ids: Sequence[int]
) -> list[int]:
    """Tokens of pieces.

    Args:
        scale: of lengths, above 0 and up to 1.
        play: a session that is played again under another name has other tokens but for `shared`.
        token_ids: to draw from.
    """
    tokens: list[int] = []
    end = 0
    for piece in pieces:
        end += piece.length
        seed = piece.block if piece.block in shared else f"{play}/{piece.block}"
        tokens += random.Random(seed).choices(token_ids, k=round(end * scale) - len(tokens))
    return tokens


def synthetic_sessions(count: int, *, seed: int = 0) -> list[Session]:
    """Draw sessions with the medians of published ones of coding agents.

    43 turns, 142,000 tokens in and 444 out, of which 95 % can be reused; see `Statistics`.
    """
    random_ = random.Random(seed)
    # Every quantile once, so that few sessions have the median of many.
    quantiles = [NormalDist().inv_cdf((number + 0.5) / count) for number in range(count)]
    lengths = [min(240, max(3, round(43 * math.exp(0.8 * quantile)))) for quantile in quantiles]
    random_.shuffle(lengths)
    return [_Drawn(random_, f"session {number}").session(length) for number, length in enumerate(lengths)]


@dataclass(frozen=True)
class _Drawn:
    """Draws one session."""

    random: random.Random
    name: str

    def session(self, num_turns: int) -> Session:
        turns: list[Turn] = []
        text_len = 0
        for number in range(num_turns):
            kept: int | None = None
            new: tuple[Piece, ...] = (Piece(f"{self.name}.{number}", self._around(1500, 1.3, least=32, most=60_000)),)
            if number == 0:
                kept, new = 0, (_TOOLS, Piece(f"{self.name}.{number}", self._around(80_000, 0.6, least=2000)))
            elif text_len + new[0].length > _LONGEST:
                kept, new = _TOOLS.length, (Piece(f"{self.name}.{number}", self._around(100_000, 0.3, least=1000)),)
            turns.append(Turn(kept, new, self._output(), self._think_s(), self._subagents(number)))
            text_len = text_len if kept is None else kept
            text_len += sum(piece.length for piece in new) + turns[-1].output_len
        return Session(self.name, tuple(turns))

    def _subagents(self, number: int) -> tuple[Session, ...]:
        if self.random.random() >= 0.02:
            return ()
        names = [f"{self.name}.{number}{letter}" for letter in "abc"[: self.random.choice((1, 1, 2, 3))]]
        return tuple(Session(name, tuple(self._subagent(name))) for name in names)

    def _subagent(self, name: str) -> Iterator[Turn]:
        yield Turn(0, (_SUBAGENT_TOOLS, Piece(f"{name}.0", self._around(1500, 0.8, least=100))), self._output())
        for number in range(1, self._around(6, 0.6, most=30)):
            piece = Piece(f"{name}.{number}", self._around(3000, 0.8, least=32, most=30_000))
            yield Turn(None, (piece,), self._output(), self._think_s())

    def _output(self) -> int:
        return self._around(444, 1.0, least=16, most=8000)

    def _think_s(self) -> float:
        """A tool's time, or now and then a person's."""
        median_s, spread = (20.0, 1.0) if self.random.random() < 0.1 else (1.5, 1.2)
        return median_s * math.exp(self.random.gauss(0, spread))

    def _around(self, median: float, spread: float, *, least: int = 1, most: int = 150_000) -> int:
        return min(most, max(least, round(median * math.exp(self.random.gauss(0, spread)))))


def read_sessions(path: Path) -> list[Session]:
    """Sessions of a file of either format, or of all .json files of a folder.

    Raises:
        ValueError: a file has another format; the message says where and why.
    """
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"{path} has no .json files")
        return [session for file in files for session in read_sessions(file)]
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        entries = [(f"{path}", entry) for entry in (whole if isinstance(whole, list) else [whole])]
    except ValueError:
        entries = [(f"{path}:{n}", _parsed(line, f"{path}:{n}")) for n, line in enumerate(text.splitlines(), 1) if line]
    turns = [(where, entry) for where, entry in entries if "requests" not in entry]
    nested = [_nested(entry, where) for where, entry in entries if "requests" in entry]
    return [*nested, *_by_line(turns)]


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as cause:
        raise ValueError(f"{where} is no JSON: {cause}") from cause
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no JSON object")
    return entry


def _by_line(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Session]:
    """Lines of turns, in the order of their sessions' first ones."""
    turns: dict[str, list[Turn]] = {}
    for where, entry in entries:
        if "session_id" not in entry:
            raise ValueError(f"{where} has neither requests nor a session_id; benchmarks.serve replays single requests")
        session = turns.setdefault(entry["session_id"], [])
        try:
            blocks = [str(block) for block in entry["hash_ids"]]
            pieces = _pieces(blocks, entry["input_length"], _MOONCAKE_BLOCK, rest=f"{where} rest")
            think_s = entry.get("delay", 0.0) / 1000
            session.append(Turn(None if session else 0, pieces, max(1, entry["output_length"]), think_s))
        except (KeyError, TypeError) as cause:
            raise ValueError(f"{where} is no turn of a session: {cause!r}") from cause
    return [Session(name, tuple(found)) for name, found in turns.items()]


def _nested(entry: Mapping[str, Any], where: str) -> Session:
    try:
        name, block_size = str(entry["id"]), int(entry["block_size"])
        prefix = "" if entry.get("hash_id_scope") == "global" else f"{name}:"
        return _Nested(block_size, prefix).session(name, entry["requests"], parent=())
    except (KeyError, TypeError) as cause:
        raise ValueError(f"{where} is no session: {cause!r}") from cause


@dataclass(frozen=True)
class _Nested:
    """Reads a session whose prompts are given as all of their blocks."""

    block_size: int
    prefix: str

    def session(self, name: str, entries: Sequence[Mapping[str, Any]], *, parent: Sequence[str]) -> Session:
        """Requests in their order; those that overlapped come one after the other.

        Args:
            parent: blocks of the prompt after which a subagent began.
        """
        turns: list[Turn] = []
        before: Sequence[str] = parent
        text_len, idle_from_s = 0, math.inf
        for entry in sorted(entries, key=lambda entry: entry["t"]):
            if entry["type"] == "subagent":
                if turns:  # one before all turns has none to begin after
                    turns[-1] = self._with_subagent(turns[-1], entry, before)
                    idle_from_s = max(idle_from_s, entry["t"] + entry.get("duration_ms", 0) / 1000)
                continue
            blocks = [f"{self.prefix}{block}" for block in entry["hash_ids"]]
            prompt_len = entry["in"]
            same = next((n for n, pair in enumerate(zip(before, blocks, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(before), len(blocks)) if same is None else same
            is_grown = bool(turns) and shared >= len(before) - 1 and prompt_len > text_len
            kept = text_len if is_grown else min(shared * self.block_size, prompt_len - 1)
            rest = f"{name} {len(turns)} rest"
            pieces = _pieces(blocks[kept // self.block_size :], prompt_len - kept, self.block_size, rest=rest)
            think_s = max(0.0, entry["t"] - idle_from_s) if turns else 0.0
            turns.append(Turn(None if is_grown else kept, pieces, max(1, entry["out"]), think_s))
            before, text_len = blocks, prompt_len + turns[-1].output_len
            idle_from_s = entry["t"] + entry.get("api_time", 0.0)
        return Session(name, tuple(turns))

    def _with_subagent(self, turn: Turn, entry: Mapping[str, Any], parent: Sequence[str]) -> Turn:
        subagent = self.session(str(entry["agent_id"]), entry["requests"], parent=parent)
        subagents = (*turn.subagents, subagent) if subagent.turns else turn.subagents
        return replace(turn, subagents=subagents)


def _pieces(blocks: Sequence[str], length: int, block_size: int, *, rest: str) -> tuple[Piece, ...]:
    """Blocks up to a length; what they do not cover is a block named `rest`."""
    pieces = []
    for block in blocks:
        if length > 0:
            pieces.append(Piece(block, min(length, block_size)))
            length -= block_size
    if length > 0:
        pieces.append(Piece(rest, length))
    return tuple(pieces)
