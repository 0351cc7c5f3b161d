"""XXH3-64 of many envelopes on the device, at a hundred times the speed of the link to the host.

XXH3 ("xxHash fast digest algorithm", XXH3 of more than 240 bytes) reads stripes of 8 lanes of 8 bytes, and mixes its 8
sums after every 16 stripes:

    sums = start
    of each block of 1024 bytes:    sums += what its stripes add;  sums = mix(sums)       (the last one is not mixed)
    checksum = merge(sums, length)

The contribution of a block's stripes does not depend on earlier blocks, so it is accumulated in any order as bytes
arrive; only the mixing is sequential, over a 16th of the bytes. Envelopes consist of whole stripes; the last stripe has
a key of its own.

Imports Triton: only what runs on CUDA may import this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes in this file: U units, K blocks of an envelope.

STRIPE = 64
"""Bytes; envelopes are multiples of it."""

MIN_BYTES = 241
"""XXH3 uses another algorithm for shorter inputs."""

_BLOCK = 1024
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_LAST_KEY, _MIX_KEY, _MERGE_KEY = 192 - STRIPE - 7, 192 - STRIPE, 11
"""Offsets in the secret of the keys for the last stripe, for mixing and for merging."""

_TILE, _NUM_WARPS = 16, 8  # blocks that a program reads at once, 2 KiB for each of its warps


class Stripes(NamedTuple):
    """A run of an envelope, in every row of a buffer.

    Attributes:
        offset: in the row, bytes, a multiple of 8.
        first: its first stripe in the envelope.
        num_stripes: how many.
    """

    offset: int
    first: int
    num_stripes: int


class DeviceChecksums:
    """Checksums of envelopes of one length, from their parts in any order.

    Args:
        num_bytes: of an envelope, a multiple of `STRIPE`, at least `MIN_BYTES`.
        device: to work on.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert num_bytes % STRIPE == 0 and num_bytes >= MIN_BYTES, "other envelopes have another kind of checksum"
        self._num_stripes = num_bytes // STRIPE
        self.num_blocks = -(-num_bytes // _BLOCK)
        words = np.frombuffer(_SECRET, "<u8")
        unaligned = (np.frombuffer(_SECRET, "<u8", 8, offset) for offset in (_LAST_KEY, _MERGE_KEY))
        length = num_bytes * _PRIME64[0] & 2**64 - 1
        keys = np.concatenate([words, *unaligned, np.array([*_START, length], "<u8")])
        self._keys = torch.from_numpy(keys.view(np.int64)).to(device)

    def zeros(self, num_units: int) -> Tensor:
        """Sums [U, K, 8], int64, to add to."""
        return torch.zeros((num_units, self.num_blocks, 8), dtype=torch.int64, device=self._keys.device)

    def add(self, sums: Tensor, rows: Tensor, runs: Tensor, *, num_programs: int) -> None:
        """Add runs of many envelopes to their sums; given to the current stream.

        Args:
            sums: [U, K, 8], int64, contiguous; zeros before the first run of an envelope.
            rows: [U, bytes], uint8, a run of each envelope at the same place of its row; rows a multiple of 8 apart.
            runs: `Stripes` [runs, 3], int64, on the device.
            num_programs: how many thread blocks share the work.
        """
        words = rows.view(torch.int64)
        _add[(num_programs,)](
            words,
            sums,
            runs,
            self._keys,
            len(runs),
            len(rows),
            words.stride(0),
            self._num_stripes,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )

    def finish(self, sums: Tensor) -> Tensor:
        """Checksums [U], int64, of envelopes all of whose runs were added; given to the current stream."""
        checksums = torch.empty(len(sums), dtype=torch.int64, device=sums.device)
        if len(sums):
            _finish[(len(sums),)](sums, self._keys, checksums, self.num_blocks, num_warps=1)
        return checksums


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_runs", "num_units", "row_words", "num_stripes"],
    do_not_specialize_on_alignment=["words", "sums", "runs"],
)
def _add(
    words: tl.tensor,
    sums: tl.tensor,
    runs: tl.tensor,
    keys: tl.tensor,
    num_runs: tl.tensor,
    num_units: tl.tensor,
    row_words: tl.tensor,
    num_stripes: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """What stripes add to the sums of their blocks; items are (unit, so many blocks of a run)."""
    num_blocks = tl.cdiv(num_stripes, 16)
    lanes = tl.arange(0, 8)
    in_block = tl.arange(0, 16)[None, :, None]
    for run in range(num_runs):
        at, first, count = tl.load(runs + 3 * run) // 8, tl.load(runs + 3 * run + 1), tl.load(runs + 3 * run + 2)
        num_tiles = tl.cdiv(first + count - first // 16 * 16, 16 * TILE)
        for item in range(tl.program_id(0), num_units * num_tiles, tl.num_programs(0)):
            unit = item // num_tiles
            block = first // 16 + item % num_tiles * TILE + tl.arange(0, TILE)
            stripe = block[:, None, None] * 16 + in_block
            inside = (stripe >= first) & (stripe < first + count) & (lanes >= 0)[None, None, :]
            value = tl.load(words + unit * row_words + at + (stripe - first) * 8 + lanes[None, None, :], inside, 0)
            key = tl.load(keys + tl.where(stripe == num_stripes - 1, 24, in_block) + lanes[None, None, :])
            mixed = value.to(tl.uint64, bitcast=True) ^ key.to(tl.uint64, bitcast=True)
            product = tl.where(inside, ((mixed & 0xFFFFFFFF) * (mixed >> 32)).to(tl.int64, bitcast=True), 0)
            into = sums + (unit * num_blocks + block[:, None]) * 8
            tl.atomic_add(
                into + lanes[None, :], tl.sum(product, axis=1), mask=block[:, None] < num_blocks, sem="relaxed"
            )
            tl.atomic_add(
                into + (lanes ^ 1)[None, :], tl.sum(value, axis=1), mask=block[:, None] < num_blocks, sem="relaxed"
            )


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]
def _finish(sums: tl.tensor, keys: tl.tensor, checksums: tl.tensor, num_blocks: tl.tensor) -> None:
    """Mix block after block of one envelope, then merge."""
    unit = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, 8)
    row = sums + unit * num_blocks * 8 + lanes
    mix_key = tl.load(keys + 16 + lanes).to(tl.uint64, bitcast=True)
    total = tl.load(keys + 40 + lanes).to(tl.uint64, bitcast=True)
    for block in tl.range(0, num_blocks - 1, loop_unroll_factor=32):
        total += tl.load(row + block * 8).to(tl.uint64, bitcast=True)
        total = (total ^ (total >> 47) ^ mix_key) * 0x9E3779B1
    total += tl.load(row + (num_blocks - 1) * 8).to(tl.uint64, bitcast=True)
    merged = total ^ tl.load(keys + 32 + lanes).to(tl.uint64, bitcast=True)
    low, high = tl.split(tl.reshape(merged, (4, 2)))
    result = tl.sum((low * high) ^ tl.umulhi(low, high), axis=0) + tl.load(keys + 48).to(tl.uint64, bitcast=True)
    result = (result ^ (result >> 37)) * 0x165667919E3779F9
    tl.store(checksums + unit, (result ^ (result >> 32)).to(tl.int64, bitcast=True))
