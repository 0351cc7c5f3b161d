"""Weights that are read ahead to a GPU: the bytes of the files, whatever the GPU does meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycache.checkpoint import file_reads, read_ahead
from raycache.checkpoint.file_reads import OpenFile
from raycache.checkpoint.read_ahead import Read, ReadAhead

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 3000, 1024
LONG = 20_000_000  # cycles, a hundredth of a second


@pytest.mark.parametrize("ahead_bytes", [1, 20 << 20, 1 << 30])
@pytest.mark.parametrize("num_threads", [1, 8])
def test_tensors_have_the_numbers_of_their_files(
    tmp_path: Path, ahead_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are given back while the GPU is busy, so that their memory is soon another one's; some are dropped."""
    monkeypatch.setattr(file_reads, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", ahead_bytes)
    device = torch.device("cuda:0")
    numbers = torch.arange(12 * ROWS * COLUMNS, dtype=torch.int32).reshape(12, ROWS, COLUMNS)
    (tmp_path / "numbers").write_bytes(numbers.numpy().tobytes())
    file = OpenFile(tmp_path / "numbers")
    whole, left = range(COLUMNS), range(COLUMNS // 2)
    plan = [
        Read(file, 0, torch.int32, tuple(numbers.shape), (range(i, i + 1), range(ROWS), columns))
        for i in range(12)
        for columns in (whole, left)
    ]
    with ReadAhead(plan, device=device, num_threads=num_threads, on_bytes=lambda done, total: None) as ahead:
        for turn, read in enumerate(plan):
            if turn % 5 == 3:
                continue
            torch.cuda._sleep(LONG)
            found = ahead.take(read)
            wanted = numbers[tuple(slice(run.start, run.stop) for run in read.box)]
            kept = found + 0
            del found
            assert kept.device == device and torch.equal(kept.cpu(), wanted)
