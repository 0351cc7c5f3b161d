"""Weights of a model directory, and the numbers that matrices stand for which stay quantised."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from raycache.checkpoint.quantisation import read_quantisation
from raycache.checkpoint.tensor_files import Checkpoint
from raycache.checkpoint.weights import CheckpointWeights
from raycache.layers.linear import Matrix
from raycache.layers.quantised import GROUP, Fp8Matrix
from raycache.layers.quantised_experts import ExpertMatrices, Fp8Matrices, MxMatrices

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-number for number in _POSITIVE))


_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
"""Of the bits of each code in a word, from the sign on."""


def open_weights(model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> CheckpointWeights:
    return CheckpointWeights(Checkpoint(model_dir), read_quantisation(model_dir), dtype=dtype, device=device)


def _code(bits: list[Tensor], places: tuple[int, ...]) -> Tensor:
    return sum((bits[place] << 3 - i for i, place in enumerate(places)), torch.zeros_like(bits[0]))


def dequantised(matrix: Matrix | ExpertMatrices, *, num_inputs: int = 0) -> Tensor:
    """[O, I] or [E, O, I], float32; I is `num_inputs` for experts."""
    if isinstance(matrix, Fp8Matrix):
        numbers = matrix._codes.float().unflatten(1, (-1, GROUP)) * matrix._scales.mT[..., None]
        return numbers.flatten(1)[:, matrix._offset : matrix._offset + matrix.shape[1]]
    if isinstance(matrix, Fp8Matrices):
        scales = matrix._scales.repeat_interleave(matrix._rows_per_scale, 1)[:, : matrix._codes.shape[1]]
        numbers = (matrix._codes.float().unflatten(2, (-1, GROUP)) * scales[..., None]).flatten(2)
    else:
        assert isinstance(matrix, MxMatrices)
        table = torch.tensor(E2M1, device=matrix._codes.device)
        bits = [(matrix._codes.int() >> bit) & 1 for bit in range(16)]
        planes = torch.stack([table[_code(bits, places)] for places in _PLACES], dim=3)
        exponents = torch.stack([(matrix._scales >> 8 * group) & 255 for group in range(4)], dim=3).float() - 253
        numbers = (planes * exponents.exp2()[..., None]).flatten(3)  # [E, S, O, 128]
        numbers = numbers.transpose(1, 2).flatten(2)
    return numbers[..., matrix._offset : matrix._offset + num_inputs]
