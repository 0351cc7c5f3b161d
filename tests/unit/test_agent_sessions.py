"""Sessions of agents: the formats, what is drawn, and the tokens that they become."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sessions import (
    Piece,
    Session,
    Turn,
    describe,
    draw,
    read_sessions,
    shared_blocks,
    synthetic_sessions,
    within,
)

Text = list[tuple[str, int]]


def texts(session: Session, text: Text) -> Iterator[tuple[Text, Text]]:
    """Prompts and what stands after their answers, a token being the name of its block and its place in it."""
    for number, turn in enumerate(session.turns):
        prompt = text[: turn.kept] + [(piece.block, i) for piece in turn.new for i in range(piece.length)]
        text = [*prompt, *((f"{session.name} says {number}", i) for i in range(turn.output_len))]
        yield prompt, text
        for subagent in turn.subagents:
            yield from texts(subagent, text)


def reused(sessions: Sequence[Session]) -> tuple[int, int]:
    """Tokens of the longest prefix that stood at the beginning of an earlier text, and all tokens, by definition."""
    before: list[Text] = []
    found = total = 0
    for session in sessions:
        for prompt, text in texts(session, []):
            found += max((_common(prompt, other) for other in before), default=0)
            total += len(prompt)
            before.append(text)
    return found, total


def _common(a: Text, b: Text) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@st.composite
def some_sessions(random_: Any) -> list[Session]:
    """Sessions that begin with the same block or not, with new text in each turn."""
    names = itertools.count()

    def session(depth: int) -> Session:
        turns = []
        for number in range(random_(st.integers(1, 4))):
            own = Piece(f"own {next(names)}", random_(st.integers(1, 9)))
            kept = random_(st.sampled_from([None, 0, 3])) if number or depth else 0
            first = Piece(random_(st.sampled_from(["tools", "more tools"])), 6)
            subagents = tuple(session(depth + 1) for _ in range(random_(st.integers(0, 1)) if depth < 2 else 0))
            turns.append(Turn(kept, (own,) if kept != 0 else (first, own), random_(st.integers(1, 5)), 0.0, subagents))
        return Session(f"session {next(names)}", tuple(turns))

    return [session(0) for _ in range(random_(st.integers(1, 3)))]


@given(some_sessions())
def test_what_is_reusable_is_what_stood_at_the_beginning_of_an_earlier_text(sessions: list[Session]) -> None:
    found, total = reused(sessions)
    assert describe(sessions).reusable == pytest.approx(found / total)


@pytest.mark.parametrize("seed", range(5))
def test_drawn_sessions_have_the_published_medians(seed: int) -> None:
    drawn = describe(synthetic_sessions(100, seed=seed))
    assert drawn.turns == 43
    assert drawn.prompt_tokens == pytest.approx(142_000, rel=0.1)
    assert drawn.output_tokens == pytest.approx(444, rel=0.1)
    assert drawn.reusable == pytest.approx(0.95, abs=0.01)
    assert drawn.requests > 100 * 43


def test_drawn_sessions_are_repeatable_and_have_subagents_and_think_times() -> None:
    sessions = synthetic_sessions(20, seed=3)
    assert sessions == synthetic_sessions(20, seed=3) != synthetic_sessions(20, seed=4)
    turns = [turn for session in sessions for turn in session.turns]
    assert any(turn.subagents for turn in turns)
    assert all(turn.think_s > 0 for turn in turns)
    assert shared_blocks(sessions) == {"tools", "tools of subagents"}


def test_a_shared_block_has_the_same_tokens_in_every_play_and_others_do_not() -> None:
    pieces = (Piece("tools", 100), Piece("own", 60))

    def drawn(play: str, scale: float = 1.0) -> list[int]:
        return draw(pieces, scale=scale, play=play, shared=frozenset({"tools"}), token_ids=range(10**6))

    one, other = drawn("1"), drawn("2")
    assert len(one) == 160 and one == drawn("1")
    assert one[:100] == other[:100] and not set(one[100:]) & set(other[100:])
    assert drawn("1", 0.25) == one[:25] + one[100:115]


@given(st.lists(st.integers(0, 30), max_size=20), st.floats(0.01, 1))
def test_lengths_are_rounded_for_a_prompt_as_a_whole(lengths: list[int], scale: float) -> None:
    pieces = [Piece(str(number), length) for number, length in enumerate(lengths)]
    tokens = draw(pieces, scale=scale, play="", shared=frozenset(), token_ids=range(9))
    assert len(tokens) == round(sum(lengths) * scale)


def test_a_session_is_cut_where_it_no_longer_fits() -> None:
    turns = tuple(Turn(None if n else 0, (Piece(str(n), 100),), 20) for n in range(10))
    short = Session("sub", (turns[0],))
    session = Session("s", (*turns[:4], Turn(None, (Piece("x", 100),), 20, 0.0, (short,)), *turns[5:]))
    assert within(session, 10_000) == session
    assert within(session, 500).turns == session.turns[:4]
    assert within(session, 250, scale=0.5).turns == session.turns[:3]
    for found in synthetic_sessions(10):
        longest = max((len(prompt) for prompt, _ in texts(within(found, 100_000), [])), default=0)
        assert longest <= 100_000


def request(t: float, ids: Sequence[int], length: int, out: int = 10, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": length, "out": out, "hash_ids": list(ids), "api_time": 1.0, **more}


def nested(*requests: dict[str, Any], name: str = "trace") -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}


def test_a_nested_session_is_read(tmp_path: Path) -> None:
    subagent = {
        "t": 3.0,
        "type": "subagent",
        "agent_id": "explore",
        "duration_ms": 5000,
        "requests": [request(3.5, [1, 9], 100), request(5.0, [1, 10, 11], 180)],
    }
    entry = nested(
        request(0.0, [1, 2, 3], 150),
        request(2.5, [1, 2, 4, 5], 250),  # the third block was not full, so it has another name now
        subagent,
        request(10.0, [1, 2, 4, 6, 7], 300),
        request(12.0, [1, 20], 128),  # a history that was rewritten
    )
    (tmp_path / "trace.json").write_text(json.dumps(entry))
    (session,) = read_sessions(tmp_path)
    turns = session.turns
    assert [turn.kept for turn in turns] == [0, None, None, 64]
    assert [sum(piece.length for piece in turn.new) for turn in turns] == [150, 90, 40, 64]
    assert [turn.think_s for turn in turns] == [0.0, 1.5, 2.0, 1.0]  # from the end of the turn, or of its subagent
    assert [len(turn.subagents) for turn in turns] == [0, 1, 0, 0]
    (explore,) = turns[1].subagents
    assert [turn.kept for turn in explore.turns] == [64, None]  # it begins as its parent does
    assert [piece.block for piece in turns[0].new] == ["trace:1", "trace:2", "trace:3"]
    assert [len(prompt) for prompt, _ in texts(session, [])] == [150, 250, 100, 180, 300, 128]


def test_sessions_by_line_grow_by_what_each_turn_adds(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 2], "timestamp": 0.0},
        {"session_id": "b", "input_length": 600, "output_length": 20, "hash_ids": [0, 9], "timestamp": 50.0},
        {"session_id": "a", "input_length": 700, "output_length": 40, "hash_ids": [3], "delay": 2500.0},
    ]
    path = tmp_path / "dataset.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    a, b = read_sessions(path)
    assert (a.name, b.name) == ("a", "b")
    assert [len(prompt) for prompt, _ in texts(a, [])] == [1100, 1100 + 30 + 700]
    assert a.turns[1].think_s == 2.5 and a.turns[1].output_len == 40
    assert shared_blocks([a, b]) == {"0"}
    assert describe([a, b]).reusable == pytest.approx((1130 + 512) / (1100 + 1830 + 600))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"session_id": "a"}\n{', "x.jsonl:2"),
        ("{}\n[]", "x.jsonl:2"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}', "benchmarks.serve"),
        ('{"session_id": "a", "input_length": 4}', "hash_ids"),
        ('{"id": "a", "requests": []}', "block_size"),
        ('{"id": "a", "block_size": 64, "requests": [{"t": 0, "type": "n"}]}', "hash_ids"),
    ],
)
def test_what_is_no_session_is_named(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=where):
        read_sessions(path)


def test_a_folder_without_traces_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.json files"):
        read_sessions(tmp_path)
