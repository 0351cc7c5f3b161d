"""Division and powers of two, rounded up.

Triton's functions also unwrap the constants of its compiler, which costs more than the arithmetic, and a step of many
layers rounds hundreds of times.
"""

from __future__ import annotations


def ceil_div(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()
