"""The ack board: numbers that ranks post and the decider reads."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycache.errors import ConfigError
from raycache.parallel.board import AckBoard, Lane


@pytest.fixture
def board(tmp_path: Path) -> Iterator[AckBoard]:
    made = AckBoard.create(4, directory=tmp_path)
    yield made
    made.unlink()


def test_only_its_user_can_open_a_board(board: AckBoard) -> None:
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o600


def test_a_new_board_says_that_nobody_has_done_anything(board: AckBoard) -> None:
    assert board.lines.shape == (4, len(Lane))
    assert not board.lines.any()
    assert all(board.low(lane) == 0 for lane in Lane)


def test_a_post_shows_in_another_mapping_of_the_same_file(board: AckBoard) -> None:
    theirs = AckBoard(board.path, num_ranks=4)
    theirs.post(2, Lane.STEP, 2**62)
    assert board.lines[2, Lane.STEP] == 2**62
    assert board.lines.sum() == 2**62


def test_a_post_shows_in_another_process(board: AckBoard) -> None:
    code = (
        "import sys; from pathlib import Path; from raycache.parallel.board import AckBoard, Lane;"
        "AckBoard(Path(sys.argv[1]), num_ranks=4).post(3, Lane.LOADED, 1000)"
    )
    subprocess.run([sys.executable, "-c", code, str(board.path)], check=True, cwd=Path(__file__).parents[2])
    assert board.lines[3, Lane.LOADED] == 1000


def test_mappings_outlive_the_file(board: AckBoard) -> None:
    theirs = AckBoard(board.path, num_ranks=4)
    board.unlink()
    board.unlink()
    assert not board.path.exists()
    theirs.post(0, Lane.STEP, 5)
    assert board.lines[0, Lane.STEP] == 5


def test_low_is_what_all_have_reached(board: AckBoard) -> None:
    for rank, step in enumerate((7, 5, 9, 6)):
        board.post(rank, Lane.STEP, step)
    assert board.low(Lane.STEP) == 5


@pytest.fixture
def gang(board: AckBoard) -> AckBoard:
    """A board that all ranks have joined."""
    for rank in range(4):
        board.post(rank, Lane.JOINED, 1)
    return board


def test_ranks_that_never_joined_this_board_are_not_suspected(board: AckBoard) -> None:
    board.post(1, Lane.JOINED, 1)
    assert board.suspects(8) == [1]


def test_who_is_silent_is_suspected_even_after_its_part_of_the_step(gang: AckBoard) -> None:
    gang.post(0, Lane.STEP, 9)
    for rank in (1, 2, 3):
        gang.post(rank, Lane.LOST, 8)
    assert gang.suspects(8) == [0]


def test_who_is_late_and_silent_is_suspected(gang: AckBoard) -> None:
    for rank, step in enumerate((8, 7, 8, 7)):
        gang.post(rank, Lane.STEP, step)
    assert gang.suspects(8) == [1, 3]


def test_who_lost_a_peer_is_a_victim(gang: AckBoard) -> None:
    for rank in (0, 1, 3):
        gang.post(rank, Lane.LOST, 8)
    assert gang.suspects(8) == [2]


def test_who_failed_is_to_blame_before_those_who_are_silent(gang: AckBoard) -> None:
    gang.post(0, Lane.LOST, 8)
    gang.post(3, Lane.FAILED, 8)
    assert gang.suspects(8) == [3]


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.*writable"):
        AckBoard.create(2, directory=tmp_path / "nowhere")


def test_weights_are_told_once_all_ranks_know_what_they_read() -> None:
    board = AckBoard.create(2)
    board.unlink()
    board.post(0, Lane.TO_LOAD, 300)
    board.post(0, Lane.LOADED, 100)
    assert board.loaded() == (0, 0)
    board.post(1, Lane.TO_LOAD, 700)
    assert board.loaded() == (100, 1000)
