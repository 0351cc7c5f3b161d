"""What the tests compare with stays in plain torch where kernels are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_installed_kernels_are_not_called(tmp_path: Path) -> None:
    package = tmp_path / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def chunk_gated_delta_rule(q):\n    return 'kernel'\n")
    ask = (
        "from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule\n"
        "try:\n    print(rule(q=1))\nexcept TypeError:\n    print('plain torch')\n"
    )
    assert answer(ask, tmp_path) == "kernel"
    assert answer(f"import tests.oracle.golden\n{ask}", tmp_path) == "plain torch"
    assert answer(f"import tests.oracle.families\n{ask}", tmp_path) == "plain torch"


def answer(code: str, folder: Path) -> str:
    path = os.pathsep.join((str(folder), str(Path(__file__).parents[2])))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
