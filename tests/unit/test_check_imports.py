"""What a start imports: seconds that each process pays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.tiny import make_tiny

_CODE = """
import sys
from raycache.config import Config
from raycache.deployment.deployment import check_model
import raycache.rank.build, raycache.rank.run
check_model(Config(model=sys.argv[1]))
heavy = {"torch._dynamo", "torch._inductor", "transformers", "ray", "pydantic"}
print(*sorted(heavy & sys.modules.keys()))
"""


def test_a_rank_and_the_check_of_a_model_leave_compilers_and_servers_alone(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("module", ["actors.engine", "launch.cli.job", "launch.cli.cluster"])
def test_ray_and_ranks_are_started_before_torch_is_imported(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False"]


def test_ray_is_started_before_the_server_is_imported() -> None:
    heavy = "{'numpy', 'pydantic', 'uvicorn', 'jinja2', 'llguidance'}"
    code = f"import sys, launch.cli.cluster; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []
