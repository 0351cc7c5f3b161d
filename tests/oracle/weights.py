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


_PLACES = (15, 8, 7, 6)
"""Of a code's bits in each 16 bits of a word that is rotated for its plane, from the sign on."""
_FROM_SECOND = [bit for bit in range(32) if bit % 16 in (0, 1, 9, 10)]
"""Bits of what two words share that come from the second half; those of the first half are 2 lower there."""


def open_weights(model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> CheckpointWeights:
    return CheckpointWeights(Checkpoint(model_dir), read_quantisation(model_dir), dtype=dtype, device=device)


def _codes(bits: list[Tensor], rotation: int) -> Tensor:
    """Two codes of 4 bits, given 32 bits: [...] each -> [..., 2]."""
    found = []
    for half in range(2):
        places = [(16 * half + place - rotation) % 32 for place in _PLACES]
        found.append(sum((bits[place] << 3 - i for i, place in enumerate(places)), torch.zeros_like(bits[0])))
    return torch.stack(found, dim=-1)


def _mx_codes(words: Tensor) -> Tensor:
    """[E, S, O, 32] -> [E, S, O, 4, 32], as `mx_packing.pack` says."""
    low, high = (words.long() & 0xFFFF).unflatten(-1, (16, 2)).unbind(-1)
    halves = [[(half >> bit) & 1 for bit in range(32)] for half in (low | high << 16).chunk(2, dim=2)]
    shared = [halves[1][bit] if bit in _FROM_SECOND else halves[0][bit - 2] for bit in range(32)]
    found = []
    for half, rotation in zip(halves, (6, 12), strict=True):
        planes = [*(_codes(half, by) for by in (0, 4, 10)), _codes(shared, rotation)]
        found.append(torch.stack(planes, dim=3).flatten(4))
    return torch.cat(found, dim=2)


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
        planes = table[_mx_codes(matrix._codes)]
        exponents = torch.stack([(matrix._scales >> 8 * group) & 255 for group in range(4)], dim=3).float() - 253
        numbers = (planes * exponents.exp2()[..., None]).flatten(3)  # [E, S, O, 128]
        numbers = numbers.transpose(1, 2).flatten(2)
    return numbers[..., matrix._offset : matrix._offset + num_inputs]
