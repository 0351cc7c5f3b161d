"""How MXFP4 experts lie in memory, and the PTX that reads them. The layout keeps the number of instructions small.

bfloat16 has the sign of a code (E2M1) in bit 15, and its exponent and fraction in bits 8 to 6; masked, they are the
code's number times 2^-126. Each half of a word of 32 bits has room for three codes in that pattern, rotated. The four
bits left in it, together with those of another output feature's word, hold the fourth code of both: a shared word.
"""

# Shapes in this file: O output features, K input features in S spans of 128.

from __future__ import annotations

import torch
from torch import Tensor

ROTATIONS = (0, 4, 10)
"""Left rotation of a word for each of the first three planes."""
LAST_ROTATIONS = (6, 12)
"""Left rotations of the shared word for the last plane of the first and of the second half of the output features."""
FREE_BITS = 0x06030603
"""Bits of a word that the first three planes leave free, and of the shared word those of the second half. A word of the
first half holds its part of the shared word there, `_SHIFT` lower."""
_SHIFT = 2
_CODE_BITS = 0x81C081C0


def pack(codes: Tensor) -> Tensor:
    """[..., O, K] E2M1 codes, one per byte -> [..., S, O, 32] int16; O is even.

    Plane p of a span holds features 32 p to 32 p + 31. A word, stored as two int16, has the codes of features 2 j and
    2 j + 1 of planes 0 to 2. Those of plane 3 of output features o and o + O / 2 share the free bits of both words.
    """
    places = codes.unflatten(-1, (-1, 4, 16, 2)).to(torch.int32)
    lanes = (places >> 3 << 15 | (places & 7) << 6).movedim(-3, 0)
    planes = (lanes[..., 0].long() | lanes[..., 1].long() << 16).unflatten(-3, (2, -1))  # [4, ..., 2, O / 2, S, 16]
    words = sum(_rotated_right(plane, by) for plane, by in zip(planes[:3], ROTATIONS, strict=True))
    first, second = (_rotated_right(*one) for one in zip(planes[3].unbind(-4), LAST_ROTATIONS, strict=True))
    shared = first | second
    words += torch.stack(((shared & ~FREE_BITS) >> _SHIFT, shared & FREE_BITS), -4)
    lanes = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2)
    return lanes.flatten(-4, -3).to(torch.int16).transpose(-3, -2).contiguous()


def pack_scales(exponents: Tensor) -> Tensor:
    """[..., O, 4 S] uint8, exponents plus 127, at most 128 -> [..., S, O] int32, one byte per 32 codes of a span.

    Bytes are exponents plus 253, those of bfloat16 for 2^126 times the scale.
    """
    parts = (exponents.to(torch.int64) + 126).unflatten(-1, (-1, 4)).unbind(-1)
    words: Tensor = parts[0] | parts[1] << 8 | parts[2] << 16 | parts[3] << 24
    return words.to(torch.int32).transpose(-2, -1).contiguous()


def plane_ptx(plane: int) -> str:
    """PTX that writes two numbers of one of the first three planes, in bfloat16, to $0.

    Operands: $1 a word, $2 the scales of its output feature in this span.
    """
    return _block(_numbers_ptx(plane, "$1", ROTATIONS[plane], scales="$2", out="$0"))


def last_planes_ptx() -> str:
    """PTX that writes two numbers of the last plane of the first half to $0, and of the second to $1.

    Operands: $2 and $3 the words of both halves, $4 and $6 their scales.
    """
    return _block(
        f"shl.b32 d, $2, {_SHIFT};",
        f"lop3.b32 d, $3, d, {FREE_BITS:#010x}, 0xe4;",  # $3 where the mask is set, else d
        _numbers_ptx(3, "d", LAST_ROTATIONS[0], scales="$4", out="$0"),
        _numbers_ptx(3, "d", LAST_ROTATIONS[1], scales="$6", out="$1"),
    )


def _numbers_ptx(plane: int, word: str, rotation: int, *, scales: str, out: str) -> str:
    rotate = f"shf.l.wrap.b32 a, {word}, {word}, {rotation};"
    if not rotation:
        rotate = f"mov.b32 a, {word};"
    elif not _CODE_BITS & ((1 << rotation) - 1):  # differs only in bits that are masked, and is faster
        rotate = f"shl.b32 a, {word}, {rotation};"
    # A scale's byte, moved by 7, is 2^126 times the scale in bfloat16.
    return f"""
        prmt.b32 f, {scales}, 0, 0x{plane}4{plane}4;
        shr.b32 f, f, 1;
        {rotate}
        and.b32 a, a, {_CODE_BITS:#x};
        mul.rn.bf16x2 {out}, a, f;"""


def _block(*instructions: str) -> str:
    return "\n".join(("{", ".reg .b32 a, d, f;", *instructions, "}"))


def _rotated_right(words: Tensor, by: int) -> Tensor:
    """Of 32 bits, in int64."""
    return (words >> by | words << 32 - by) & 0xFFFFFFFF
