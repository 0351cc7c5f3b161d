"""Small copies where there is no GPU; with one, see tests/gpu/test_uploads.py."""

from __future__ import annotations

import numpy as np
import torch

from raycache.parallel.uploads import Uploads, upload, uploaded


def test_a_tensor_for_the_cpu_stays_where_it_is() -> None:
    numbers = torch.arange(5)
    assert uploaded(numbers, torch.device("cpu")) is numbers


def test_a_buffer_on_the_cpu_is_filled() -> None:
    to = torch.zeros(5, dtype=torch.int64)
    upload(torch.arange(5), to)
    assert to.tolist() == [0, 1, 2, 3, 4]


def test_arrays_for_the_cpu_are_there_at_once() -> None:
    uploads = Uploads(torch.device("cpu"))
    assert uploads.add(np.arange(6, dtype=np.int32).reshape(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert uploads.add(np.empty(0, np.int64)).tolist() == []
    uploads.send()
