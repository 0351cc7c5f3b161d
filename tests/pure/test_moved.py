"""Bytes and seconds of moves between device and host."""

from __future__ import annotations

from pathlib import Path

from raycache.cache.moved import Moved
from raycache.parallel.board import AckBoard, Acks, Lane


def test_bytes_are_those_of_all_units() -> None:
    moved = Moved({"full": 100, "state": 7})
    moved.count("saved", 3, {"state": [4]})
    moved.count("loaded", 2, {})
    assert moved.figures() == {"saved_bytes": 307, "loaded_bytes": 200, "save_s": 0.0, "load_s": 0.0}


def test_seconds_go_on_over_a_new_gang_whose_clock_begins_anew() -> None:
    moved = Moved({})
    moved.take_times(Acks(save_s=2.0, load_s=1.0))
    moved.take_times(Acks(save_s=3.0, load_s=1.0))
    moved.begin_anew(Acks())
    moved.take_times(Acks(save_s=0.5, load_s=0.25))
    assert (moved.figures()["save_s"], moved.figures()["load_s"]) == (3.5, 1.25)


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    board = AckBoard.create(2, directory=tmp_path)
    board.post(0, Lane.SAVE_US, 1_500_000)
    board.post(1, Lane.SAVE_US, 500_000)
    board.post(1, Lane.LOAD_US, 250_000)
    assert (board.acks().save_s, board.acks().load_s) == (1.5, 0.25)
