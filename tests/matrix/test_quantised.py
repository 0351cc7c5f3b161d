"""Quantised checkpoints in published form: the cache keeps and gives what the dequantised model leaves behind.

`python -m tests.matrix --families deepseek_v3_fp8,gpt_oss_mxfp4` runs all of it.
"""

from __future__ import annotations

import pytest

from raycache.parallel.sharding import Split
from tests.matrix.chosen import check_row
from tests.matrix.matrix import Workbench


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param("deepseek_v3_fp8", Split(tp=2, pp=2, cp=2), id="block FP8 over all three", marks=pytest.mark.long),
        pytest.param("gpt_oss_mxfp4", Split(tp=2, pp=2, cp=2), id="MXFP4 over all three"),
        pytest.param("deepseek_v3_fp8", Split(cp=4), id="block FP8 out of host and storage"),
    ],
)
def test_logits_and_reuse_are_right(bench: Workbench, split: Split, family: str) -> None:
    check_row(bench, family, split)
