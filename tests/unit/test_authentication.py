"""The file of Ray's token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
from actors.authentication import keep_token_private
keep_token_private()
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
ensure_token_if_auth_enabled()  # as ray.init does
"""


def modes(home: Path, **variables: str) -> dict[str, int]:
    """Start of Ray in a process with this home; names and modes of the files in ~/.ray."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = ["sh", "-c", 'umask 022; exec "$0" -c "$1"', sys.executable, _RUN]
    subprocess.run(command, env=env, check=True, timeout=100)
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.glob(".ray/*")}


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token"}])
def test_a_new_token_is_private_and_the_one_that_ray_uses(tmp_path: Path, mode: dict[str, str]) -> None:
    assert modes(tmp_path, **mode) == {"auth_token": 0o600}
    token = (tmp_path / ".ray" / "auth_token").read_text()
    assert len(bytes.fromhex(token)) == 32
    modes(tmp_path, **mode)
    assert (tmp_path / ".ray" / "auth_token").read_text() == token, "kept"


def test_a_token_that_others_can_read_is_made_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("f" * 64)
    path.chmod(0o644)
    assert modes(tmp_path, RAY_AUTH_MODE="token") == {"auth_token": 0o600}
    assert path.read_text() == "f" * 64


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"])
def test_no_file_is_created_that_ray_would_not_create(tmp_path: Path, name: str) -> None:
    other = tmp_path / "token"
    other.write_text("f" * 64)
    value = {"RAY_AUTH_TOKEN": "f" * 64, "RAY_AUTH_TOKEN_PATH": str(other), "RAY_AUTH_MODE": "disabled"}[name]
    assert modes(tmp_path, **{name: value}) == {}
