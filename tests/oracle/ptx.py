"""Runs the few PTX instructions that convert MXFP4 codes, on registers of 32 bits that are Python's integers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

_ALL = 0xFFFFFFFF


def run(text: str, operands: Sequence[int], *, num_outputs: int) -> list[int]:
    """Run a block of instructions.

    Args:
        text: instructions that each end with a semicolon.
        operands: values of $n, from $num_outputs on.
    Returns:
        Values of $0 and so on.
    """
    registers = {f"${num_outputs + number}": value for number, value in enumerate(operands)}
    for line in text.replace("{", "").replace("}", "").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith(".reg"):
            continue
        target, *given = (one.strip() for one in rest.split(","))
        values = [registers[one] if one in registers else int(one, 0) for one in given]
        registers[target] = _INSTRUCTIONS[name](*values) & _ALL
    return [registers[f"${number}"] for number in range(num_outputs)]


def bfloat16(lane: int) -> float:
    """The number of 16 bits."""
    (number,) = struct.unpack("<f", struct.pack("<I", lane << 16))
    return float(number)


def _permuted(low: int, high: int, selector: int) -> int:
    source = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * at & 7] for at in range(4)), "little")


def _combined(a: int, b: int, c: int, table: int) -> int:
    found = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        found |= (table >> index & 1) << bit
    return found


def _multiplied(a: int, b: int) -> int:
    """Two products in bfloat16, which have to be exact."""
    found = 0
    for at in (0, 16):
        product = bfloat16(a >> at & 0xFFFF) * bfloat16(b >> at & 0xFFFF)
        (bits,) = struct.unpack("<I", struct.pack("<f", product))
        assert bits & 0xFFFF == 0 and math.isfinite(product), f"{product} is not a number of bfloat16"
        found |= bits >> 16 << at
    return found


_INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, by: a << by,
    "shr.b32": lambda a, by: a >> by,
    "shf.l.wrap.b32": lambda low, high, by: (high << 32 | low) << (by & 31) >> 32,
    "prmt.b32": _permuted,
    "lop3.b32": _combined,
    "mul.rn.bf16x2": _multiplied,
}
"""By the PTX ISA, without what is not needed: modes of `prmt`, rounding."""
